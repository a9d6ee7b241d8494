"""`specdec inspect`: what is inside GGUF files, and whether drafts fit a target."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec.errors import SpecdecError, UsageError
from specdec_cli.flags.tools import INSPECT
from specdec_cli.given import Given

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.describe import Description, Verdict
    from specdec.describe_draft import DraftDescription
    from specdec.gguf_file import GGUFFile

PANELS = (INSPECT,)
KEY_WIDTH = 22
"""Column of the values."""


def inspect(given: Given) -> None:
    """Shows what GGUF files are, without reading their weights.

    With [bold]-m target.gguf draft.gguf[/bold] it says whether the draft fits the target: exit
    code 0 if it does, 1 if not.
    """
    options = given.options()
    target_path = options.model.path
    drafts = [path for path in (options.spec.draft.path,) if path is not None]
    paths = [*options.inspect.files, *drafts]
    if target_path is not None:
        paths.insert(0, target_path)
    if not paths:
        raise UsageError("inspect needs a file: specdec inspect FILE... [-m TARGET]")
    show_json = options.inspect.json
    reports = [_Report(path) for path in paths]
    verdicts = _verdicts(reports) if target_path is not None else []
    if show_json:
        _print_json(reports, verdicts, with_tensors=options.inspect.tensors)
    else:
        _print_text(reports, verdicts, with_tensors=options.inspect.tensors)
    for report in reports:
        if report.error is not None:
            print(f"error: {report.error}", file=sys.stderr)
    if any(report.error for report in reports) or not all(verdict.fits for verdict in verdicts):
        raise typer.Exit(1)


class _Report:
    """One file: open and described, or the line that says why not."""

    def __init__(self, path: Path) -> None:
        from specdec.describe import describe
        from specdec.gguf_file import GGUFFile

        self.path = path
        self.file: GGUFFile | None = None
        self.description: Description | None = None
        self.error: str | None = None
        try:
            self.file = GGUFFile.open(path)
            self.description = describe(self.file)
        except SpecdecError as error:
            self.error = " ".join(str(error).split())


def _verdicts(reports: Sequence[_Report]) -> list[Verdict]:
    """The target, which comes first, with every other file that could be read."""
    from specdec.describe import judge

    target, *drafts = reports
    if target.file is None:
        return []
    return [judge(target.file, draft.file) for draft in drafts if draft.file is not None]


def _print_json(
    reports: Iterable[_Report], verdicts: Iterable[Verdict], *, with_tensors: bool
) -> None:
    files: list[dict[str, Any]] = []
    for report in reports:
        if report.description is None:
            files.append({"path": report.path, "error": report.error})
            continue
        entry = dataclasses.asdict(report.description)
        entry["bits_per_weight"] = report.description.bits_per_weight
        if with_tensors and report.file is not None:
            entry["tensors"] = [dataclasses.asdict(one) for one in report.file.tensors.values()]
        files.append(entry)
    result = {"files": files, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}
    print(json.dumps(result, indent=2, ensure_ascii=False, default=str))


def _print_text(
    reports: Sequence[_Report], verdicts: Sequence[Verdict], *, with_tensors: bool
) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    shown = [report for report in reports if report.description is not None]
    for number, report in enumerate(shown):
        if number:
            console.print()
        _print_description(console, report.description)
        if with_tensors and report.file is not None:
            _print_tensors(console, report.file)
    for verdict in verdicts:
        console.print()
        _print_verdict(console, verdict)


def _print_description(console: Console, facts: Description | None) -> None:
    assert facts is not None
    console.print(str(facts.path), style="bold", markup=False)
    for key, value in (*_file_lines(facts), *_model_lines(facts), *_draft_lines(facts.draft)):
        _print_line(console, key, value)
    if facts.n_tensors:
        _print_line(console, "memory", _memory(facts))


def _print_line(console: Console, key: str, value: str) -> None:
    console.print(f"  {key:<{KEY_WIDTH}}", style="cyan", end="", markup=False)
    console.print(value, markup=False)


def _file_lines(facts: Description) -> Iterable[tuple[str, str]]:
    yield "kind", _kind(facts)
    if facts.name:
        yield "name", facts.name
    if not facts.n_tensors:
        return
    yield (
        "size",
        f"{_count(facts.n_parameters)} parameters in {facts.n_tensors} tensors, "
        f"{_bytes(facts.n_bytes)}, {facts.bits_per_weight:.2f} bits per weight",
    )
    total = sum(share.n_bytes for share in facts.types) or 1
    yield (
        "quantisation",
        ", ".join(
            f"{share.ggml_type} {100 * share.n_bytes / total:.0f}% ({share.n_tensors})"
            for share in facts.types
        ),
    )


def _kind(facts: Description) -> str:
    runs = "" if facts.is_supported else ", not supported here"
    if facts.kind == "vocabulary":
        return f"vocabulary only ({facts.architecture}), no weights"
    if facts.kind == "target":
        return f"target ({facts.architecture}){runs}"
    assert facts.draft is not None
    return f"draft ({facts.draft.spec_type}){runs}"


def _model_lines(facts: Description) -> Iterable[tuple[str, str]]:
    heads = f"{_sizes(facts.n_head)} heads"
    if facts.head_dim is not None:
        heads += f" of {_sizes(facts.head_dim)}"
    if facts.n_head_kv is not None and facts.n_head_kv != facts.n_head:
        heads += f", {_sizes(facts.n_head_kv)} for keys and values"
    if facts.n_layer is not None:
        width = f"{facts.n_layer} of width {facts.n_embd}, {heads}"
        yield "layers", width + (f", feed-forward {_sizes(facts.n_ff)}" if facts.n_ff else "")
    if facts.n_expert:
        yield "experts", f"{facts.n_expert}, {facts.n_expert_used} used per token"
    if facts.n_ctx_train is not None:
        rope = f", rope base {facts.rope_freq_base:.0f}" if facts.rope_freq_base else ""
        scaling = f", {facts.rope_scaling} scaling" if facts.rope_scaling else ""
        window = f", sliding window {facts.sliding_window}" if facts.sliding_window else ""
        yield "context", f"{facts.n_ctx_train} tokens{rope}{scaling}{window}"
    if facts.tokenizer is None:
        yield "tokenizer", "none"
        return
    words = facts.tokenizer
    pre = f" ({words.pre})" if words.pre else ""
    ends = f"BOS {_token(words.bos_id, words.bos_text)}, EOS {_token(words.eos_id, words.eos_text)}"
    yield "tokenizer", f"{words.model}{pre}, {words.n_vocab} tokens, {ends}"
    named = f", also {', '.join(words.chat_templates)}" if words.chat_templates else ""
    yield "chat template", ("yes" if words.has_chat_template else "no") + named


def _draft_lines(draft: DraftDescription | None) -> Iterable[tuple[str, str]]:
    if draft is None:
        return
    if not draft.is_standalone:
        runs = "" if draft.is_supported else ", not supported here"
        yield "drafts itself", f"{draft.spec_type}{runs}"
    yield "head", draft.head
    note = f" ({draft.note})" if draft.note else ""
    yield "backbone", draft.backbone + note
    if draft.block_size is not None:
        yield "block size", f"{draft.block_size} tokens"
    if draft.target_layers is not None:
        yield (
            "tapped layers",
            f"{', '.join(map(str, draft.target_layers))} (inputs of the target's)",
        )
    if draft.target_width is not None:
        yield "target width", str(draft.target_width)
    if draft.spec_type.startswith("draft-d") or draft.mask_token is not None:
        yield "mask token", _token(draft.mask_token, draft.mask_text)
    has_map = draft.n_draft_vocab is not None
    yield (
        "vocabulary map",
        f"d2t, {draft.n_draft_vocab} tokens" if has_map else "none, drafts every token",
    )
    yield "embedding", "its own" if draft.has_own_embedding else "the target's"
    yield "output matrix", "its own" if draft.has_own_output else "the target's"
    for key, value in draft.details.items():
        yield key.rpartition(".")[2].replace("_", " "), _detail(value)


def _detail(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _token(token: int | None, text: str | None) -> str:
    if token is None:
        return "none"
    return f"{token}" if text is None else f"{token} {text!r}"


def _memory(facts: Description) -> str:
    cache = facts.memory.cache_per_1k
    kept = "" if cache is None else f", {_bytes(cache)} of cache per 1000 tokens"
    return f"{_bytes(facts.memory.weights)} of float32 weights{kept}"


def _print_tensors(console: Console, file: GGUFFile) -> None:
    for info in file.tensors.values():
        shape = " x ".join(map(str, info.shape)) or "scalar"
        console.print(
            f"  {info.name:<40} {info.ggml_type:<8} {shape:<20} {_bytes(info.n_bytes)}",
            markup=False,
        )


def _print_verdict(console: Console, verdict: Verdict) -> None:
    names = f"{verdict.target.name} + {verdict.draft.name}: "
    console.print(names, style="bold", end="", markup=False)
    if verdict.fits:
        console.print("fits", style="green", end="")
        console.print(f", runs as {verdict.spec_type}", markup=False)
        return
    console.print("does not fit" if verdict.fault == "mismatch" else "cannot run", style="red")
    console.print(f"  {verdict.reason}", markup=False)


def _sizes(value: int | tuple[int, ...] | None) -> str:
    if isinstance(value, tuple):
        return f"{min(value)} to {max(value)}"
    return "?" if value is None else str(value)


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
