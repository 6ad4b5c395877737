"""How the demo ends before its end: an error for a person, or a signal."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["DemoError", "Interrupted", "Signals"]


class DemoError(Exception):
    """The demo cannot run here; the text says why and what to do."""


class Interrupted(Exception):
    """A signal asks the demo to end.

    Arguments:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Take note of Ctrl-C, SIGTERM and SIGHUP while the demo runs.

    They raise at `check()` and nowhere else: an exception in the middle of the start of a process would lose track of
    it.
    """

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Return if no signal came.

        Raises:
            Interrupted: one came.
        """
        if self._number:
            raise Interrupted(self._number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
