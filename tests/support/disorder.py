"""Disorder, by a seed: tests in another order, and processes that pause.

`pytest --shuffle 7` shuffles the files, and the tests within each: one that needs what another left behind fails.

`pytest --slow 7` has workers pause where others see what they do, and a test once it has seen what it waited for. So
does a busy machine, once in a hundred runs: a test fails that takes a sign for the end of what follows it, or that has
a fraction of a second for what it does next.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.slowness import SEEN, SLOW, Pauses


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("disorder")
    group.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the order of this seed")
    group.addoption("--slow", type=int, metavar="SEED", help="have workers and tests pause, by this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Have tests pause, and what they start."""
    seed = config.getoption("--slow")
    if seed is not None:
        os.environ[SLOW] = str(seed)
        pauses = Pauses(str(seed))
        waiting.seen = lambda: pauses.pause(SEEN)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Shuffle what was collected, alike in every process of pytest-xdist."""
    yield
    seed = config.getoption("--shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests, file by file, in the order of a seed."""
    order, files = random.Random(seed), dict[Path, list[pytest.Item]]()
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [
        item for path in order.sample(list(files), len(files)) for item in order.sample(files[path], len(files[path]))
    ]
