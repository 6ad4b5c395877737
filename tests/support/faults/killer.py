"""Kills the process of a task some time after its first statement, wherever it is by then."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

__all__ = ["Killer"]


class Killer:
    """One process's doom.

    Arguments:
        chance: How likely a run is to be killed, 0 to 1.
        within: Longest time from the first statement to the kill, in seconds.
    """

    def __init__(self, chance: float, within: float) -> None:
        self.chance = chance
        self.within = within
        self._run = 0

    @classmethod
    def from_env(cls) -> Killer:
        """Return the killer of DOOM and DOOM_WITHIN."""
        return cls(float(os.environ["DOOM"]), float(os.environ["DOOM_WITHIN"]))

    def begins(self) -> None:
        """Say that a run has made its first statement."""
        self._run += 1
        if random.random() < self.chance:
            threading.Thread(target=self._strike, args=(self._run, random.uniform(0, self.within)), daemon=True).start()

    def ends(self) -> None:
        """Say that the run has been answered, and the message is as good as acked; a later kill would hit another."""
        self._run += 1

    def _strike(self, run: int, delay: float) -> None:
        time.sleep(delay)
        if run == self._run:
            os.kill(os.getpid(), signal.SIGKILL)
