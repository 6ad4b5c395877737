"""What is measured, and how much of it: the parts by name, at full length and in a hurry."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from tests.support.servers import RedisServer

from . import (
    commands,
    duplicates,
    growth,
    held,
    hooks,
    http,
    http_rivals,
    latency,
    memory,
    noting,
    publishing,
    purging,
    recovery,
    renewals,
    rivals,
    scale,
    table,
    throughput,
    within,
)
from .figure import Figure
from .places import NAMES, places
from .subject import Subject

__all__ = ["PARTS", "chosen"]

Part = Callable[[bool], list[Figure]]


def _commands(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return commands.measure(subject, operations=100)


def _latency(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return latency.measure(subject, blocks=100 if quick else 600, calls=10)


def _hooks(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return hooks.measure(subject, blocks=100 if quick else 600, calls=10)


def _throughput(quick: bool) -> list[Figure]:
    blocks, messages = (4, 300) if quick else (10, 1000)
    with RedisServer() as server:
        ways = [*((pool, ignore) for pool in ("prefork", "threads") for ignore in (False, True)), ("solo", True)]
        runs = [
            throughput.measure(server, pool=pool, ignore_result=ignore, blocks=blocks, messages=messages)
            for pool, ignore in ways
        ]
    return list(chain.from_iterable(runs))


def _publishing(quick: bool) -> list[Figure]:
    with RedisServer() as server:
        blocks = 60 if quick else 300
        return [
            *publishing.measure(server, blocks=blocks, calls=10),
            *publishing.measure_unique(server, blocks=blocks, calls=10),
        ]


def _memory(quick: bool) -> list[Figure]:
    return list(chain.from_iterable(memory.measure(binary) for binary in memory.servers()))


def _heartbeat(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return renewals.measure(subject, leases=1000, ticks=10 if quick else 50)


def _history(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return noting.measure(subject, blocks=60 if quick else 400, calls=10, replays=200 if quick else 1000)


def _scale(quick: bool) -> list[Figure]:
    blocks = 60 if quick else 400
    figures: list[Figure] = []
    for kind in scale.REACH:
        # In memory, three gigabytes of them.
        many = 10_000 if quick else 10_000_000 if kind in ("redis", "cluster") else 1_000_000
        sizes = (100 if quick else 1000, many)
        with places((kind,)) as small, places((kind,)) as large:
            figures += scale.measure(kind, small[kind], large[kind], sizes=sizes, blocks=blocks, calls=10)
    return figures


def _stores(quick: bool) -> list[Figure]:
    with places() as urls:
        return table.measure(urls, blocks=20 if quick else 150, calls=10)


def _recovery(quick: bool) -> list[Figure]:
    kinds = tuple(name for name in NAMES if name != "memory")
    with places(kinds) as urls:
        return list(chain.from_iterable(recovery.measure(kind, urls[kind], rounds=1 if quick else 5) for kind in kinds))


def _purging(quick: bool) -> list[Figure]:
    kinds = ("postgres", "sqlite")
    with places(kinds) as urls:
        records = 5000 if quick else 100_000
        return list(chain.from_iterable(purging.measure(kind, urls[kind], records=records) for kind in kinds))


def _within(quick: bool) -> list[Figure]:
    kinds = ("postgres", "sqlite")
    with places(kinds) as urls:
        parts = [within.measure(kind, urls[kind], blocks=20 if quick else 150, calls=10) for kind in kinds]
    return list(chain.from_iterable(parts))


def _duplicates(quick: bool) -> list[Figure]:
    with RedisServer() as server:
        return duplicates.measure(server, messages=100 if quick else 1000)


def _http(quick: bool) -> list[Figure]:
    blocks, calls, at_once = (10, 10, 200) if quick else (40, 20, 1000)
    with RedisServer() as server:
        runs = [http.measure(server, kind, blocks=blocks, calls=calls, at_once=at_once) for kind in http.KINDS]
    figures = list(chain.from_iterable(runs))
    for middleware in http_rivals.HERE:
        with http_rivals.trial(middleware) as subject:
            figures.append(http.race(middleware, subject, clients=100))
    return figures


def _rivals(quick: bool) -> list[Figure]:
    if not rivals.installed():
        raise SystemExit(
            "There is nobody to compare with. Install them first: pip install celery-singleton celery-once"
        )
    blocks, messages = (3, 200) if quick else (8, 600)
    with RedisServer() as server:
        runs = [rivals.measure(server, pool=pool, blocks=blocks, messages=messages) for pool in rivals.POOLS]
    return list(chain.from_iterable(runs))


def _held(quick: bool) -> list[Figure]:
    messages, seconds, rounds = (1000, 8.0, 1) if quick else (10_000, 60.0, 3)
    with RedisServer() as server:
        return held.measure(server, messages=messages, seconds=seconds, rounds=rounds, visibility=12 if quick else 60)


def _growth(quick: bool) -> list[Figure]:
    blocks, messages, seconds = (2, 200, 0.5) if quick else (5, 500, 3.0)
    numbers = (1, 2) if quick else (1, 2, 4, 8)
    with RedisServer() as server:
        figures = [
            growth.measure_children(server, children=number, blocks=blocks, messages=messages) for number in numbers
        ]
    kinds = ("redis", "postgres", "sqlite")
    with places(kinds) as urls:
        for kind in kinds:
            figures += [growth.measure_stores(kind, urls[kind], processes=n, seconds=seconds) for n in numbers]
    return figures


PARTS: dict[str, Part] = {
    "commands": _commands,
    "latency": _latency,
    "hooks": _hooks,
    "throughput": _throughput,
    "publishing": _publishing,
    "memory": _memory,
    "heartbeat": _heartbeat,
    "history": _history,
    "held": _held,
    "scale": _scale,
    "growth": _growth,
    "stores": _stores,
    "recovery": _recovery,
    "purging": _purging,
    "within": _within,
    "duplicates": _duplicates,
    "http": _http,
    "rivals": _rivals,
}


def chosen(only: str | None, *, quick: bool) -> list[str]:
    """Return the names of the parts to run.

    Arguments:
        only: Names with commas between, or None for all that can be run here.
        quick: Leave out what has to fill a store first.

    Raises:
        ValueError: there is no such part.
    """
    if only is not None:
        names = [name.strip() for name in only.split(",")]
        unknown = ", ".join(name for name in names if name not in PARTS)
        if unknown:
            raise ValueError(f"there is no part {unknown}; write some of {', '.join(PARTS)}")
        return names
    skipped = {"scale"} if quick else set()
    return [name for name in PARTS if name not in skipped and (name != "rivals" or rivals.installed())]
