"""Rows for removed and deprecated flags, and names that llama-cli does not have either."""

from __future__ import annotations

from collections.abc import Mapping

from specdec_cli.flags import Flag, Panel, parse_float


def _removed(*names: str, advice: str, env: str | None = None) -> Flag:
    text = f"the argument has been removed. {advice}"
    return Flag("", names, f"Removed: {advice}.", env, kind="removed", advice=text)


REMOVED = Panel(
    "Removed",
    (
        _removed(
            "--draft",
            "--draft-n",
            "--draft-max",
            advice="use --spec-draft-n-max or --spec-ngram-mod-n-max",
            env="LLAMA_ARG_DRAFT_MAX",
        ),
        _removed(
            "--draft-min",
            "--draft-n-min",
            advice="use --spec-draft-n-min or --spec-ngram-mod-n-min",
            env="LLAMA_ARG_DRAFT_MIN",
        ),
        *(
            _removed(f"--spec-ngram-{what}", advice=f"use the respective --spec-ngram-*-{what}")
            for what in ("size-n", "size-m", "min-hits")
        ),
        Flag(
            "",
            ("--defrag-thold", "-dt"),
            "Deprecated; takes its value and does nothing.",
            "LLAMA_ARG_DEFRAG_THOLD",
            parse=parse_float,
            kind="deprecated",
            advice="is deprecated and no longer necessary to specify",
        ),
    ),
)

_LOAD_MODE = "use --load-mode"
_COMPLETION = "only llama-completion has it"
_SERVER = "only llama-server has it"

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("--mmap", "--no-mmap", "--mlock", "-dio", "--direct-io"), _LOAD_MODE),
    **dict.fromkeys(("-cd", "--ctx-size-draft"), "the draft's context always equals the target's"),
    "--spec-replace": "draft and target must have one vocabulary",
    "--spec-draft-conf-min": "use --spec-draft-p-min",
    **dict.fromkeys(
        (
            *("-i", "--interactive", "-if", "--interactive-first"),
            *("--in-prefix", "--in-suffix", "--in-prefix-bos"),
            *("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro", "-ptc"),
        ),
        _COMPLETION,
    ),
    **dict.fromkeys(
        (
            *("--host", "--port", "--reuse-port", "--alias", "-a", "--tags"),
            *("--api-key", "--api-key-file", "--api-prefix", "--timeout", "-to"),
            *("--sse-ping-interval", "--threads-http", "--metrics", "--props"),
            *("--slots", "--no-slots", "--slot-save-path", "--slot-prompt-similarity", "-sps"),
            *("--cache-prompt", "--no-cache-prompt", "--cache-reuse"),
            *("--cache-idle-slots", "--no-cache-idle-slots", "--checkpoint-min-step", "-cms"),
            *("--cont-batching", "-cb", "-nocb", "--no-cont-batching"),
            *("--kv-unified", "-kvu", "-no-kvu", "--no-kv-unified", "--kv-unified-per-slot"),
            *("--prefill-assistant", "--no-prefill-assistant", "--sleep-idle-seconds"),
            *("--media-path", "--path", "--ssl-key-file", "--ssl-cert-file"),
            *("--cors-origins", "--cors-methods", "--cors-headers"),
            *("--cors-credentials", "--no-cors-credentials"),
            *("--embeddings", "--embedding", "--reranking", "--rerank", "--pooling"),
            *("--embd-normalize", "--spm-infill", "--lora-init-without-apply"),
            *("--mtmd-batch-max-tokens", "--ui", "--no-ui", "--webui", "--no-webui"),
            *("--ui-config", "--ui-config-file", "--ui-mcp-proxy", "--no-ui-mcp-proxy"),
            *("--webui-config", "--webui-config-file", "--webui-mcp-proxy"),
            *("--no-webui-mcp-proxy", "--tools", "--tools-runtime", "--mcp-servers-config"),
            *("--mcp-servers-json", "--agent", "-ag", "-no-ag", "--no-agent"),
            *("--models-dir", "--models-preset", "--models-max", "--models-autoload"),
            *("--no-models-autoload", "--embd-gemma-default", "--fim-qwen-1.5b-default"),
            *("--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec"),
            *("--fim-qwen-14b-spec", "--fim-qwen-30b-default"),
        ),
        _SERVER,
    ),
}
"""Names of other llama.cpp programs or versions -> what to say about them."""
