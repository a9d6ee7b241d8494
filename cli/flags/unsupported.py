"""Rows for what specdec does not do: asking for it is an error (flag notes, sections 6 to 8)."""

from __future__ import annotations

from collections.abc import Iterable

from specdec_cli.flags import Flag, Panel, Parse
from specdec_cli.flags.values import layer_range


def _refused(
    *names: str,
    advice: str,
    env: str | None = None,
    is_switch: bool = False,
    parse: Parse | None = None,
    n_values: int = 1,
) -> Flag:
    text = f"not supported: {advice}"
    return Flag(
        "",
        names,
        f"Error: {advice}.",
        env,
        kind="refused",
        is_switch=is_switch,
        parse=parse,
        n_values=n_values,
        advice=text,
    )


ADAPTERS = "adapters are not applied; merge them into the model file"
STEERING = "control vectors are not applied"
GRAMMAR = "specdec has no grammars yet, and the output would not be constrained"
TEXT_ONLY = "specdec reads text only"
PRESET = "give the model's repository with --hf-repo"


def _media() -> Iterable[Flag]:
    rows: tuple[tuple[tuple[str, ...], str | None], ...] = (
        (("--mmproj", "-mm"), "LLAMA_ARG_MMPROJ"),
        (("--mmproj-url", "-mmu"), "LLAMA_ARG_MMPROJ_URL"),
        (("--mmproj-device", "-mmdev"), "MTMD_BACKEND_DEVICE"),
        (("--image",), None),
        (("--audio",), None),
        (("--video",), None),
        (("--image-min-tokens",), "LLAMA_ARG_IMAGE_MIN_TOKENS"),
        (("--image-max-tokens",), "LLAMA_ARG_IMAGE_MAX_TOKENS"),
        (("--video-fps",), "LLAMA_ARG_VIDEO_FPS"),
        (("--video-timestamp-interval",), "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
        (("--video-ffmpeg-dir",), "LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    )
    for names, env in rows:
        yield _refused(*names, advice=TEXT_ONLY, env=env)


UNSUPPORTED = Panel(
    "Not supported",
    (
        _refused("--grammar", advice=GRAMMAR),
        _refused("--grammar-file", advice=GRAMMAR),
        _refused("--json-schema", "-j", advice=GRAMMAR),
        _refused("--json-schema-file", "-jf", advice=GRAMMAR),
        _refused(
            "--docker-repo",
            "-dr",
            advice="models do not come from Docker Hub; use --model or --hf-repo",
            env="LLAMA_ARG_DOCKER_REPO",
        ),
        _refused("--lora", advice=ADAPTERS),
        _refused("--lora-scaled", advice=ADAPTERS),
        _refused("--control-vector", advice=STEERING),
        _refused("--control-vector-scaled", advice=STEERING),
        _refused("--control-vector-layer-range", advice=STEERING, parse=layer_range, n_values=2),
        _refused("--rpc", advice="there are no remote back ends", env="LLAMA_ARG_RPC"),
        _refused("--server-base", advice="specdec loads the model itself"),
        *_media(),
        Flag(
            "",
            ("--mmproj-auto",),
            "No effect: text only.",
            "LLAMA_ARG_MMPROJ_AUTO",
            ("--no-mmproj", "--no-mmproj-auto"),
            kind="silent",
            is_switch=True,
        ),
        Flag(
            "",
            ("--mmproj-offload",),
            "No effect: text only.",
            "LLAMA_ARG_MMPROJ_OFFLOAD",
            ("--no-mmproj-offload",),
            kind="silent",
            is_switch=True,
        ),
        *(
            _refused(f"--{name}-default", advice=PRESET, is_switch=True)
            for name in ("gpt-oss-20b", "gpt-oss-120b", "vision-gemma-4b", "vision-gemma-12b")
        ),
    ),
)
