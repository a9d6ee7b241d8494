"""Where a training keeps its things, and the checks of paths that need nothing loaded."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import UsageError
from specdec.options import Options

TARGET = "target.json"
"""File of a work folder that says whose data it holds."""


def work_folder(options: Options) -> Path:
    """The folder of a training: that of `--resume`, or a new one beside the output.

    Raises `UsageError` if that would mix two trainings, and for an output that cannot be written:
    better now than after hours.
    """
    train = options.train
    if train.output is None:
        raise UsageError("--output is required; name the draft's file with -o")
    _check_output(train.output, options.model.path)
    if train.resume is not None:
        if not (train.resume / TARGET).is_file():
            raise UsageError(
                f"--resume: {train.resume} is not a folder of an earlier run; leave the flag out "
                "to begin one"
            )
        return train.resume
    folder = train.output.with_name(train.output.stem + ".train")
    if folder.exists():
        raise UsageError(
            f"{folder}: holds an earlier training; continue it with --resume {folder}, or remove it"
        )
    return folder


def _check_output(output: Path, target: Path | None) -> None:
    parent = output.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"--output: the folder of {output} does not exist; make it first")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"--output: the folder of {output} is read-only; name another place")
    if output.is_dir():
        raise UsageError(f"--output: {output} is a folder; name a file")
    if target is not None and output.exists() and target.exists() and output.samefile(target):
        raise UsageError(f"--output: {output} is the target itself; name another file")
