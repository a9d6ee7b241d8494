"""Rows for model, context, memory, threads and devices (flag notes, sections 6 and 7)."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel, parse_float
from specdec_cli.flags.values import comma_list


def parse_rope_scale(text: str) -> float:
    """A context expansion factor, stored as the frequency factor that is its inverse."""
    value = parse_float(text)
    if not value > 0:
        raise ValueError(f"must be greater than 0, got {text}")
    return 1.0 / value


def parse_overrides(text: str) -> tuple[str, ...]:
    """`KEY=TYPE:VALUE,...`, each of them checked."""
    from specdec.resources import parse_override

    parts = comma_list(text)
    for part in parts:
        parse_override(part)
    return parts


MODEL = Panel(
    "Model",
    (
        Flag("model.path", ("--model", "-m"), "The target's GGUF file.", "LLAMA_ARG_MODEL"),
        Flag(
            "model.hf_repo",
            ("--hf-repo", "-hf", "-hfr"),
            "Target from the Hugging Face hub, user/repo[:quant].",
            "LLAMA_ARG_HF_REPO",
        ),
        Flag(
            "model.hf_file",
            ("--hf-file", "-hff"),
            "Exact file in that repository.",
            "LLAMA_ARG_HF_FILE",
        ),
        Flag("model.hf_token", ("--hf-token", "-hft"), "Token for the hub.", "HF_TOKEN"),
        Flag(
            "model.url",
            ("--model-url", "-mu"),
            "Address to download the target from.",
            "LLAMA_ARG_MODEL_URL",
        ),
        Flag("model.offline", ("--offline",), "Use downloaded files only.", "LLAMA_ARG_OFFLINE"),
        Flag(
            "model.n_ctx",
            ("--ctx-size", "-c"),
            "Context length in tokens; 0 = from the model.",
            "LLAMA_ARG_CTX_SIZE",
        ),
        Flag(
            "model.n_batch",
            ("--batch-size", "-b"),
            "Prompt tokens per step.",
            "LLAMA_ARG_BATCH",
        ),
        Flag(
            "model.n_ubatch",
            ("--ubatch-size", "-ub"),
            "Prompt tokens per forward pass; native kernels: 128 at most.",
            "LLAMA_ARG_UBATCH",
        ),
        Flag(
            "model.cache_type_k",
            ("--cache-type-k", "-ctk"),
            "Key cache: f32, f16 or bf16 (quantised types become f16). Default: f16, on torch f32.",
            "LLAMA_ARG_CACHE_TYPE_K",
        ),
        Flag(
            "model.cache_type_v",
            ("--cache-type-v", "-ctv"),
            "Value cache, as --cache-type-k.",
            "LLAMA_ARG_CACHE_TYPE_V",
        ),
        Flag(
            "model.override_kv",
            ("--override-kv",),
            "Override metadata, KEY=TYPE:VALUE,... with TYPE int, float, bool or str.",
            parse=parse_overrides,
            appends=True,
            metavar="KEY=TYPE:VALUE",
        ),
        Flag("model.check_tensors", ("--check-tensors",), "Look for invalid values while loading."),
        Flag(
            "model.warmup",
            ("--warmup",),
            "One empty run before the first prompt.",
            off=("--no-warmup",),
        ),
        Flag(
            "model.n_threads",
            ("--threads", "-t"),
            "Compute threads; 0 or less = all physical cores.",
            "LLAMA_ARG_THREADS",
        ),
        Flag(
            "model.kernels",
            ("--kernels",),
            "auto, native (packed weights, CPU) or torch; auto = native where it can.",
        ),
        Flag(
            "model.activations",
            ("--activations",),
            "int8 or f32: what native kernels multiply quantised weights with.",
        ),
        Flag(
            "model.device",
            ("--device", "-dev"),
            "cpu, cuda, cuda:N, mps or none; the best one if not given.",
            "LLAMA_ARG_DEVICE",
        ),
        Flag(
            "model.n_gpu_layers",
            ("--gpu-layers", "-ngl", "--n-gpu-layers"),
            "0 = the CPU, anything else = the whole model on the accelerator.",
            "LLAMA_ARG_N_GPU_LAYERS",
            metavar="N|auto|all",
        ),
        Flag(
            "model.main_gpu",
            ("--main-gpu", "-mg"),
            "CUDA device that is taken when --device names none.",
            "LLAMA_ARG_MAIN_GPU",
        ),
        Flag("", ("--list-devices",), "Print the devices and exit.", kind="action"),
        Flag("", ("--cache-list", "-cl"), "Print the downloaded models and exit.", kind="action"),
    ),
)

ROPE = Panel(
    "Rotary embedding",
    (
        Flag(
            "model.rope.scaling",
            ("--rope-scaling",),
            "Position scaling; from the model, else linear.",
            "LLAMA_ARG_ROPE_SCALING_TYPE",
        ),
        Flag(
            "model.rope.freq_scale",
            ("--rope-freq-scale",),
            "Frequency factor, 1 / expansion.",
            "LLAMA_ARG_ROPE_FREQ_SCALE",
        ),
        Flag(
            "model.rope.freq_scale",
            ("--rope-scale",),
            "Context expansion factor.",
            "LLAMA_ARG_ROPE_SCALE",
            parse=parse_rope_scale,
        ),
        Flag(
            "model.rope.freq_base",
            ("--rope-freq-base",),
            "Base of the frequencies.",
            "LLAMA_ARG_ROPE_FREQ_BASE",
        ),
        *(
            Flag(
                f"model.rope.yarn_{name}",
                (f"--yarn-{name.replace('_', '-')}",),
                text,
                f"LLAMA_ARG_YARN_{name.upper()}",
            )
            for name, text in (
                ("orig_ctx", "YaRN: context of training; 0 = from the model."),
                ("ext_factor", "YaRN: mix of extrapolation."),
                ("attn_factor", "YaRN: magnitude."),
                ("beta_slow", "YaRN: high correction dimension."),
                ("beta_fast", "YaRN: low correction dimension."),
            )
        ),
    ),
)
