"""Kills the process of a task some time after its first statement, wherever it is by then."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

__all__ = ["Killer"]


class Killer:
    """The doom of a worker's children.

    Arguments:
        chance: How likely a run is to be killed, 0 to 1.
        within: Longest time from the first statement to the kill, in seconds.
        seed: With the number of the child, fixes which of its runs are killed, and after how long.
    """

    def __init__(self, chance: float, within: float, seed: int) -> None:
        self.chance = chance
        self.within = within
        self.seed = seed
        self.children = 0
        self._run = 0
        self._pid = 0
        self._random = random.Random()

    @classmethod
    def from_env(cls) -> Killer:
        """Return the killer of DOOM, DOOM_WITHIN and DOOM_SEED."""
        env = os.environ
        return cls(float(env["DOOM"]), float(env["DOOM_WITHIN"]), int(env["DOOM_SEED"]))

    def forks(self) -> None:
        """Say, in the main process, that another child is made."""
        self.children += 1

    def begins(self, strikes: Callable[[], None]) -> None:
        """Say that a run has made its first statement.

        Arguments:
            strikes: Called right before the kill.
        """
        if self._pid != os.getpid():
            self._pid, self._random = os.getpid(), random.Random(f"{self.seed}-{self.children}")
        self._run += 1
        chance, delay = self._random.random(), self._random.uniform(0, self.within)
        if chance < self.chance:
            threading.Thread(target=self._strike, args=(self._run, delay, strikes), daemon=True).start()

    def ends(self) -> None:
        """Say that the run has been answered, and the message is as good as acked; a later kill would hit another."""
        self._run += 1

    def _strike(self, run: int, delay: float, strikes: Callable[[], None]) -> None:
        time.sleep(delay)
        if run == self._run:
            strikes()
            os.kill(os.getpid(), signal.SIGKILL)
