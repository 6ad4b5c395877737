"""Forked children of a test, and what they say."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["Child", "fork"]

CHILD_SECONDS = 60


@dataclass
class Child:
    """A child that works until it is told to end; `said()` waits for its next word."""

    pid: int
    reading: BinaryIO
    ending: BinaryIO

    def said(self) -> str:
        return self.reading.readline().decode().strip()

    def end(self) -> None:
        """Let it end, if it has not, and wait until it is gone."""
        if not self.ending.closed:
            self.ending.write(b".")  # to close the pipe would not do: children that were forked later have it too
            self.ending.close()
            self.reading.close()
            os.waitpid(self.pid, 0)


def fork(*steps: Callable[[], object], user: int | None = None) -> Child:
    """Fork, do the steps in the child, have it say what each returned or raised, and wait there for its end."""
    says, tells = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
        pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)  # a child that hangs is a fact too
            os.close(tells[1])
            if user is not None:
                os.setuid(user)
            for step in steps:
                try:
                    answer = step()
                except BaseException as error:  # noqa: BLE001 - it must not reach pytest, of which this is a copy
                    answer = f"{type(error).__name__}: {error}"
                os.write(says[1], f"{answer}\n".encode())
            os.read(tells[0], 1)
        finally:
            os._exit(0)
    os.close(says[1])
    os.close(tells[0])
    return Child(pid, open(says[0], "rb"), open(tells[1], "wb", buffering=0))
