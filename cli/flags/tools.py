"""Rows of the commands around generation: inspect, tokenize, bench."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel

INSPECT = Panel(
    "Files",
    (
        Flag("inspect.files", ("files",), "GGUF files.", appends=True, metavar="FILE"),
        Flag(
            "model.path",
            ("--model", "-m"),
            "A target: say of every draft among the files whether it fits.",
        ),
        Flag(
            "spec.draft.path",
            ("--spec-draft-model", "-md", "--model-draft"),
            "A draft; the same as giving it as FILE.",
        ),
        Flag("inspect.tensors", ("--tensors",), "List every tensor."),
        Flag("inspect.json", ("--json",), "Print one JSON object."),
    ),
)
