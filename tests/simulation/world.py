"""Processes that take turns as a seed decides, on a clock that moves when all wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class Process(greenlet):
    """A process that runs until its next step, and is then put where the scheduler finds it.

    Arguments:
        world: The world.
        host: What it runs on; it does not run while that is stopped.
        name: What a story calls it.
        run: What it does.
    """

    def __init__(self, world: World, host: Any, name: str, run: Callable[[], object]) -> None:
        super().__init__(self._begin)
        self.world, self.host, self.name, self._run = world, host, name, run
        self.wakes: float | None = None
        self.killed = False

    def _begin(self) -> None:
        if not self.killed:
            self._run()

    @property
    def ready(self) -> bool:
        """Whether it can take a step now."""
        waits = self.wakes is not None and self.wakes > self.world.now
        return not waits and self.host.stopped_until <= self.world.now


class World:
    """The clock, the processes, and what happens to them.

    Arguments:
        seed: Fixes every choice.
        story: Gets a line for each step (default: none are written).
    """

    def __init__(self, seed: int, story: Callable[[str], object] | None = None) -> None:
        self.random = random.Random(seed)
        random.seed(seed)  # the library's pauses are shortened by chance
        self.now = 1000.0
        self.processes: list[Process] = []
        self.steps = 0
        self._story = story

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        if self._story is not None:
            self._story(f"{self.now:9.2f}  {text}")

    # -- what processes call -------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """The clock of every process."""
        return self.now

    def step(self, text: str = "") -> None:
        """Let others go first, perhaps; here this process may be killed."""
        self.sleep(0.0, text)

    def sleep(self, seconds: float, text: str = "") -> None:
        """Let others go first, for so many seconds."""
        process = getcurrent()
        if not isinstance(process, Process):
            return  # the scheduler itself
        if process.killed:
            raise GreenletExit
        process.wakes = self.now + seconds if seconds else None
        process.parent.switch()
        if process.killed:
            raise GreenletExit
        if text:
            self.tell(f"{process.name}: {text}")

    # -- what the scheduler calls --------------------------------------------------------------------------------------

    def start(self, host: Any, name: str, run: Callable[[], object]) -> Process:
        """Add a process; its first step is one that the scheduler chooses."""
        process = Process(self, host, name, run)
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End a process where it is, as SIGKILL does: what it would do in passing has no effect any more."""
        process.killed = True
        self.processes.remove(process)
        if process:
            process.throw(GreenletExit)

    def run(self, process: Process) -> None:
        """Let a process take its next step."""
        process.wakes = None
        process.parent = getcurrent()
        process.switch()
        if process.dead and process in self.processes:
            self.processes.remove(process)

    def ready(self) -> list[Process]:
        """Return the processes that can take a step now."""
        return [process for process in self.processes if process.ready]

    def chance(self, probability: float) -> bool:
        """Return true so often."""
        return self.random.random() < probability
