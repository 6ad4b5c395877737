"""Effects, counted outside the code under test.

A journal is a file that every process appends to with O_APPEND, one line an event:
`time_monotonic pid event key {"field": ...}`. The clock is the machine's, so lines of different processes compare.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    at: float
    pid: int
    event: str
    key: str
    fields: dict[str, Any]


class Journal:
    """An append-only list of what happened, shared by processes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def from_env(cls) -> Journal:
        """Return the journal that the environment names, for the bodies of tasks."""
        return cls(os.environ["JOURNAL"])

    def write(self, event: str, key: object = "-", **fields: object) -> None:
        """Append one event, in one system call."""
        parts = (f"{time.monotonic():.6f}", str(os.getpid()), quote(event), quote(str(key)), json.dumps(fields))
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, (" ".join(parts) + "\n").encode())
        finally:
            os.close(handle)

    def entries(self, event: str | None = None, key: object | None = None) -> list[Entry]:
        """Return the events so far, all or those of one name or key, oldest first."""
        text = self.path.read_text() if self.path.exists() else ""
        # What follows the last end of a line is being written.
        found = [_parse(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [
            entry
            for entry in found
            if (event is None or entry.event == event) and (key is None or entry.key == str(key))
        ]

    def count(self, event: str | None = None, key: object | None = None) -> int:
        """Return how many events there are, all or those of one name or key."""
        return len(self.entries(event, key))

    def wait_for(
        self,
        predicate: Callable[[list[Entry]], object],
        timeout: float = 15.0,
        message: str = "the journal to hold what is expected",
    ) -> list[Entry]:
        """Wait until `predicate` of all entries is true, and return them."""
        wait_until(lambda: predicate(self.entries()), timeout, lambda: f"{message}; the journal:\n{self}")
        return self.entries()

    def wait_for_count(
        self, n: int, event: str | None = None, key: object | None = None, timeout: float = 15.0
    ) -> list[Entry]:
        """Wait until at least `n` such events are there, and return them."""
        what = f"{n} x {event or 'any event'} of {key or 'any key'}"
        wait_until(lambda: self.count(event, key) >= n, timeout, lambda: f"{what}; the journal:\n{self}")
        return self.entries(event, key)

    def __str__(self) -> str:
        entries = self.entries()
        start = entries[0].at if entries else 0.0
        lines = [f"{e.at - start:9.3f} s  pid {e.pid:<7} {e.event:<12} {e.key} {e.fields or ''}" for e in entries]
        return "\n".join(lines) or "(empty)"


def _parse(line: str) -> Entry:
    at, pid, event, key, fields = line.split(" ", 4)
    return Entry(float(at), int(pid), unquote(event), unquote(key), json.loads(fields))
