"""Processes that race for leases: `python -m tests.support.stores.racer <url> <how many>`, and a line a round on stdin.

A round is `<key> <time>`: every process asks for the key at that time, by the clock that all processes of a machine
share. Each answers with a line of its own, `<fence> <took over>` or the verdict; each has said `ready` before.

They are forked from one process that has imported what they need, before it opens anything.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterable
from typing import NoReturn

from celery_idempotent.stores import Lease, open_store
from tests.support.stores.benches import claim


def race(url: str, name: str, rounds: Iterable[bytes]) -> None:
    store = open_store(url)
    store.ping()
    say("ready")
    for line in rounds:
        key, at = line.decode().split()
        asked = claim(key, task_id=name, max_crashes=1000)
        while time.time() < float(at):
            pass  # closer together than any sleep would bring them
        answer = store.acquire(asked)
        say(f"{answer.fence} {answer.taken_over}" if isinstance(answer, Lease) else str(answer.verdict))
    store.close()


def run(url: str, name: str, rounds: Iterable[bytes]) -> NoReturn:
    """Race, and end this process, of which most is a copy of the first one."""
    try:
        race(url, name, rounds)
    except BaseException:  # noqa: BLE001 - whatever it was: who counts the lines would wait in vain
        traceback.print_exc()
        say("failed")
    os._exit(0)


def say(text: str) -> None:
    """Print a line in one write, which no other process's line comes into."""
    os.write(1, f"{text}\n".encode())


def main(url: str, many: int) -> None:
    ends: list[int] = []
    for number in range(many):
        reading, writing = os.pipe()
        if os.fork() == 0:
            for end in (writing, *ends):
                os.close(end)
            with open(reading, "rb") as rounds:
                run(url, f"t{number}", rounds)
        os.close(reading)
        ends.append(writing)
    for line in sys.stdin.buffer:
        for end in ends:
            os.write(end, line)
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
