"""Arms measured in small alternating blocks, so that a busy moment of the machine meets every arm."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub, truediv
from statistics import median
from time import perf_counter

__all__ = ["Sample", "difference", "interleave", "ratio", "timed"]

RESAMPLES = 1000


@dataclass(slots=True)
class Sample:
    """What one arm took: seconds per call, block by block."""

    blocks: list[list[float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median call, in seconds."""
        return median(self._calls())

    @property
    def p99(self) -> float:
        """The call that is slower than 99 of 100, in seconds."""
        calls = sorted(self._calls())
        return calls[int(0.99 * (len(calls) - 1))]

    @property
    def medians(self) -> list[float]:
        """The median call of each block, in seconds."""
        return [median(block) for block in self.blocks]

    def _calls(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]

    def __str__(self) -> str:
        return f"{self.median * 1e6:.0f} us, p99 {self.p99 * 1e6:.0f}"


def interleave(arms: Mapping[str, Callable[[], object]], *, blocks: int, calls: int) -> dict[str, Sample]:
    """Time every arm in blocks that take turns.

    Arguments:
        arms: What to call, by name. A callable that returns a float has timed itself and returns seconds; or a list, of
            several calls.
        blocks: How many blocks each arm gets; one more, not counted, warms up.
        calls: Calls per block.

    Returns:
        A sample per arm.
    """
    samples = {name: Sample() for name in arms}
    names = list(arms)
    gc.collect()
    gc.freeze()  # what the imports left behind is nobody's cost
    for turn in range(blocks + 1):
        shift = turn % len(names)  # nobody is always first
        for name in names[shift:] + names[:shift]:
            block = _block(arms[name], calls)
            if turn:
                samples[name].blocks.append(block)
    return samples


def _block(arm: Callable[[], object], calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        since = perf_counter()
        own = arm()
        if isinstance(own, list):
            seconds += own
        else:
            seconds.append(own if isinstance(own, float) else perf_counter() - since)
    return seconds


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    since = perf_counter()
    call()
    return perf_counter() - since


def ratio(of: Sequence[float], to: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the ratio of two medians, and where 90 % of such ratios lie when the blocks are drawn again, in pairs.

    Arguments:
        of: One number per block of the arm in question.
        to: The same of the arm it is compared with, which ran beside it.

    The spread is the percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993).
    """
    return _resampled(of, to, truediv)


def difference(of: Sequence[float], to: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return how much one median is above another, and where 90 % of such differences lie, as `ratio` does."""
    return _resampled(of, to, sub)


def _resampled(
    of: Sequence[float], to: Sequence[float], compare: Callable[[float, float], float]
) -> tuple[float, tuple[float, float]]:
    pairs = list(zip(of, to, strict=True))

    def compared(drawn: Sequence[tuple[float, float]]) -> float:
        return compare(median(one for one, _ in drawn), median(other for _, other in drawn))

    drawn = random.Random(1)  # the same spread for the same samples
    found = sorted(compared(drawn.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return compared(pairs), (found[RESAMPLES // 20], found[-RESAMPLES // 20])
