"""What a schedule is asked: what can happen in it, and whether what must hold does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent

from celery_idempotent.events import Event
from celery_idempotent.stores.memory import MemoryStore

from .world import Process, Step


class Broken(AssertionError):
    """Raised for a schedule in which something does not hold."""


class Unended(Exception):
    """Raised for a schedule of which it is not known whether it has an end."""


class Law:
    """What must hold of every schedule of one kind; each kind derives its own, with its task."""

    #: What its schedules are called.
    kind = ""
    #: What its tasks keep their records in.
    store: type[MemoryStore] = MemoryStore
    #: Whether the broker may be away for a while.
    broker_goes_away = True
    #: The pools of which its workers may have one.
    pools: Sequence[str] = ("prefork",)
    #: Whether what is written into the result backend is a step.
    steps_in_backend = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def begins(self, simulation: Any) -> None:
        """A schedule begins; a law chooses what it is about."""
        self.simulation, self.world, self.choices = simulation, simulation.world, simulation.choices
        #: what was found in a process, where Celery takes the error for the task's
        self.broken = ""
        #: owners whose deliveries have ended, or whose workers know that their children are gone
        self.gone: set[str] = set()
        #: those whose children were killed, and those for which the store was asked for a lease after their end
        self.dead: set[str] = set()
        self.late: set[str] = set()

    def hosts(self) -> list[Any]:
        """Return the hosts beside the workers."""
        return []

    # -- what can happen beside workers and broker ---------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Return what can happen now."""
        return []

    def next_step(self) -> float:
        """Return when one of its steps is possible that is not yet; infinity for never."""
        return float("inf")

    def faults(self) -> list[Step]:
        """Return what can happen now to the store's records."""
        return []

    # -- what happens --------------------------------------------------------------------------------------------------

    def published(self, message: Any, process: Any) -> None:
        """A process publishes a message, which the broker has."""

    def asks(self, verb: str, args: Any, host: Any) -> None:
        """A host sends a request to the store."""

    def watch(self, verb: str, args: Any, host: Any, call: Callable[[], Any]) -> Any:
        """Call the store, and look at its answer."""
        return call()

    def told(self, verb: str, args: Any, answer: Any, host: Any) -> None:
        """A host gets an answer of the store."""

    def arrives_late(self, verb: str, args: Any) -> None:
        """The store carries out what its caller has given up; that may take a lease for what has ended."""
        if verb == "acquire" and args[0].owner in self.gone | self.dead:
            self.late.add(args[0].owner)

    def killed(self, process: Process) -> None:
        """A child is killed."""
        self.counts["kills"] += 1
        self.dead.add(getattr(getattr(process.host, "request", None), "_owner", ""))

    def working_for(self, process: Process) -> Any:
        """Return whose work a thread does that a process starts."""
        return process

    def stored(self, key: Any, value: Any) -> None:
        """Something is about to be written into the result backend."""

    def counts_late(self, process: Process, seconds: float) -> None:
        """A child was stopped as it counted a part of a chord."""

    def interrupted(self, process: Process) -> None:
        """A soft time limit rings in a child."""
        self.counts["interruptions"] += 1

    def shut_down(self, process: Process) -> None:
        """A signal ends a child, since its worker is shut down."""
        self.killed(process)
        self.counts["cut off"] += 1

    def announced(self, request: Any, since: float) -> None:
        """A worker ends that has been about to since then; the store was to be told."""

    def has_begun(self, process: Process) -> bool:
        """Return whether the body of a child's delivery has begun, as far as is known."""
        return True

    def timed_out(self, process: Process) -> None:
        """A hard time limit has passed for a child, which is about to be killed."""
        self.counts["time limits"] += 1

    def finished(self, request: Any, worker: Any) -> None:
        """A delivery has ended in its child."""
        if worker.failures == worker.failures_before:
            self.gone.add(request._owner)

    def released_when_gone(self, request: Any) -> None:
        """A worker has released the lease of a child that it has killed."""
        self.gone.add(request._owner)

    def given_back(self, request: Any, worker: Any) -> None:
        """A worker gives a message back."""

    def emitted(self, event: Event) -> None:
        """A process that lives emits an event."""

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what can be seen between any two steps."""
        if self.broken:
            self.fail(self.broken)

    def ended(self) -> None:
        """Check what must hold once nothing is left to do."""
        if self.simulation.broker.queue or self.simulation.broker.unacked:
            self.fail("messages are left")

    def fail(self, why: str) -> None:
        """End the schedule as one in which something does not hold."""
        if not self.broken:
            self.broken = why
            self.world.tell(f"BROKEN: {why}")
        raise Broken(self.broken)

    def hook(self, event: Event) -> None:
        process = getcurrent()
        if not (isinstance(process, Process) and process.killed):
            self.emitted(event)
