"""Rows of the commands around generation: inspect, tokenize, bench."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel, parse_float
from specdec_cli.flags.spec import DRAFT, parse_types
from specdec_cli.flags.values import draft_length

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


def parse_combination(text: str) -> tuple[tuple[str, ...], ...]:
    """One comma list of spec types, which are run together."""
    return (parse_types(text),)


def parse_draft_lengths(text: str) -> tuple[int, ...]:
    """A comma list of whole numbers and `auto`."""
    try:
        return tuple(dict.fromkeys(draft_length(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"'{text}' is not a comma list of whole numbers or auto") from None


def parse_lengths(text: str) -> tuple[int, ...]:
    """A comma list of whole numbers."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"'{text}' is not a comma list of whole numbers") from None


BENCH = Panel(
    "Comparison",
    (
        Flag(
            "bench.types",
            ("--spec-type",),
            "What to compare, once for each; a comma list runs several together. Every draft by "
            "its own type if not given.",
            parse=parse_combination,
            appends=True,
            metavar="TYPES",
        ),
        Flag(
            "bench.drafts",
            ("--spec-draft-model", "-md", "--model-draft"),
            "A draft's GGUF file; may be given several times.",
            appends=True,
        ),
        Flag(
            "bench.n_max",
            ("--spec-draft-n-max",),
            "Draft lengths to compare, a comma list; auto = from measured costs.",
            parse=parse_draft_lengths,
            metavar="N,auto,...",
        ),
        Flag(
            "bench.prompts",
            ("--prompts",),
            "Prompts: .jsonl with a 'prompt' in each line, else one prompt a line.",
        ),
        Flag("generate.prompt", ("--prompt", "-p"), "One prompt."),
        Flag("bench.n_predict", ("--predict", "-n", "--n-predict"), "Tokens for each prompt."),
        Flag("bench.n_repetitions", ("--repetitions",), "Runs of each prompt."),
        Flag(
            "generate.conversation",
            ("--conversation", "-cnv"),
            "Wrap prompts by the chat template; on if the model has one.",
            off=("--no-conversation", "-no-cnv"),
        ),
        Flag("bench.json", ("--json",), "Print one JSON object."),
        Flag("bench.plot", ("--plot",), "Draw the results into this .png or .svg file."),
    ),
)

REPLACED = ("spec.types", "spec.draft.path", "spec.draft.hf_repo", "spec.draft.n_max")
"""Leaves that `bench` takes as lists."""

BENCH_DRAFT = Panel(
    DRAFT.title,
    tuple(flag for flag in DRAFT.flags if flag.path not in REPLACED and flag.kind != "preset"),
)

EVAL_LEFT_OUT = ("bench.plot", "generate.prompt", "bench.n_repetitions")

EVAL = Panel(
    "Evaluation",
    (
        *(flag for flag in BENCH.flags if flag.path not in EVAL_LEFT_OUT),
        Flag(
            "evaluate.temperatures",
            ("--temps",),
            "Temperatures to measure at, a comma list.",
            parse=lambda text: tuple(parse_float(part) for part in text.split(",")),
            metavar="T,T,...",
        ),
    ),
)
