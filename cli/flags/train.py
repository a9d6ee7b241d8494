"""Rows of `specdec train`."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel
from specdec_cli.flags.tools import parse_lengths

TRAIN = Panel(
    "Training",
    (
        Flag("train.output", ("--output", "-o"), "The draft's GGUF file."),
        Flag("train.head", ("--head",), "What turns the draft's states into tokens."),
        Flag(
            "train.minutes",
            ("--minutes",),
            "Time for everything; the longer, the better the draft.",
        ),
        Flag(
            "train.n_tokens",
            ("--tokens",),
            "Tokens of data instead of a time; the training follows their number.",
        ),
        Flag(
            "train.prompts",
            ("--prompts",),
            "Prompts like those you will use, answered first: .jsonl with a 'prompt' in each "
            "line, else one prompt a line.",
        ),
        Flag(
            "train.excluded",
            ("--exclude",),
            "Prompts to measure with later: neither they nor near copies become data.",
        ),
        Flag(
            "train.resume",
            ("--resume",),
            "A work folder to continue, or to take the data for another head from.",
            metavar="DIR",
        ),
        Flag("train.seed", ("--seed", "-s"), "Seed of data and training."),
    ),
)

TRAIN_SHAPE = Panel(
    "Draft",
    (
        Flag("train.n_layer", ("--layers",), "Layers of the draft."),
        Flag(
            "train.block_size",
            ("--block-size",),
            "Slots of a block; its longest draft + 1. By the time if not given: 8, or 5 below two "
            "hours.",
        ),
        Flag(
            "train.taps",
            ("--target-layers",),
            "Layers of the target whose inputs the draft sees; five, evenly spread, if not given.",
            parse=parse_lengths,
            metavar="N,N,...",
        ),
        Flag(
            "train.n_rows",
            ("--draft-vocab",),
            "Tokens that the draft knows; 0 = all of the target's.",
        ),
        Flag("train.mask_token", ("--mask-token",), "A token that never occurs in texts."),
        Flag("train.learning_rate", ("--learning-rate",), "At its highest."),
        Flag(
            "train.outtype",
            ("--outtype",),
            "Type of the draft's matrices; auto keeps the file small beside the target's.",
        ),
    ),
)
