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


def parse_ids(text: str) -> tuple[int, ...]:
    """A comma list of token ids; brackets around it and spaces are as `--ids` prints them."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    try:
        return tuple(int(part) for part in inner.split(",")) if inner.strip() else ()
    except ValueError:
        raise ValueError(f"'{text}' is not a comma list of token ids") from None


TOKENIZE = Panel(
    "Text and tokens",
    (
        Flag("model.path", ("--model", "-m"), "A GGUF file; a vocabulary alone will do."),
        Flag("generate.prompt", ("--prompt", "-p"), "The text."),
        Flag("generate.prompt_file", ("--file", "-f"), "The text in a file, unchanged."),
        Flag("tokenize.stdin", ("--stdin",), "The text on standard input."),
        Flag(
            "generate.escape",
            ("--escape", "-e"),
            r"Read \n, \t, \xHH and the like in the text.",
            off=("--no-escape",),
        ),
        Flag("tokenize.ids", ("--ids",), "Print the ids alone, [1, 2, 3]."),
        Flag("tokenize.no_bos", ("--no-bos",), "Never add the BOS token."),
        Flag(
            "tokenize.no_parse_special",
            ("--no-parse-special",),
            "Read control tokens written in the text as text.",
        ),
        Flag("tokenize.show_count", ("--show-count",), "Print the number of tokens."),
        Flag(
            "tokenize.decode",
            ("--decode",),
            "Print the text of these token ids instead.",
            parse=parse_ids,
            metavar="ID,ID,...",
        ),
        Flag(
            "",
            ("--log-disable",),
            "No messages.",
            kind="preset",
            values={"output.verbosity": 0},
        ),
    ),
)
