"""Fail points: steps of a delivery, by name, at which the process that takes them is killed.

The library knows nothing of them. An app module of the tests puts them around methods of the library and of Celery, and
only in a worker whose environment names a directory in FAIL_POINTS. There a test arms a point for one operation; who
comes there with that operation is killed by SIGKILL, the first time and no other.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.celery.journal import Journal

VARIABLE = "FAIL_POINTS"

#: In the order in which a delivery comes to them. Between the two marked lines lies what no library can close.
POINTS = (
    "before acquire is sent",
    "after acquire, before the body",
    "in the body, before the effect",
    "in the body, after the effect",  # between effect and settle
    "before settle is sent",  # between effect and settle
    "settle applied, reply not used",
    "after settle, value not returned",
    "before the callback is published",
    "after the callback is published",
    "before the chain is published",
    "after the chain is published",
    "before the result is stored",
    "after the result is stored",
    "in on_success",
    "before the announce mark",
    "announce mark set, reply not used",
    "in task_postrun",
    "before the child tells its parent",
)
BETWEEN_EFFECT_AND_SETTLE = frozenset(POINTS[3:5])
#: Here a second dispatch cannot be helped; it carries the same ids.
BETWEEN_DISPATCH_AND_MARK = frozenset(POINTS[8:15])


class FailPoints:
    """The fail points of one test; the file system arms each for one strike."""

    points: Collection[str] = POINTS

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        #: the operation that this process is busy with
        self.operation: str | None = None

    @classmethod
    def from_env(cls) -> FailPoints | None:
        """Return the fail points that the environment names, None where it names none."""
        directory = os.environ.get(VARIABLE)
        return cls(directory) if directory else None

    def arm(self, point: str, operation: str, *, group: bool = False) -> None:
        """Kill the child, or its whole worker, that first comes to a point with this operation."""
        assert point in self.points, f"there is no fail point {point!r}"
        self._file(point, operation).write_text("group" if group else "child")

    def strike(self, point: str) -> None:
        """Come to a point, and go on unless it is armed for the operation of this process."""
        if self.operation is None:
            return
        armed = self._file(point, self.operation)
        try:
            whom = armed.read_text()
            os.rename(armed, armed.with_suffix(".struck"))  # of all that come at once, one can
        except FileNotFoundError:
            return
        Journal.from_env().write("killed", self.operation, point=point)
        if whom == "group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the signal is on its way, and nothing more may be done here

    def around(self, owner: Any, name: str, before: str | None = None, after: str | None = None) -> None:
        """Put points before and after a method or function."""
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.strike(before)
            answer = inner(*args, **kwargs)
            if after:
                self.strike(after)
            return answer

        setattr(owner, name, wrapped)

    def _file(self, point: str, operation: str) -> Path:
        return self.directory / f"{quote(point, safe='')}@{quote(operation, safe='')}.armed"
