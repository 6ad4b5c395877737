"""A flag that one thread raises and another waits for, and that an exception out of a signal handler leaves usable."""

from __future__ import annotations

import threading

__all__ = ["Flag"]


class Flag:
    """What `threading.Event` is.

    That one takes its lock by code in Python. A time limit that rings between the lock and the code behind it leaves it
    locked, and whoever raises the flag next waits for ever. ``with`` on the lock itself cannot be interrupted there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = threading.Condition(self._lock)
        self._up = False

    def is_set(self) -> bool:
        """Tell whether it is raised."""
        return self._up

    def set(self) -> None:
        """Raise it, and wake who waits for that."""
        with self._lock:
            self._up = True
            self._raised.notify_all()

    def clear(self) -> None:
        """Lower it."""
        self._up = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is raised, at most ``timeout`` seconds, and tell whether it is."""
        with self._lock:
            if not self._up:
                self._raised.wait(timeout)
            return self._up
