"""What must hold of every schedule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from celery import states
from greenlet import getcurrent

from celery_idempotent import add_hook, remove_hook
from celery_idempotent.errors import LeaseLost as LeaseLostError
from celery_idempotent.events import Event, LeaseLost, ReleaseFailed, SettleFailed
from celery_idempotent.stores import Refusal, State, Verdict


class Broken(AssertionError):
    """Raised for a schedule in which something does not hold."""


@dataclass(eq=False)
class Run:
    """A body that began."""

    order: str
    task_id: str
    held: Any
    process: Any
    worker: Any
    number: int
    effect: bool = False
    #: how it ended: returned, raised, killed
    ending: str = ""
    #: whether it was cut off, or the library noticed that its lease was lost or that it could not be settled
    excused: bool = False
    #: whether it could not be settled, so that its caller has an answer that others cannot get
    unsettled: bool = False
    #: when its retry is due
    retry_due: float = 0.0


class Law:
    """What callers of a shop rely on; and its task, with what happens to it."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.counts: Counter[str] = Counter()

    def begins(self, simulation: Any) -> None:
        self.simulation = simulation
        self.runs = []
        #: what was found in a process, where Celery takes the error for the task's
        self.broken = ""
        self.fences: dict[str, int] = defaultdict(int)
        self.settled: dict[str, bytes] = {}
        chance = simulation.world.random
        self.raises, self.retries = chance.choice([0, 0, 0.2]), chance.choice([0, 0, 0.3])
        #: whether the task checks its lease before it charges
        self.checks = chance.choice([True, False])

    def calls(self, chance: Random) -> list[tuple[str, str]]:
        """Return the calls: orders, each under several ids, or under one by a publisher that tries again."""
        made = []
        for order in ("ORD-1", "ORD-2")[: chance.choice([1, 1, 2])]:
            for number in range(chance.choice([1, 2, 2, 3])):
                task_id = f"{order}-{number}"
                made += [(order, task_id)] * chance.choice([1, 1, 1, 2])
        chance.shuffle(made)
        return made

    # -- what happens --------------------------------------------------------------------------------------------------

    def body(self, task: Any, order: str) -> str:
        """The task: it charges a customer, and takes its time before and after."""
        world, held = self.simulation.world, task.lease
        process = getcurrent()
        run = Run(order, task.request.id, held, process, process.host, len(self.runs) + 1)
        self.runs.append(run)
        self.counts["runs"] += 1
        last = next((other for other in self.runs[-2::-1] if other.order == order), run)
        if world.now < last.retry_due - 0.01 and not last.excused and last.task_id != run.task_id:
            self.fail(f"run {run.number} of {order} begins before the retry of run {last.number} is due")
        if order in self.settled:
            self.fail(f"run {run.number} of {order} begins, which was settled")
        try:
            world.sleep(world.random.choice([0, 0, 1, 9]), f"run {run.number} of {order} begins")
            if self.checks:
                self.check_lease(run)
            self.charge(run)
            world.sleep(world.random.choice([0, 0, 1, 9]), f"run {run.number} has charged {order}")
            if world.chance(self.raises):
                raise ValueError("no")
            if world.chance(self.retries) and task.request.retries < 3:
                countdown = world.random.choice([0, 2, 8])
                # Its retry goes on as soon as it is published, and it does nothing more.
                run.ending, run.retry_due = "raised", world.now + countdown
                raise task.retry(countdown=countdown)
        except Exception:
            run.ending = run.ending or "raised"
            raise
        run.ending = run.ending or "returned"
        return f"receipt {run.number}"

    def check_lease(self, run: Run) -> None:
        try:
            run.held.check()
        except LeaseLostError:
            self.check_loss(run, LeaseLost(run.held.key, "charge"))
            raise

    def charge(self, run: Run) -> None:
        run.effect = True
        self.counts["effects"] += 1
        now = self.simulation.world.now
        for other in self.runs:
            alive = other is not run and other.order == run.order and not other.ending
            if alive and self.trusted(other, now) and self.trusted(run, now):
                self.fail(f"runs {other.number} and {run.number} of {run.order} at once, and both rely on their leases")

    @staticmethod
    def trusted(run: Run, now: float) -> bool:
        return bool(run.held.fence) and not run.held.lost and now < run.held.deadline

    def killed(self, process: Any) -> None:
        self.counts["kills"] += 1
        for run in self.runs:
            if run.process is process and not run.ending:
                run.ending = "killed"
            elif run.process is process:
                run.excused = True  # it had returned, and was not settled yet

    def hook(self, event: Event) -> None:
        if isinstance(event, LeaseLost) and self.simulation.calm:
            self.fail(f"the lease on {event.key} was lost, and nothing had happened to its holder")
        if isinstance(event, (LeaseLost, SettleFailed, ReleaseFailed)):
            for run in self.runs:
                if run.held.key == event.key and run.held.fence == event.fence:
                    run.excused = True
                    self.check_loss(run, event)
                    run.unsettled = isinstance(event, SettleFailed)

    def check_loss(self, run: Run, event: Event) -> None:
        record = self.simulation.store.get(run.held.key)
        running = record is not None and record.state is State.IN_PROGRESS
        if isinstance(event, LeaseLost) and running and record.owner == run.held.lease.owner:
            self.fail(f"run {run.number} of {run.order} gave its lease up for lost, and had it")

    def watch(self, verb: str, args: Any, call: Callable[[], Any]) -> Any:
        """Call the store, and look at what became of its records."""
        answer = call()
        if isinstance(answer, Refusal) and answer.verdict is Verdict.CONFLICT:
            self.counts["conflicts"] += 1
            if answer.record.owner == args[0].owner:
                self.fail(f"{args[0].task_id} waits for its own lease")
        for order in ("ORD-1", "ORD-2"):
            record = self.simulation.store.get(f"idem:charge::{order}")
            if record is None:
                continue
            if record.fence < self.fences[order]:
                self.fail(f"the fence of {order} went back from {self.fences[order]} to {record.fence}")
            self.fences[order] = record.fence
            if order in self.settled and (record.state is not State.COMPLETED or record.payload != self.settled[order]):
                self.fail(f"{verb} changed the result of {order}, which was settled")
            if record.state is State.COMPLETED:
                self.settled[order] = record.payload
        return answer

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what can be seen between any two steps."""
        if self.broken:
            self.fail(self.broken)
        copies = len(self.simulation.broker.queue) + len(self.simulation.broker.unacked)
        published = len(self.simulation.published)
        retries = sum(run.ending == "raised" for run in self.runs)
        if copies > 2 * published + retries + 4:
            self.fail(f"{copies} messages for {published} calls")

    def ended(self) -> None:
        """Check what must hold once nothing is left to do."""
        self.check_answers()
        for order in {run.order for run in self.runs}:
            done = [run for run in self.runs if run.order == order and run.ending == "returned" and not run.excused]
            if len(done) > 1:
                self.fail(f"runs {[run.number for run in done]} of {order} were carried out, and none was cut off")
            twice = [run for run in self.runs if run.order == order and run.effect]
            self.counts["effects too many"] += len(twice) - 1 if twice else 0

    def check_answers(self) -> None:
        """Check that every call was answered, with what was settled."""
        simulation = self.simulation
        if simulation.broker.queue or simulation.broker.unacked:
            self.fail("messages are left")
        results: dict[str, set[str]] = defaultdict(set)
        for order, task_id in simulation.published:
            meta = simulation.producer.backend.get_task_meta(task_id)
            if meta["status"] not in states.READY_STATES:
                self.fail(f"{task_id} was never answered: {meta['status']}")
            self.counts[meta["status"]] += 1
            if meta["status"] == states.SUCCESS:
                results[order].add(meta["result"])
            elif not any(run.ending == "raised" and run.order == order for run in self.runs):
                self.fail(f"{task_id} failed with {meta['result']!r}, and no run of it did")
        for order, answers in results.items():
            if any(run.unsettled and run.order == order for run in self.runs):
                continue
            if len(answers) > 1 or f'"{min(answers)}"'.encode() not in self.settled.get(order, b""):
                self.fail(f"callers of {order} got {answers}, and {self.settled.get(order)!r} was settled")

    def fail(self, why: str) -> None:
        if not self.broken:
            self.broken = why
            self.simulation.world.tell(f"BROKEN: {why}")
        raise Broken(self.broken)

    def __enter__(self) -> Law:
        add_hook(self.hook)
        return self

    def __exit__(self, *_: object) -> None:
        remove_hook(self.hook)
