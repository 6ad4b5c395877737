"""What is measured, and how much of it: the parts by name, at full length and in a hurry."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from tests.servers import RedisServer

from . import commands, duplicates, latency, memory, publishing, renewals, rivals, scale, throughput
from .figure import Figure
from .subject import Subject

__all__ = ["PARTS", "chosen"]

Part = Callable[[bool], list[Figure]]


def _commands(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return commands.measure(subject, operations=100)


def _latency(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return latency.measure(subject, blocks=100 if quick else 600, calls=10)


def _throughput(quick: bool) -> list[Figure]:
    blocks, messages = (4, 300) if quick else (10, 1000)
    with RedisServer() as server:
        ways = [(pool, ignore) for pool in ("prefork", "threads") for ignore in (False, True)]
        runs = [
            throughput.measure(server, pool=pool, ignore_result=ignore, blocks=blocks, messages=messages)
            for pool, ignore in ways
        ]
    return list(chain.from_iterable(runs))


def _publishing(quick: bool) -> list[Figure]:
    with RedisServer() as server:
        return publishing.measure(server, blocks=60 if quick else 300, calls=10)


def _memory(quick: bool) -> list[Figure]:
    return list(chain.from_iterable(memory.measure(binary) for binary in memory.servers()))


def _heartbeat(quick: bool) -> list[Figure]:
    with RedisServer() as server, Subject(server) as subject:
        return renewals.measure(subject, leases=1000, ticks=10 if quick else 50)


def _scale(quick: bool) -> list[Figure]:
    sizes = (1000, 1_000_000)
    with RedisServer() as one, Subject(one) as small, RedisServer() as other, Subject(other) as large:
        return scale.measure(small, large, sizes=sizes, blocks=600, calls=10)


def _duplicates(quick: bool) -> list[Figure]:
    with RedisServer() as server:
        return duplicates.measure(server, messages=100 if quick else 1000)


def _rivals(quick: bool) -> list[Figure]:
    if not rivals.installed():
        raise SystemExit(
            "There is nobody to compare with. Install them first: pip install celery-singleton celery-once"
        )
    with RedisServer() as server:
        return rivals.measure(server, blocks=3 if quick else 8, messages=200 if quick else 600)


PARTS: dict[str, Part] = {
    "commands": _commands,
    "latency": _latency,
    "throughput": _throughput,
    "publishing": _publishing,
    "memory": _memory,
    "heartbeat": _heartbeat,
    "scale": _scale,
    "duplicates": _duplicates,
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
