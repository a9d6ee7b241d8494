"""What drafting and verifying cost on this machine, measured once for each pair of models."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec.native.build import cache_folder, processor
from specdec.options import SamplingOptions
from specdec.sampling.chain import best_tokens
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.drafters.base import Drafter
    from specdec.gguf_file import GGUFFile
    from specdec.models.base import Target

log = logging.getLogger(__name__)

PACE_RATE, SURCHARGE_RATE = 0.1, 0.02
"""How fast `LiveCosts` follow: shares, on a logarithmic scale, of what was not expected."""
BUDGET = 1.0
"""Seconds after which no further repetition begins."""
DEPTH = 128
"""Tokens in the caches while it is measured."""
REPETITIONS = 8
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths that are measured; what lies between is interpolated."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a round by its draft length k = 0 ... n_max."""

    draft: tuple[float, ...]
    """Drafting k tokens."""
    verify: tuple[float, ...]
    """The target's pass over k + 1 rows."""
    observe: float
    """Showing a token to the drafter."""

    def round(self, length: int) -> float:
        """A whole round with a draft of ``length`` tokens; without one the drafter rests."""
        return self.draft[length] + self.verify[length] + (self.observe if length else 0.0)


class LiveCosts:
    """Costs that follow what rounds take now: another program may have begun or ended.

    A round's time is ``measured * pace``, and times ``surcharge`` if it has a draft. What slows
    the machine down slows every round, so the pace follows all of them fast, the surcharge slowly.
    """

    def __init__(self, costs: Costs) -> None:
        self.measured = costs
        self._pace = self._surcharge = 1.0

    def round(self, length: int) -> float:
        """Seconds of a round with a draft of ``length`` tokens."""
        seconds = self.measured.round(length) * self._pace
        return seconds * self._surcharge if length else seconds

    def note(self, length: int, seconds: float) -> None:
        """Takes a round's time into account; a single slow one counts for little."""
        surprise = min(max(seconds / self.round(length), 0.5), 2.0)
        self._pace *= surprise**PACE_RATE
        if length:  # large surprises are the machine's
            self._surcharge *= min(max(surprise, 0.8), 1.25) ** SURCHARGE_RATE


def load_or_measure(
    target: Target,
    drafter: Drafter,
    n_ctx: int,
    files: Sequence[GGUFFile | None],
    settings: tuple[object, ...],
) -> Costs:
    """The costs of a pair, from the user's cache if this machine has measured it before.

    ``settings`` is everything that was chosen and changes what a round costs.
    """
    path = cache_folder() / f"costs-{_fingerprint(target, drafter, files, settings)}.json"
    costs = _read(path, drafter.n_max)
    if costs is None:
        costs = measure(target, drafter, n_ctx)
        try:
            _write(path, costs)
        except OSError as error:
            log.debug("draft costs: cannot write %s: %s", path, error.strerror or error)
    log.debug(
        "%s: a round without a draft takes %.2f ms, with drafts of 1 to %d tokens %s ms",
        drafter.name,
        costs.round(0) * 1000,
        drafter.n_max,
        ", ".join(f"{costs.round(k) * 1000:.2f}" for k in range(1, drafter.n_max + 1)),
    )
    return costs


@torch.inference_mode()
def measure(target: Target, drafter: Drafter, n_ctx: int) -> Costs:
    """Times drafts and passes of several lengths; the best of a few repetitions each."""
    n_max = drafter.n_max
    lengths = sorted({0, *(k for k in LENGTHS if k < n_max), n_max})
    drafter = copy.copy(drafter)
    drafter.begin(SamplingOptions(temp=0.0))
    depth = max(1, min(DEPTH, n_ctx - n_max - 2))
    tokens = torch.arange(depth + n_max + 1, device=target.device) % target.config.n_vocab
    cache = target.new_cache(n_ctx)
    hidden = target(tokens[:depth], cache, taps=drafter.taps, logit_rows=0).hidden
    drafter.observe(tokens[:depth], hidden)
    cache.checkpoint()

    def verify(length: int) -> None:
        best_tokens(target(tokens[: length + 1], cache, taps=drafter.taps).logits)

    drafts: dict[int, float] = dict.fromkeys(lengths, float("inf"))
    passes, drafts[0] = dict(drafts), 0.0
    started = time.perf_counter()
    for repetition in range(REPETITIONS):
        for length in lengths:
            if repetition and time.perf_counter() - started > BUDGET:
                break
            passes[length] = min(passes[length], _time(verify, length))
            cache.truncate(depth)
            if length:
                drafts[length] = min(drafts[length], _time(lambda k: drafter.draft(1, k), length))
                drafter.accept(0)
    shown = None if hidden is None else hidden[:1]
    observe = _time(lambda n: drafter.observe(tokens[:n], shown), 1)
    return Costs(_interpolate(drafts, n_max), _interpolate(passes, n_max), observe)


def _time(run: Callable[[int], object], length: int) -> float:
    started = time.perf_counter()
    run(length)
    return time.perf_counter() - started


def _interpolate(measured: Mapping[int, float], n_max: int) -> tuple[float, ...]:
    """Values at 0 ... n_max; never less for a longer draft, whatever the clock said."""
    values: list[float] = []
    for length in range(n_max + 1):
        below = max(k for k in measured if k <= length)
        above = min(k for k in measured if k >= length)
        share = (length - below) / (above - below) if above > below else 0.0
        value = measured[below] + share * (measured[above] - measured[below])
        values.append(max(value, values[-1]) if values else value)
    return tuple(values)


def _fingerprint(
    target: Target,
    drafter: Drafter,
    files: Sequence[GGUFFile | None],
    settings: tuple[object, ...],
) -> str:
    """A hash of everything that the costs depend on."""
    found = [_identity(file) for file in files if file is not None]
    run = (drafter.name, drafter.n_max, str(target.device), torch.get_num_threads(), *settings)
    backends = type(target.layers[0]).__name__, torch.__version__, __version__, processor()
    return hashlib.sha256(repr((found, run, backends)).encode()).hexdigest()[:20]


def _identity(file: GGUFFile) -> tuple[str, int, int]:
    path = file.path.resolve()
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _write(path: Path, costs: Costs) -> None:
    """Writes costs down at once: other runs see all of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_text(json.dumps(asdict(costs)), encoding="utf-8")
        written.replace(path)


def _read(path: Path, n_max: int) -> Costs | None:
    """What was measured before; None if it is not there or makes no sense."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        costs = Costs(
            tuple(map(float, values["draft"])),
            tuple(map(float, values["verify"])),
            float(values["observe"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if len(costs.draft) == len(costs.verify) == n_max + 1 else None
