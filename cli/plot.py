"""The results of `specdec bench` as a picture; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError
from specdec.options import AUTO

if TYPE_CHECKING:
    from specdec.bench import Report, Result


def require_matplotlib() -> None:
    """Raises `UsageError` that says what to install unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--plot needs the package matplotlib; pip install 'specdec[plot]'"
        ) from None


def draw(report: Report, path: Path) -> None:
    """Writes acceptance length and speed over the draft length. Raises `UsageError` on failure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, speeds = figure.subplots(1, 2)
    _label(lengths, "tokens per target pass", "acceptance length (95 % interval)")
    _label(speeds, "times the speed without speculation", "speed")
    for name, results in _series(report).items():
        _draw_series(lengths, speeds, name, results)
    n_max = {result.configuration.n_max or 0 for result in report.results} - {0, AUTO}
    for axes in (lengths, speeds):
        axes.set_xticks(sorted(n_max))
        axes.axhline(1.0, color="grey", linewidth=1, linestyle=":")
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror}") from None


def _label(axes: Any, what: str, title: str) -> None:
    axes.set_xlabel("longest draft in tokens")
    axes.set_ylabel(what)
    axes.set_title(title)


def _series(report: Report) -> dict[str, list[Result]]:
    """Results by spec type and draft, without the run without speculation."""
    drafts = {result.configuration.draft for result in report.results} - {None}
    series: dict[str, list[Result]] = {}
    for result in report.results[1:]:
        one = result.configuration
        suffix = f" ({one.draft.stem})" if len(drafts) > 1 and one.draft is not None else ""
        suffix += " auto" if one.n_max == AUTO else ""
        series.setdefault(one.name + suffix, []).append(result)
    return series


def _draw_series(lengths: Any, speeds: Any, name: str, results: Sequence[Result]) -> None:
    """One curve; a type without a draft length is a level line."""
    if results[0].configuration.n_max in (None, AUTO):
        (line,) = lengths.plot([], [], marker="s", label=name)
        lengths.axhline(results[0].acceptance_length, color=line.get_color())
        speeds.axhline(results[0].ratio, color=line.get_color(), label=name)
        return
    held = sorted(results, key=lambda result: result.configuration.n_max or 0)
    x = [result.configuration.n_max for result in held]
    y = [result.acceptance_length for result in held]
    ends = [result.interval or (result.acceptance_length,) * 2 for result in held]
    below = [value - low for value, (low, _) in zip(y, ends, strict=True)]
    above = [high - value for value, (_, high) in zip(y, ends, strict=True)]
    lengths.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, label=name)
    speeds.plot(x, [result.ratio for result in held], marker="o", label=name)
