"""What a first run and a replay cost on every kind of store, in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from celery_idempotent.stores import open_store

from .figure import Figure
from .sampling import interleave
from .subject import StoreSubject

__all__ = ["measure"]


def measure(urls: Mapping[str, str], *, blocks: int, calls: int) -> list[Figure]:
    """Have a guard answer first runs and replays to other messages on each store, in turns; the body does nothing.

    Arguments:
        urls: By name, the URL of an empty place.
        blocks: Blocks per store and case.
        calls: Calls per block.
    """
    with ExitStack() as stack:
        subjects = {name: stack.enter_context(StoreSubject(open_store(url))) for name, url in urls.items()}
        arms: dict[str, Callable[[], object]] = {}
        for name, subject in subjects.items():
            done = subject.first_run(subject.claim(task_id="first")).key
            arms[f"{name}, first run"] = partial(subject.guarded, task_id="first")
            arms[f"{name}, replay"] = partial(subject.guarded, done, task_id="second")
        samples = interleave(arms, blocks=blocks, calls=calls)
    figures = []
    for name, sample in samples.items():
        figures.append(Figure("stores", f"{name}, median", sample.median * 1e6, "us", note=str(sample)))
        figures.append(Figure("stores", f"{name}, p99", sample.p99 * 1e6, "us"))
    return figures
