"""Rows that are checked and have nothing to act on here (flag notes, sections 3 to 9)."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel, Parse, parse_float, parse_int
from specdec_cli.flags.values import (
    buffer_overrides,
    cpu_mask,
    cpu_range,
    flash_attention,
    integer,
    numbers,
    one_of,
)

ONE_POOL = "torch has one pool of threads, see --threads"
PLACEMENT = "the operating system places and schedules the threads"
ONE_DEVICE = "a model lies on one device as a whole, see --device and --gpu-layers"
PLAIN_TEXT = "replies are plain text, thoughts included"
NO_SHIFT = "generation ends when the context is full"
ONE_SEQUENCE = "one sequence is decoded at a time and keeps its whole cache"


def _value(
    *names: str, check: Parse, why: str, env: str | None = None, metavar: str | None = None
) -> Flag:
    env = f"LLAMA_ARG_{env}" if env else None
    return Flag(
        "", names, f"No effect: {why}.", env, parse=check, kind="no-op", advice=why, metavar=metavar
    )


def _switch(*names: str, why: str, env: str | None = None, off: tuple[str, ...] = ()) -> Flag:
    env = f"LLAMA_ARG_{env}" if env else None
    return Flag("", names, f"No effect: {why}.", env, off, kind="no-op", is_switch=True, advice=why)


_zero_or_one = integer(0, 1)

IGNORED_DRAFT = Panel(
    "Accepted for llama.cpp: draft model",
    (
        _value(
            "--spec-draft-p-split",
            "--draft-p-split",
            check=parse_float,
            why="drafts are linear, not trees",
            env="SPEC_DRAFT_P_SPLIT",
        ),
        _switch(
            "--spec-draft-backend-sampling",
            off=("--no-spec-draft-backend-sampling",),
            why="torch always selects draft tokens on the draft's device",
            env="SPEC_DRAFT_BACKEND_SAMPLING",
        ),
        _value("--spec-draft-threads", "-td", "--threads-draft", check=parse_int, why=ONE_POOL),
        _value(
            "--spec-draft-threads-batch",
            "-tbd",
            "--threads-batch-draft",
            check=parse_int,
            why=ONE_POOL,
        ),
        _value("--spec-draft-cpu-mask", "-Cd", "--cpu-mask-draft", check=cpu_mask, why=PLACEMENT),
        _value(
            "--spec-draft-cpu-range", "-Crd", "--cpu-range-draft", check=cpu_range, why=PLACEMENT
        ),
        _value("--spec-draft-cpu-strict", "--cpu-strict-draft", check=_zero_or_one, why=PLACEMENT),
        _value("--spec-draft-prio", "--prio-draft", check=integer(0, 3), why=PLACEMENT),
        _value("--spec-draft-poll", "--poll-draft", check=_zero_or_one, why=PLACEMENT),
        _value(
            "--spec-draft-cpu-mask-batch",
            "-Cbd",
            "--cpu-mask-batch-draft",
            check=cpu_mask,
            why=PLACEMENT,
        ),
        _value(
            "--spec-draft-cpu-range-batch",
            "-Crbd",
            "--cpu-range-batch-draft",
            check=cpu_range,
            why=PLACEMENT,
        ),
        _value(
            "--spec-draft-cpu-strict-batch",
            "--cpu-strict-batch-draft",
            check=_zero_or_one,
            why=PLACEMENT,
        ),
        _value("--spec-draft-prio-batch", "--prio-batch-draft", check=integer(0, 3), why=PLACEMENT),
        _value("--spec-draft-poll-batch", "--poll-batch-draft", check=_zero_or_one, why=PLACEMENT),
        _value(
            "--spec-draft-override-tensor",
            "-otd",
            "--override-tensor-draft",
            check=buffer_overrides,
            why=ONE_DEVICE,
        ),
        _switch(
            "--spec-draft-cpu-moe",
            "-cmoed",
            "--cpu-moe-draft",
            why=ONE_DEVICE,
            env="SPEC_DRAFT_CPU_MOE",
        ),
        _value(
            "--spec-draft-n-cpu-moe",
            "--spec-draft-ncmoe",
            "-ncmoed",
            "--n-cpu-moe-draft",
            check=integer(0),
            why=ONE_DEVICE,
            env="SPEC_DRAFT_N_CPU_MOE",
        ),
        *(
            _value(
                f"--spec-ngram-{kind}-min-hits",
                check=integer(1),
                why=f"ngram-{kind} drafts at the first hit, as in llama.cpp",
            )
            for kind in ("simple", "map-k")
        ),
    ),
)

IGNORED_MODEL = Panel(
    "Accepted for llama.cpp: model, threads, devices",
    (
        _value("--keep", check=integer(-1), why=NO_SHIFT),
        _switch("--context-shift", off=("--no-context-shift",), why=NO_SHIFT, env="CONTEXT_SHIFT"),
        _switch("--swa-full", why="sliding-window layers keep their whole cache", env="SWA_FULL"),
        _value(
            "--flash-attn",
            "-fa",
            check=flash_attention,
            why="attention is one exact kernel",
            env="FLASH_ATTN",
            metavar="on|off|auto",
        ),
        _switch(
            "--kv-offload",
            "-kvo",
            off=("--no-kv-offload", "-nkvo"),
            why="the cache lies where the model lies",
            env="KV_OFFLOAD",
        ),
        _value(
            "--load-mode",
            "-lm",
            check=one_of("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
            why="weights are read through a memory map",
            env="LOAD_MODE",
        ),
        _value(
            "--lazy-mode",
            "-lzm",
            check=one_of("on", "auto", "off"),
            why="all weights are read at the start",
            env="LAZY_MODE",
        ),
        _value("--parallel", "-np", check=parse_int, why=ONE_SEQUENCE, env="N_PARALLEL"),
        _value(
            "--ctx-checkpoints",
            "-ctxcp",
            "--swa-checkpoints",
            check=parse_int,
            why=ONE_SEQUENCE,
            env="CTX_CHECKPOINTS",
        ),
        _value("--cache-ram", "-cram", check=integer(-1), why=ONE_SEQUENCE, env="CACHE_RAM"),
        _value("--threads-batch", "-tb", check=parse_int, why=ONE_POOL),
        _value("--cpu-mask", "-C", check=cpu_mask, why=PLACEMENT),
        _value("--cpu-range", "-Cr", check=cpu_range, why=PLACEMENT),
        _value("--cpu-strict", check=_zero_or_one, why=PLACEMENT),
        _value("--prio", check=integer(-1, 3), why=PLACEMENT),
        _value("--poll", check=integer(0, 100), why=PLACEMENT),
        _value("--cpu-mask-batch", "-Cb", check=cpu_mask, why=PLACEMENT),
        _value("--cpu-range-batch", "-Crb", check=cpu_range, why=PLACEMENT),
        _value("--cpu-strict-batch", check=_zero_or_one, why=PLACEMENT),
        _value("--prio-batch", check=integer(0, 3), why=PLACEMENT),
        _value("--poll-batch", check=_zero_or_one, why=PLACEMENT),
        _value(
            "--numa", check=one_of("distribute", "isolate", "numactl"), why=PLACEMENT, env="NUMA"
        ),
        _value(
            "--split-mode",
            "-sm",
            check=one_of("none", "layer", "row", "tensor"),
            why=ONE_DEVICE,
            env="SPLIT_MODE",
        ),
        _value("--tensor-split", "-ts", check=numbers, why=ONE_DEVICE, env="TENSOR_SPLIT"),
        _value(
            "--fit", "-fit", check=one_of("on", "off"), why="options are never changed", env="FIT"
        ),
        _value("--fit-target", "-fitt", check=numbers, why="there is no --fit", env="FIT_TARGET"),
        _value("--fit-ctx", "-fitc", check=parse_int, why="there is no --fit", env="FIT_CTX"),
        _value(
            "--override-tensor",
            "-ot",
            check=buffer_overrides,
            why=ONE_DEVICE,
            env="OVERRIDE_TENSOR",
        ),
        _switch("--cpu-moe", "-cmoe", why=ONE_DEVICE, env="CPU_MOE"),
        _value("--n-cpu-moe", "-ncmoe", check=integer(0), why=ONE_DEVICE, env="N_CPU_MOE"),
        _value("--n-cpu-ffn", "-ncffn", check=integer(0), why=ONE_DEVICE, env="N_CPU_FFN"),
        _switch("--op-offload", off=("--no-op-offload",), why=ONE_DEVICE),
        _switch(
            "--repack",
            off=("-nr", "--no-repack"),
            why="weights are laid out once, at load",
            env="REPACK",
        ),
        _switch("--no-host", why="there is no pinned host buffer", env="NO_HOST"),
    ),
)

IGNORED_TEXT = Panel(
    "Accepted for llama.cpp: sampling, chat, logging",
    (
        _switch(
            "--backend-sampling",
            "-bs",
            why="tokens are sampled by torch",
            env="BACKEND_SAMPLING",
        ),
        _value(
            "--reasoning-format",
            check=one_of("none", "deepseek", "deepseek-legacy", "auto"),
            why=PLAIN_TEXT,
            env="THINK",
        ),
        _value(
            "--reasoning-budget",
            check=integer(-1),
            why="thinking is not cut short; --reasoning off asks for none",
            env="THINK_BUDGET",
        ),
        _value(
            "--reasoning-budget-message",
            check=str,
            why="thinking is not cut short",
            env="THINK_BUDGET_MESSAGE",
        ),
        _switch(
            "--reasoning-preserve",
            off=("--no-reasoning-preserve",),
            why="earlier turns are given to the template as they are",
            env="REASONING_PRESERVE",
        ),
        _switch(
            "--skip-chat-parsing",
            off=("--no-skip-chat-parsing",),
            why=PLAIN_TEXT,
            env="SKIP_CHAT_PARSING",
        ),
        _value("--log-prompts-dir", check=str, why="prompts are not stored, see --verbose-prompt"),
    ),
)
