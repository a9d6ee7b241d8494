"""Choices of `specdec train` and `specdec eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec.options.checks import require

TrainableHead = Literal["dflash", "dspark", "dflash2", "lilicorr"]
OutputType = Literal["auto", "f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`specdec train`: what is made of which data, and in how much time."""

    output: Path | None = None
    """The draft's file."""
    head: TrainableHead = "dspark"
    minutes: float = 150.0
    """Time for everything: data, training, measuring."""
    n_tokens: int = 0
    """Tokens of data in place of a time; the training follows their number."""
    prompts: Path | None = None
    """Prompts to answer first."""
    excluded: Path | None = None
    """Prompts to measure with: neither they nor near copies become data."""
    resume: Path | None = None
    """A work folder to continue, or to take the data from; None = a new one beside the output."""
    n_layer: int = 2
    block_size: int | None = None
    """None = by the time: late slots of a block learn last."""
    taps: tuple[int, ...] = ()
    """Layer inputs of the target; () = five, evenly spread."""
    n_rows: int = 8192
    """Tokens of the draft's vocabulary; 0 = all of the target's."""
    mask_token: int | None = None
    """None = a control token without another use."""
    learning_rate: float = 1.5e-3
    outtype: OutputType = "auto"
    """Block type of the matrices."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.minutes > 0, f"--minutes must be above 0, got {self.minutes:g}")
        require(self.n_tokens >= 0, f"--tokens must be at least 0, got {self.n_tokens}")
        require(1 <= self.n_layer <= 64, f"--layers must be 1 to 64, got {self.n_layer}")
        require(
            self.block_size is None or 2 <= self.block_size <= 64,
            f"--block-size must be 2 to 64, got {self.block_size}",
        )
        require(self.n_rows >= 0, f"--draft-vocab must be at least 0, got {self.n_rows}")
        require(
            0 < self.learning_rate < 1,
            f"--learning-rate must be between 0 and 1, got {self.learning_rate:g}",
        )
        require(
            len(set(self.taps)) == len(self.taps),
            f"--target-layers: expected different layers, got {list(self.taps)}",
        )


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """`specdec eval`: beyond what it shares with `specdec bench`."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Each is measured by itself; 0 = greedy."""

    def __post_init__(self) -> None:
        require(
            bool(self.temperatures) and min(self.temperatures) >= 0,
            f"--temps: expected temperatures of at least 0, got {list(self.temperatures)}",
        )
