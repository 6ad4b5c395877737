"""Two clocks, neither of which compares the wall clocks of two workers.

DynamoDB has no clock that a condition could ask. What it has is the ``Date`` of its replies: to a second, it is the
same for everybody, and tells when a record may be forgotten and when a retry is due. It does not decide who holds a
lease: that a lease ran out is seen by watching it for its whole length on the clock of one machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

from ..records import new_owner
from .rules import SECOND

__all__ = ["Clock"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


class Clock:
    """Tell the time of the server, and that of this machine."""

    def __init__(self) -> None:
        #: whose monotonic clock `ticks` reads; all processes of one machine have the same
        self.machine = _machine()
        #: by how many seconds the server's clock is ahead of the monotonic one, at least; None before it was heard
        self._ahead: float | None = None

    @property
    def heard(self) -> bool:
        """Whether the server has said what time it is."""
        return self._ahead is not None

    def ticks(self) -> int:
        """Return microseconds of a clock that nobody turns, and that only processes of this machine share."""
        return int(time.monotonic() * SECOND)

    def now(self) -> int:
        """Return microseconds since 1970 by the server's clock, late by a second at most; `hear` comes first."""
        assert self._ahead is not None
        return int((time.monotonic() + self._ahead) * SECOND)

    def hear(self, date: str | None, sent: float) -> None:
        """Learn from the date of a reply.

        Each reply bounds from both sides how far the clocks are apart: the date is cut to whole seconds, and was
        written between sending and now. What is known already is moved into these bounds and no further, so that the
        time told gets better and does not jump.

        Arguments:
            date: The reply's header; without one, which is not AWS then, this process's wall clock is believed.
            sent: Monotonic time before the request.
        """
        received = time.monotonic()
        try:
            said = parsedate_to_datetime(date or "").timestamp()
        except (TypeError, ValueError):
            said = time.time()
        least, most = said - received, said + 1 - sent
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)


def _machine() -> str:
    """Return a name for the clock that this process shares with its neighbours.

    They share it if one kernel has counted since one boot for both. The host's name is in it too: it keeps containers
    apart, and machines that were started from one snapshot.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return new_owner()  # a clock of this process alone
    try:
        space = os.readlink(_TIME_NAMESPACE)
    except OSError:  # a kernel that has no such namespaces
        space = ""
    return hashlib.sha256(f"{platform.node()}\n{boot}\n{space}".encode()).hexdigest()[:16]
