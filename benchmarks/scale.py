"""Whether a task costs more when the store remembers a million others, or ten."""

from __future__ import annotations

from celery_idempotent.stores import open_store

from .figure import Figure
from .filling import bytes_each, fill
from .sampling import interleave, ratio
from .subject import StoreSubject

__all__ = ["REACH", "measure"]

REACH = {"redis": 1.05, "cluster": 1.05, "postgres": 1.2, "sqlite": 1.2}


def measure(kind: str, few: str, many: str, *, sizes: tuple[int, int], blocks: int, calls: int) -> list[Figure]:
    """Time guarded first runs and replays on a store with few records, and on one with many, in turns.

    Arguments:
        kind: Which kind of store, for the figure to reach.
        few, many: The URLs of two empty places of this kind.
        sizes: How many records each shall hold.
        blocks: Blocks per store and case.
        calls: Calls per block.
    """
    with StoreSubject(open_store(few)) as small, StoreSubject(open_store(many)) as large:
        done = {}
        for subject, url, records in ((small, few, sizes[0]), (large, many, sizes[1])):
            done[subject] = subject.first_run(subject.order()).key
            fill(url, done[subject], records)
        arms = {
            "first run, few": small.guarded,
            "first run, many": large.guarded,
            "replay, few": lambda: small.guarded(done[small]),
            "replay, many": lambda: large.guarded(done[large]),
        }
        samples = interleave(arms, blocks=blocks, calls=calls)
    figures = []
    for case in ("first run", "replay"):
        much, little = samples[f"{case}, many"], samples[f"{case}, few"]
        value, spread = ratio(much.medians, little.medians)
        name = f"{kind}, {case} at {sizes[1]} records / at {sizes[0]}"
        figures.append(Figure("scale", name, value, "x", spread, REACH[kind], note=f"{much}; {little}"))
    size, where = bytes_each(many, sizes[1]), "memory" if kind in ("redis", "cluster") else "disk"
    figures.append(Figure("scale", f"{kind}, {where} per record at {sizes[1]}", size, "bytes"))
    return figures
