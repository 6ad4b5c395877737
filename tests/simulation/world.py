"""Processes that take turns as a seed decides, on a clock that moves when all wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")
#: Seconds after which a thread looks again whether a lock is free.
WAIT = 0.001
#: What can happen: its name, how likely it is, and what it calls with what.
Step = tuple[str, float, Callable[[Any], object], Any]


@dataclass
class Schedule:
    """What was chosen in a run: its steps in order, and every other value that is not the simplest one.

    While a step is not possible, what is simplest happens instead.
    """

    kind: str
    steps: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class Choices:
    """Every choice of a run: drawn from a seed, or as a schedule has it.

    What a schedule does not say is chosen as simply as possible: the first option, no fault, no pause.

    Arguments:
        seed: Fixes every choice.
        schedule: What to choose instead (default: the seed decides).
        record: Whether to keep what was chosen, in ``made``.
    """

    def __init__(self, seed: int, schedule: Schedule | None = None, *, record: bool = False) -> None:
        self._random = Random(seed).random
        self.schedule = schedule
        self.made = Schedule("") if record else None
        self._counts: Counter[str] = Counter()
        self._next = 0
        #: whether nothing but the seed decides, and nothing is kept
        self._only_drawn = schedule is None and not record

    def one_of(self, label: str, options: Sequence[T]) -> T:
        """Return one of the options, of which the first is the simplest."""
        if self._only_drawn:
            return options[int(self._random() * len(options))]
        value = self._chosen(label, options[0], lambda: options[int(self._random() * len(options))])
        return value if self.schedule is None or value in options else options[0]

    def chance(self, label: str, probability: float) -> bool:
        """Return true so often; false is simplest."""
        if self._only_drawn:
            return probability > 0 and self._random() < probability
        # Counted all the same where it is recorded: a schedule has no end of its faults, and is asked each time.
        return self._chosen(label, False, lambda: probability > 0 and self._random() < probability)

    def between(self, label: str, low: float, high: float) -> float:
        """Return a number of at most six decimals; the lowest is simplest."""
        if self._only_drawn:
            return round(low + (high - low) * self._random(), 6)
        return self._chosen(label, low, lambda: round(low + (high - low) * self._random(), 6))

    def _chosen(self, label: str, simplest: T, draw: Callable[[], T]) -> T:
        self._counts[label] += 1
        name = f"{label} #{self._counts[label]}"
        value: T = draw() if self.schedule is None else self.schedule.values.get(name, simplest)
        if self.made is not None and value != simplest:
            self.made.values[name] = value
        return value

    def step(self, steps: Sequence[Step]) -> Step:
        """Return what happens next, of all that can happen now; the first is the simplest."""
        if self.schedule is not None:
            chosen = self._recorded(steps)
        else:
            left, chosen = self._random() * sum([step[1] for step in steps]), steps[-1]
            for step in steps:
                left -= step[1]
                if left < 0:
                    chosen = step
                    break
        if self.made is not None:
            self.made.steps.append(chosen[0])
        return chosen

    def _recorded(self, steps: Sequence[Step]) -> Step:
        recorded = self.schedule.steps
        if self._next < len(recorded):
            for step in steps:
                if step[0] == recorded[self._next]:
                    self._next += 1
                    return step
        return steps[0]


class Process(greenlet):
    """A process that runs until its next step, and is then put where the scheduler finds it.

    Arguments:
        world: The world.
        host: What it runs on; it does not run while that is stopped.
        name: What a story calls it.
        run: What it does.
    """

    wakes = 0.0
    killed = False
    #: what a signal raises in it, at its next step
    interruption: BaseException | None = None
    #: the time limit in whose block it is
    timeout: BaseException | None = None
    #: a handler of signals that runs in it, at its next step
    handler: Callable[[], object] | None = None
    #: whether a signal may
    interruptible = False
    #: whether that ends its process, and whether it has been raised
    signalled = cut_off = False
    #: whether the last that it wrote into the result backend is the count of a chord's parts
    counted = False
    #: when the store had its last settlement
    settled_at = float("inf")
    #: whether another one waits for it
    inside = False
    #: the one whose work it does, where that has given it to another thread
    works_for: Any = None
    #: whether it is a thread that ends when it has done its work
    works = False
    #: the thread that it is for now, where that goes on after it
    thread: Any = None
    #: what ends its sleep
    wakes_for: Any = None
    #: how many statements of the library it runs before others may (0: all up to its next step)
    statements = 0

    def __init__(self, world: World, host: Any, name: str, run: Callable[[], object]) -> None:
        super().__init__(self._begin)
        self.world, self.host, self.name, self._run = world, host, name, run

    def _begin(self) -> None:
        if not self.killed:
            if self.world.divided:
                self.statements = self.world.statements_of(self)
            self._run()


class Lock:
    """A lock of threads that take turns, which its holder can take again."""

    def __init__(self) -> None:
        self._holder: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        process = getcurrent()
        if isinstance(process, Process):  # the scheduler waits for nobody
            while self._holder not in (None, process) and not (self._holder.dead or self._holder.killed):
                process.world.sleep(WAIT)
        self._depth = self._depth + 1 if self._holder is process else 1
        self._holder = process

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None


class Condition:
    """A condition on which one thread waits."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: Any = None

    def wait(self, timeout: float) -> None:
        """Wait until it is notified, or for so many seconds; the lock is free meanwhile."""
        self._waiting = getcurrent()
        self._lock.__exit__()
        self._waiting.world.sleep(timeout)
        self._lock.__enter__()
        self._waiting = None

    def notify(self) -> None:
        """Wake who waits."""
        if self._waiting is not None:
            self._waiting.wakes = self._waiting.world.now


class World:
    """The clock, the processes, and what happens to them.

    Arguments:
        choices: Every choice that is made.
        interrupted: Called with a process in which a signal is about to raise an error.
        story: Gets a line for each step (default: none are written).
    """

    #: whether processes let others go first between two statements, too
    divided = False

    def __init__(
        self,
        choices: Choices,
        interrupted: Callable[[Process], object],
        story: Callable[[str], object] | None = None,
    ) -> None:
        self.choices, self._interrupted = choices, interrupted
        self.now = 1000.0
        self.processes: list[Process] = []
        self.steps = 0
        self._story = story
        #: how many processes wait between two statements
        self.between = 0

    @staticmethod
    def statements_of(process: Process) -> int:
        """Return how many statements a process runs before others may."""
        return 0

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        if self._story is not None:
            self._story(f"{self.now:9.2f}  {text}")

    # -- what processes call -------------------------------------------------------------------------------------------

    def step(self, text: str = "") -> None:
        """Let others go first, perhaps; here this process may be killed or interrupted."""
        self.sleep(0.0, text)

    def step_between(self) -> None:
        """Let other processes go first, and nothing else happen."""
        self.between += 1
        try:
            self._wait(getcurrent(), 0.0)
        finally:
            self.between -= 1

    def _wait(self, process: Any, seconds: float) -> None:
        if process.killed:
            raise GreenletExit
        process.wakes = self.now + seconds
        process.parent.switch()
        if process.killed:
            raise GreenletExit
        if self.divided:
            process.statements = self.statements_of(process)

    def sleep(self, seconds: float, text: str = "") -> None:
        """Let others go first, for so many seconds."""
        process = getcurrent()
        if not isinstance(process, Process):
            return  # the scheduler itself
        self._wait(process, seconds)
        if process.handler is not None:
            handler, process.handler = process.handler, None
            handler()
        if process.interruption is not None:
            interruption, process.interruption = process.interruption, None
            self.tell(f"{process.name}: {type(interruption).__name__}")
            self._interrupted(process)
            try:
                raise interruption
            finally:
                del interruption  # which would keep the frames that it passes
        if text:
            self.tell(f"{process.name}: {text}")

    # -- what the scheduler calls --------------------------------------------------------------------------------------

    def start(self, host: Any, name: str, run: Callable[[], object]) -> Process:
        """Add a process; its first step is one that the scheduler chooses."""
        if getattr(getcurrent(), "killed", False):
            raise GreenletExit
        process = Process(self, host, name, run)
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """End a process where it is, as SIGKILL does: what it would do in passing has no effect any more."""
        process.killed = True
        if process in self.processes:
            self.processes.remove(process)
        if process:
            process.parent = getcurrent()  # else others take steps before the rest of a child is killed
            process.throw(GreenletExit)

    def interrupt(self, process: Process, error: BaseException) -> None:
        """Have a process raise an error at the step where it is."""
        process.interruption, process.wakes = error, self.now

    def run(self, process: Process) -> None:
        """Let a process take its next step."""
        process.parent = getcurrent()
        process.switch()
        if process.dead and process in self.processes:
            self.processes.remove(process)
