"""A task that charges the orders of a shop, and what its callers rely on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import gevent
from celery import states
from celery.exceptions import Ignore, Reject
from greenlet import getcurrent

from celery_idempotent.core.guard import SETTLE_PATIENCE
from celery_idempotent.errors import Conflict
from celery_idempotent.errors import LeaseLost as LeaseLostError
from celery_idempotent.events import Event, LeaseLost, ReleaseFailed, SettleFailed
from celery_idempotent.stores import Claim, Lease, Reason, Record, Release, State, Verdict
from celery_idempotent.stores.records import RETRIES_LIMIT, attempt_number

from .celery import (
    ENDINGS,
    EPOCH,
    INFINITE,
    KEPT,
    LEASE_TTL,
    LONG_WAIT,
    MAX_CRASHES,
    RELEASE,
    SEEN_WITHIN,
    SETTLED_KEPT,
    STEADY,
    VISIBILITY,
    simulated,
)
from .law import Law
from .world import Process, Step

ORDERS = ("ORD-1", "ORD-2")
#: What the mail about an order is called, which a task of its own sends.
MAIL = "mail of "

#: After how many seconds a call may come that is not made at once: while the operation is done, when it has ended, when
#: its record is not kept any more if it has failed, and when it is not kept even if it was settled.
LATER = (10.0, 30.0, 100.0, SETTLED_KEPT + 400.0)
#: After how many seconds a run may be retried: soon, later than its lease or the broker's timeout, later than a record
#: is kept and than the library waits without a look.
SOON, LATE, VERY_LATE = (0, 2, 8), (2, 15, 35), (8, 70)
#: What a task fails with whose time is over.
ENDED_BY = ("SoftTimeLimitExceeded", "TimeLimitExceeded", "Reject")
SETTLED = (State.COMPLETED, State.FAILED)


class Abandoned(BaseException):
    """What a body may raise that is no error, as a coroutine that is cancelled does."""


#: What leaves a body.
RAISED = (Exception, Abandoned, gevent.Timeout)
#: What a body raises of itself.
ERRORS: list[type[BaseException]] = [ValueError, ValueError, LeaseLostError, Abandoned]
#: A message that was given back so often within a second goes in circles.
HOT = 12


@dataclass(eq=False)
class Run:
    """A body that began."""

    order: str
    task_id: str
    held: Any
    process: Any
    worker: Any
    number: int
    attempt: int = 0
    effect: bool = False
    #: how it ended: returned, raised, killed
    ending: str = ""
    #: whether it was cut off, or the library noticed that its lease was lost or that it could not be settled
    excused: bool = False
    #: whether it could not be settled, so that its caller has an answer that others cannot get
    unsettled: bool = False
    #: whether it raised what is final
    final: bool = False
    #: when it was killed, and whether its worker was about to end, which the store may have been told
    ended: float = 0.0
    in_shutdown: bool = False
    #: whether it was replaced by another task
    handed_over: bool = False
    #: whether it has published a retry
    retried: bool = False
    #: whether the broker did not answer whether it has that
    unanswered: bool = False
    #: when its retry is due
    retry_due: float = 0.0
    #: whether it has left by an exit of its own
    left: bool = False
    #: whether its message was put back instead, which is no crash
    requeued: bool = False


class Charges(Law):
    """Effects once, one answer for all, nobody in another's way."""

    kind = "charges"
    #: After how many seconds its calls may come that are not made at once.
    later: Sequence[float] = LATER
    #: The tasks of which one charges: a duplicate is deferred, waits, or fails, at once or once the operation is done;
    #: all but the first have final failures.
    tasks: Sequence[str] = ("charge", "charge", "pay", "refund", "bill")
    #: Of how many orders it may be.
    orders: Sequence[int] = (1, 1, 2)

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        self.runs: list[Run] = []
        self.fences: dict[str, int] = defaultdict(int)
        self.settled: dict[str, bytes] = {}
        #: by order: all that was settled, also what was forgotten
        self.answers: dict[str, set[bytes]] = defaultdict(set)
        #: by task id: attempt and copy of each message that was published since a publisher last sent it anew
        self.sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        #: by task id and attempt and number: the copies that wait for their turn
        self.waiting: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        #: by task id: when its message was given back last
        self.gave_back: dict[str, list[float]] = defaultdict(list)
        #: by task id: the attempt that was published when the last one was released
        self.retried: dict[str, int] = {}
        #: the tasks that were sent anew since, or of which the store may have lost that
        self.may_start_anew: set[str] = set()
        #: the tasks whose attempt has had a lease since: if it dies, what is published on purpose may run, as of others
        self.had_lease: set[str] = set()
        #: by owner: when it first tried to settle
        self.settling: dict[str, float] = {}
        #: the tasks that had failed, so that other messages have claimed their operations to release them
        self.given_up: set[str] = set()
        #: owners that were told that their leases were not theirs to release
        self.refused: set[str] = set()
        #: owners that have released
        self.freed_by: set[str] = set()
        #: owners that have asked to settle or to release
        self.ending: set[str] = set()
        #: owners of which the store has said that they have lost their leases, and those that were told so
        self.found_lost: set[str] = set()
        self.told_lost: set[str] = set()
        #: by order: the fences of its leases
        self.granted: dict[str, list[int]] = defaultdict(list)
        #: orders and fences of leases that were taken over, of which a second reply to a holder does not speak
        self.taken_over: set[tuple[str, int]] = set()
        #: by order: the last fence when the store lost its data or an operator changed them
        self.robbed_up_to: dict[str, int] = defaultdict(int)
        #: by order: until when its record is to be kept
        self.kept_until: dict[str, float] = {}
        #: by order: the state of its record and its fence
        self.known: dict[str, tuple[State, int]] = {}
        #: by order: the last fence when its record was not kept any longer
        self.outlived: dict[str, int] = defaultdict(int)
        #: by order: the last fence when an operator released it
        self.freed_up_to: dict[str, int] = defaultdict(int)
        #: by owner: when its worker ended, which the store was to know by then
        self.ends_known: dict[str, float] = {}
        #: owners whose retries have taken their leases
        self.overtaken: set[str] = set()
        self.time_is_over: set[str] = set()
        #: the tasks whose children hit a hard limit
        self.limited: set[str] = set()
        #: by order: how many children died that had it, or lost their leases, since a run last ended in order
        self.deaths: Counter[str] = Counter()
        #: by owner: whose operation its delivery has met last
        self.met: dict[str, str] = {}
        #: the tasks that have failed since a publisher last sent them
        self.failed: set[str] = set()
        #: whose failure was taken back, as they were about to be replaced, by a delivery whose message was acked
        self.taken_back: set[str] = set()
        #: the tasks that the backend has as revoked
        self.revoked: set[str] = set()
        #: the tasks that the store has refused for that, each time
        self.loops: list[str] = []
        choices = self.choices
        self.task = choices.one_of("task", self.tasks)
        self.raises, self.retries = choices.one_of("raises", [0, 0, 0.2]), choices.one_of("retries", [0, 0, 0.3])
        self.errors = ERRORS if self.task == "charge" else [*ERRORS, KeyError, KeyError]
        self.countdowns = choices.one_of("countdowns", [*[SOON] * 8, LATE, VERY_LATE])
        self.replaces = choices.one_of("replaces itself", [0, 0, 0, 0.3])
        #: by what: by itself, which goes on with the operation, or by another task, which has one of its own
        self.hands_over = choices.one_of("is replaced by another", [False, True])
        self.requeues, self.quietly = choices.one_of("requeues", [0, 0, 0.2]), choices.one_of("quietly", [False, True])
        #: whether the task checks its lease before it charges
        self.checks = choices.one_of("checks", [False, True])
        #: for how long the task may take
        self.long = choices.one_of("takes", [[0], *[[0, 0, 1, 9]] * 10, [0, 1, 9, 60]])
        #: the order that kills whatever charges it
        self.deadly = choices.one_of("deadly", [""] * 11 + ["ORD-1"])
        self.spares = choices.one_of("spares", [0, 0, 0.3])
        if self.deadly:  # what lives for longer may be killed for ever
            self.long = [seconds for seconds in self.long if 2 * seconds < STEADY]
        self.calls = sorted(self._calls(), key=lambda call: call[0])
        self.published_calls: list[tuple[str, str]] = []
        #: the tasks that were published once more after they had failed
        self.sent_again: set[str] = set()
        #: the tasks that were replaced by themselves, and those that were lost as `check_superseded` has it
        self.nested: set[str] = set()
        self.lost: set[str] = set()

    def _calls(self) -> list[tuple[float, str, str]]:
        """Return the calls: orders, each under several ids, or under one by a publisher that tries again."""
        made, one_of = [], self.choices.one_of
        for order in ORDERS[: one_of("orders", self.orders)]:
            for number in range(one_of(f"calls of {order}", [2, 3, 4] if self.deadly else [1, 2, 2, 3])):
                task_id = f"{order}-{number}"
                made += [(0.0, order, task_id)] * one_of(f"publishes of {task_id}", [1, 1, 1, 2])
        calls = [made.pop(one_of("which call", range(len(made)))) for _ in list(made)]
        for number in range(one_of("calls later", [0, 1, 2] if self.deadly else [0, 0, 0, 0, 1])):
            _, order, task_id = one_of("which is called later", calls)
            if one_of("under another id", [False, True]):
                task_id = f"{order}-{9 - number}"
            calls.append((self.world.now + one_of("called after", self.later), order, task_id))
        return calls

    # -- what the scheduler asks ---------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        if not self.calls or self.calls[0][0] > self.world.now:
            return []
        return [("a call is published", 2.0, self._publish, None)]

    def next_step(self) -> float:
        return self.calls[0][0] if self.calls else INFINITE

    def faults(self) -> list[Step]:
        if not self.fences:
            return []
        steps: list[Step] = [("the store loses its data", 0.05, self._lose_data, None)]
        for order in self.fences:
            steps.append((f"an operator forgets {order}", 0.05, self._forget, order))
            steps.append((f"an operator releases {order}", 0.05, self._release, order))
        return steps

    def _lose_data(self, _: None) -> None:
        self.world.tell("the store loses its data")
        self.simulation.store._rows.clear()
        self.simulation.spend()
        self._rob(*ORDERS, *(MAIL + order for order in ORDERS))
        self.settled.clear()
        self.waiting.clear()
        self.retried.clear()

    def _forget(self, order: str) -> None:
        self.world.tell(f"an operator forgets {order}")
        self.simulation.store.delete(f"idem:{self.task}::{order}")
        self.simulation.spend()
        self._rob(order)
        self.settled.pop(order, None)
        self._forget_messages(order)

    def _release(self, order: str) -> None:
        record = self.simulation.store.get(f"idem:{self.task}::{order}")
        if record is None or record.state is not State.IN_PROGRESS or not record.remaining:
            return
        self.world.tell(f"an operator releases {order}")
        claim = Claim(record.key, record.owner, record.remaining, 60.0, task_id=record.task_id)
        self.simulation.store.release(Lease(claim, record.fence), Release(Reason.SHUTDOWN))
        self.simulation.spend()
        self._rob(order)
        self.freed_up_to[order] = self.fences[order]

    def _rob(self, *orders: str) -> None:
        """Runs that are not settled may lose their leases while they rely on them."""
        self.counts["acts on the store"] += 1
        self.simulation.calm = False
        for order in orders:
            self.robbed_up_to[order] = self.fences[order]
            self.kept_until.pop(order, None)
        for run in self.runs:
            run.excused = run.excused or self.robbed(run)
        self.deaths.update(dict.fromkeys(orders, MAX_CRASHES))  # what was counted is not known any more

    def robbed(self, run: Run) -> bool:
        """Return whether the store has lost a run's lease, or an operator has given that away."""
        return run.held.fence <= self.robbed_up_to[run.order]

    def _forget_messages(self, order: str) -> None:
        for task_id in {task_id for task_id, *_ in self.waiting} | set(self.retried):
            if task_id.startswith(order):
                self.forget_copies(task_id)
                self.retried.pop(task_id, None)

    def _publish(self, _: None) -> None:
        _, order, task_id = self.calls.pop(0)
        backend = self.simulation.producer.backend
        if backend.get_task_meta(task_id)["status"] == states.FAILURE:
            backend.forget(task_id)  # it is to be answered once more
            self.failed.discard(task_id)
            self.may_start_anew.add(task_id)  # what it had been replaced by may have failed without a lease
            self.sent_again.add(task_id)
        broker = self.simulation.broker
        if not any(task_id.encode() in text for text, *_ in [*broker.queue, *broker.unacked.values()]):
            self.sent.pop(task_id, None)
            if self.published_calls and self.simulation.faults and broker.visibility:
                self.simulation.again += 1  # perhaps before anybody has asked for it
        try:
            self.simulation.producer.tasks[self.task].apply_async((order,), task_id=task_id)
        except OSError:
            self.calls.insert(0, (0.0, order, task_id))
            self.simulation.broker.away_until = 0.0  # or it would go on until then
        else:
            self.published_calls.append((order, task_id))

    # -- what happens --------------------------------------------------------------------------------------------------

    def body(self, task: Any, order: str) -> str:
        """The task: it charges a customer, and takes its time before and after."""
        world, choices, held, request = self.world, self.choices, task.lease, task.request
        process = getcurrent()
        run = Run(order, request.id, held, process, process.host, len(self.runs) + 1, held.lease.claim.attempt)
        self.check_turn(run, request)
        run.excused = self.robbed(run)
        self.runs.append(run)
        self.counts["runs"] += 1
        name = f"run of {order}"
        try:
            world.sleep(choices.one_of(f"{name}: before", self.long), f"run {run.number} of {order} begins")
            if self.checks:
                self.check_lease(run)
            self.charge(run)
            if order == self.deadly and not choices.chance(f"{name}: spares its child", self.spares):
                run.worker.doomed = choices.one_of(f"{name}: kills", run.worker.ends_with)
                if run.worker.doomed == "limit":
                    world.sleep(1000.0)
            world.sleep(choices.one_of(f"{name}: after", self.long), f"run {run.number} has charged {order}")
            # Rather where another one may have the lease, so that the error is nobody's answer.
            if choices.chance(f"{name}: raises", self.raises if self.trusted(run) else 3 * self.raises):
                # Also the error of another operation, whose lease it was.
                self.raise_error(run, choices.one_of(f"{name}: raises what", self.errors))
            if choices.chance(f"{name}: requeues", self.requeues):
                raise Reject("later", requeue=True)
            if task.request.retries < 3 and choices.chance(f"{name}: retries", self.retries):
                self.retry(task, run, choices.one_of(f"{name}: retries after", self.countdowns))
            once = not run.ending and held.lease.claim.nesting < 2
            if once and choices.chance(f"{name}: replaces itself", self.replaces):
                self.replace(task, run, choices.one_of(f"{name}: is replaced after", SOON))
            self.conclude(run)
        except RAISED:
            run.ending = run.ending or "raised"
            raise
        run.ending = run.ending or "returned"
        return f"receipt {run.number}"

    def raise_error(self, run: Run, kind: type[BaseException]) -> None:
        run.final = kind is KeyError
        raise kind(f"refusal {run.number}") if run.final else kind(run.number)

    def conclude(self, run: Run) -> None:
        """Do what a run does last."""

    def mail(self, task: Any, order: str) -> str:
        """The task that an order's may be replaced by."""
        world, choices, process, name = self.world, self.choices, getcurrent(), MAIL + order
        run = Run(name, task.request.id, task.lease, process, process.host, len(self.runs) + 1)
        run.attempt = run.held.lease.claim.attempt
        self.check_turn(run, task.request)
        run.excused = self.robbed(run)
        self.runs.append(run)
        self.counts["mails"] += 1
        try:
            world.sleep(choices.one_of(f"{name}: before", self.long), f"run {run.number} begins, the {name}")
            self.charge(run)
            world.sleep(choices.one_of(f"{name}: after", self.long), f"run {run.number} has sent the {name}")
        except RAISED:
            run.ending = "raised"
            raise
        run.ending = "returned"
        return f"mail {run.number}"

    def retry(self, task: Any, run: Run, countdown: float) -> None:
        # Its retry goes on as soon as it is published, and it does nothing more; but it may return.
        # Of what goes on after a replacement others wait for the end, as in `replace`.
        longer = KEPT if run.held.lease.claim.nesting else 0.0
        run.ending, run.retry_due = "raised", self.world.now + countdown + longer
        try:
            task.retry(countdown=countdown, throw=not self.quietly)
        except Reject:
            run.retry_due, run.unanswered = 0.0, True  # the broker did not take it, or did not say so
            self.simulation.calm = False
            raise
        self.world.sleep(self.choices.one_of("after a retry", self.long), f"run {run.number} goes on")

    def replace(self, task: Any, run: Run, countdown: float) -> None:
        self.counts["replaced"] += 1
        if not self.hands_over:
            # Others wait for the end of what goes on under its id, until the record is not kept any more.
            run.ending, run.retry_due = "raised", self.world.now + KEPT
        heir = task.app.tasks["mail"] if self.hands_over else task
        try:
            task.replace(heir.signature((run.order,), countdown=countdown))
        except Ignore:
            if self.hands_over:
                run.ending, run.handed_over = "returned", True
            raise
        except OSError:
            run.retry_due, run.unanswered = 0.0, True
            self.simulation.calm = False
            raise

    def check_turn(self, run: Run, request: Any) -> None:
        """Check that a body may begin now."""
        last = next((other for other in self.runs[::-1] if other.order == run.order), run)
        # Nothing has come between, and the run lived to release its lease for its retry.
        mine = (run.order, run.held.fence)
        waits = self.granted[run.order][-2:-1] == [last.held.fence] and mine not in self.taken_over
        early = waits and self.world.now < last.retry_due - 0.01 and not last.excused and last.task_id != run.task_id
        # Known: where a retry is due that late, the end of another delivery of its id is taken for its own.
        ended = last.task_id in self.failed | self.revoked
        if early and not (last.retry_due - self.world.now > LONG_WAIT - LEASE_TTL and ended):
            self.fail(f"run {run.number} of {run.order} begins before the retry of run {last.number} is due")
        if not self.trusted(run):
            self.fail(f"run {run.number} of {run.order} begins with a lease that is in doubt")
        if run.order in self.settled and not self.robbed(run):
            self.fail(f"run {run.number} of {run.order} begins, which was settled")
        if (
            is_copy(request)
            and run.attempt < self.retried.get(run.task_id, 0)
            and run.task_id not in self.may_start_anew
        ):
            self.fail(f"run {run.number} of {run.order} is attempt {run.attempt}, whose retry was published")
        died = 0
        for other in self.runs:
            # What has failed by itself begins anew, also in a worker that is about to end.
            cut_off = other.in_shutdown and other.ending == "killed"
            known = other.held.fence > self.outlived[run.order] and not (self.robbed(other) or cut_off)
            if other.order == run.order and known:  # one that ends, or is steady, is no crash loop
                steady = (
                    other.ending != "killed" or other.requeued or other.ended - simulated(other.held.fence) > STEADY
                )
                died = 0 if steady else died + 1
        interrupted = any(
            task_id.startswith(run.order[-5:]) for task_id in self.time_is_over
        )  # an ending of another kind
        ids = len({task_id for order, task_id in self.published_calls if order == run.order})
        # Several take turns; and once one is refused, the next may try.
        refusals = sum(task_id.startswith(run.order) for task_id in self.loops)
        most = MAX_CRASHES if ids == 1 else 2 * MAX_CRASHES + refusals
        if died >= most and is_copy(request) and not interrupted:
            self.fail(f"{run.order} has killed its holder {died} times in a row, and is run again")

    def check_lease(self, run: Run) -> None:
        before = self.simulation.store.get(run.held.key)
        try:
            run.held.check()
        except LeaseLostError:
            self.check_loss(run, LeaseLost(run.held.key, self.task))
            raise
        if before is not None and before.fence > run.held.fence and not self.trusted(run):
            self.fail(f"run {run.number} of {run.order} has lost its lease, and was told that it had it")

    def charge(self, run: Run) -> None:
        run.effect = True
        self.counts["effects"] += 1
        for other in self.runs:
            alive = other is not run and other.order == run.order and not other.ending
            robbed = self.robbed(other) or self.robbed(run)
            if alive and not robbed and self.trusted(other) and self.trusted(run):
                self.fail(f"runs {other.number} and {run.number} of {run.order} at once, and both rely on their leases")

    def trusted(self, run: Run) -> bool:
        return bool(run.held.fence) and not run.held.lost and self.world.now < run.held.deadline

    def killed(self, process: Process) -> None:
        super().killed(process)
        self.dies(process.host.request)
        for run in self.runs:
            if run.process is process and not run.ending:
                run.ending, run.ended, run.in_shutdown = "killed", self.world.now, process.host.stopping
            elif run.process is process:
                run.excused = True  # it had returned, and was not settled yet

    def dies(self, request: Any) -> None:
        """A delivery ends as one whose child dies."""
        self.deaths[(MAIL if request.task.name == "mail" else "") + request.id[:5]] += 1

    def shut_down(self, process: Process) -> None:
        self.counts["cut off"] += 1
        for run in self.runs:
            if run.process is process:
                run.ending, run.excused = run.ending or "cut off", True

    def announced(self, request: Any, since: float) -> None:
        if request is not None and self.world.now - since > SEEN_WITHIN and request.id not in self.limited:
            self.ends_known[request._owner] = self.world.now

    def has_begun(self, process: Process) -> bool:
        return any(run.process is process for run in self.runs)

    def interrupted(self, process: Process) -> None:
        super().interrupted(process)
        self.time_is_over.add(process.host.request.id)
        for run in self.runs:
            if run.process is process and run.ending:
                run.excused = True

    def timed_out(self, process: Process) -> None:
        super().timed_out(process)
        request = process.host.request
        self.limited.add(request.id)
        if request.task.acks_on_timeout:  # else its child counts as lost
            self.time_is_over.add(request.id)
        elif request.worker.pool.is_green:  # so does its run, which must not be put back for ever
            self.dies(request)

    def stored(self, key: Any, value: Any) -> None:
        """Take note of a task that has failed."""
        if '"FAILURE"' in str(value):
            task_id = bytes(key).decode().rpartition("task-meta-")[2]
            self.failed.add(task_id)
            if '"Conflict"' in str(value):
                self.fails(task_id, Conflict())
        elif '"PENDING"' in str(value) and not self.simulation.broker.is_unacked(getcurrent().host.request.serial):
            self.taken_back.add(bytes(key).decode().rpartition("task-meta-")[2])
        elif '"REVOKED"' in str(value):
            self.revoked.add(bytes(key).decode().rpartition("task-meta-")[2])

    def fails(self, task_id: str, error: Exception) -> None:
        """Check with what a delivery fails, also where the backend keeps an earlier success."""
        if isinstance(error, Conflict) and self.met.get(getcurrent().host.request._owner) == task_id:
            self.fail(f"{task_id} has failed for its own operation")

    def given_back(self, request: Any, worker: Any) -> None:
        """A worker gives a message back."""
        if worker.failures == worker.failures_before and not worker.limiting:  # then its child is yet to be killed
            self.gone.add(request._owner)
        times = self.gave_back[request.id]
        times[:] = [*(time for time in times if time > self.world.now - 1.0), self.world.now]
        if len(times) > HOT:
            self.fail(f"{request.id} was given back {HOT} times at once")

    def emitted(self, event: Event) -> None:
        self.counts["leases lost"] += isinstance(event, LeaseLost)
        # Its retry may have come before the run that published it has given its lease up.
        taken = {(run.held.key, run.held.fence) for run in self.runs if run.held.lease.owner in self.overtaken}
        if isinstance(event, LeaseLost) and self.simulation.calm and (event.key, event.fence) not in taken:
            self.fail(f"the lease on {event.key} was lost, and nothing had happened to its holder")
        if isinstance(event, (LeaseLost, SettleFailed, ReleaseFailed)):
            for run in self.runs:
                if run.held.key == event.key and run.held.fence == event.fence:
                    run.excused = True
                    self.check_loss(run, event)

    def check_loss(self, run: Run, event: Event) -> None:
        """Check what a run reports of its lease."""
        record = self.simulation.store.get(run.held.key)
        if isinstance(event, LeaseLost) and record is not None and record.reason == Reason.CRASH_LOOP:
            return  # it was taken for dead, once too often
        running = record is not None and record.state is State.IN_PROGRESS
        freed = run.held.fence <= self.freed_up_to[run.order]  # not so where a record is gone: a run brings it back
        if isinstance(event, LeaseLost) and self.fences[run.order] <= run.held.fence and not freed:
            self.fail(f"run {run.number} of {run.order} gave its lease up for lost, and nobody else had it")
        if isinstance(event, LeaseLost) and record is not None:
            # One renewal may bring back what an operator has forgotten since another one, on its way, found it lost.
            brought_back = self.robbed(run) and run.held.lease.owner in self.found_lost
            if running and record.owner == run.held.lease.owner and not brought_back:
                self.fail(f"run {run.number} of {run.order} gave its lease up for lost, and had it")
            told = run.task_id not in self.time_is_over and not run.unanswered  # that its retry was published
            if told and run.held.lease.owner in self.overtaken and self.trusted(run):
                self.fail(f"run {run.number} of {run.order} has published its retry, and gave its lease up for lost")
            if record.fence == run.held.fence and not (running or run.held.given_up or self.robbed(run)):
                self.fail(f"run {run.number} of {run.order} gave its lease up for lost, and had ended it")
        if isinstance(event, SettleFailed):
            run.unsettled = True
            took = self.world.now - self.settling.get(run.held.lease.owner, self.world.now)
            if run.held.lost:
                self.fail(f"run {run.number} of {run.order} answers for itself, and knows that it lost its lease")
            if took < SETTLE_PATIENCE - 0.1 and run.task_id not in self.time_is_over:
                self.fail(f"run {run.number} of {run.order} tried to settle for no more than {took:.1f} s")

    def asks(self, verb: str, args: Any, host: Any) -> None:
        """Take note of a request to the store."""
        if verb == "renew":
            given_up = {run.held.lease.owner for run in self.runs if run.held.given_up}
            # A thread that waits between two statements may have its list of leases already.
            for lease in args[0] if not self.world.divided else ():
                if lease.owner in given_up:
                    self.fail(f"{host.name} renews what was given up")
                # What a transaction settles has another lease, with which a renewal that is on its way is repeated.
                if lease.owner in self.ending and lease.claim.revive:
                    self.fail(f"{host.name} renews what it has asked to end")
                failed = host.renewals_failed.pop(lease.owner, self.world.now)
                if self.world.now - failed > LEASE_TTL / 3:
                    self.fail(f"{host.name} has not tried to renew for {self.world.now - failed:.1f} s")
        if verb in ENDINGS:
            self.ending.add(args[0].owner)
        if verb == "settle":
            self.settling.setdefault(args[0].owner, self.world.now)

    def watch(self, verb: str, args: Any, host: Any, call: Callable[[], Any]) -> Any:
        """Call the store, and look at what became of its records."""
        asked = verb in ("acquire", "settle")
        before = self.simulation.store.get(args[0].key) if asked else None
        if before is None and asked:
            self.outlive(name_of(args[0].key))
        answer = call()
        if verb == "get":
            host.holder_remains = answer.remaining if answer is not None else INFINITE
            if answer is not None and getattr(host, "request", None):
                self.met[host.request._owner] = answer.task_id
        if verb == "acquire":
            host.holder_remains = INFINITE if isinstance(answer, Lease) else answer.record.remaining
            self.check_answer(args[0], before, answer)
            self.check_claim(args[0], before, answer)
        elif verb == "release":
            (self.released if answer else self.ended_waiting)(args[0], args[1])
        elif verb == "renew":
            self.found_lost.update(lease.owner for lease in answer)
        elif verb == "mark_shutdown" and answer:
            self.note_shutdown(args[0].owner)
        self.check_records(verb, args)
        return answer

    def check_records(self, verb: str, args: Any) -> None:
        """Check what a call has made of the records of all orders."""
        for task, prefix in ((self.task, ""), ("mail", MAIL))[: 1 + self.hands_over]:
            for order in ORDERS:
                record = self.simulation.store.get(f"idem:{task}::{order}")
                if record is None:
                    self.outlive(prefix + order)
                else:
                    self.check_record(prefix + order, verb, args, record)

    def note_shutdown(self, owner: str) -> None:
        """Take note that a worker which is about to end has said so of a lease, perhaps of a child that is dead."""
        for run in self.runs:
            run.in_shutdown = run.in_shutdown or run.held.lease.owner == owner

    def check_claim(self, claim: Claim, before: Record | None, answer: Any) -> None:
        """Check what becomes of the holder that a claim has met, and take note of whose it was."""
        if not isinstance(answer, Lease):
            if not name_of(claim.key).startswith(MAIL) and not getcurrent().host.is_way:  # which nobody reads
                self.met[claim.owner] = answer.record.task_id
        elif answer.taken_over and before is not None:
            self.check_taken_over(claim, before)
            known = self.ends_known.get(before.owner, 0.0) > simulated(before.fence) + SEEN_WITHIN
            noted = before.fence > self.robbed_up_to[name_of(claim.key)]  # else the note is gone, and its record is new
            if known and noted and answer.crashes > before.crashes:
                self.fail(f"the end of a worker that was shut down is a crash to {claim.task_id}")

    def check_taken_over(self, claim: Claim, before: Record) -> None:
        """Check that what a claim took over for a dead run's was that of one that had died."""
        if claim.sender and before.state is State.IN_PROGRESS and before.owner == claim.sender:
            self.fail(f"a retry of {claim.task_id} takes the run that published it for a dead one")
        if before.owner in self.gone - self.late and before.fence > self.robbed_up_to[name_of(claim.key)]:
            self.fail(f"{claim.task_id} takes a delivery for a dead one that has ended")

    def check_record(self, order: str, verb: str, args: Any, record: Record) -> None:
        """Check what became of a record."""
        self.keep(order, verb, args, record)
        self.check_fence(order, record.fence)
        if order in self.settled and (record.state not in SETTLED or record.payload != self.settled[order]):
            self.fail(f"{verb} changed the result of {order}, which was settled")
        if record.state in SETTLED:
            self.settled[order] = record.payload
            self.answers[order].add(record.payload)

    def check_fence(self, order: str, fence: int) -> None:
        """Check that the fence of a record rises; a run that had begun when the record was lost may bring its back."""
        if fence >= self.fences[order]:
            self.fences[order] = fence
        elif self.fences[order] > self.outlived[order] and fence > self.robbed_up_to[order]:
            self.fail(f"the fence of {order} went back from {self.fences[order]} to {fence}")
        else:
            self.freed_up_to[order] = self.fences[order]

    def keep(self, order: str, verb: str, args: Any, record: Record) -> None:
        """Take note until when a record is to be kept that a verb may have changed."""
        now, known = self.world.now, self.known.get(order)
        self.known[order] = (record.state, record.fence)
        if record.state is State.IN_PROGRESS:
            if record.remaining:
                self.kept_until[order] = now + record.remaining + KEPT
        elif known == self.known[order]:
            return
        elif record.state is State.COMPLETED:
            self.kept_until[order] = now + SETTLED_KEPT
        elif record.state is State.FAILED:
            self.kept_until[order] = now + KEPT
        elif verb == "release" and args[0].key == record.key:
            self.kept_until[order] = now + record.remaining + KEPT

    def outlive(self, order: str) -> None:
        """The record of an order is gone, if it was there."""
        until = self.kept_until.pop(order, None)
        if until is None:
            return
        if self.world.now < until - 0.01:
            self.fail(f"the record of {order} is gone {until - self.world.now:.1f} s too early")
        self.world.tell(f"the record of {order} is not kept any longer")
        self.outlived[order] = self.fences[order]
        for run in self.runs:
            run.excused = run.excused or (run.order == order and bool(run.ending))
        self.settled.pop(order, None)
        self._forget_messages(order)

    def told(self, verb: str, args: Any, answer: Any, host: Any) -> None:
        if verb == "release" and not answer and not getcurrent().name.endswith(RELEASE):
            self.refused.add(args[0].owner)
        if verb == "acquire" and isinstance(answer, Lease):  # for a second time, after it has ended a continuation
            self.ending.discard(args[0].owner)
            self.told_lost.discard(args[0].owner)
        if verb == "renew":
            self.told_lost.update(lease.owner for lease in answer)
            if answer:
                # So that it cannot ask what became of its operation.
                self.simulation.ripen(host, "cut off from the store")

    def note_sent_again(self, claim: Any, answer: Any) -> None:
        """Note what was sent again beside a later attempt of it: it may run once that has died."""
        last = self.retried.get(claim.task_id, 0)
        beside = claim.nesting == last // RETRIES_LIMIT and claim.attempt < last and not claim.is_copy
        if beside and not isinstance(answer, Lease) and answer.verdict is Verdict.CONFLICT:
            self.may_start_anew.add(claim.task_id)

    def check_answer(self, claim: Any, before: Record | None, answer: Any) -> None:
        """Check what the store says to a claim."""
        if isinstance(answer, Lease):
            self.note_lease(claim, answer)
        if not isinstance(answer, Lease) and answer.verdict is Verdict.CRASH_LOOP:
            self.check_crash_loop(claim, before)
        goes_on = self.retried.get(claim.task_id, 0) // RETRIES_LIMIT
        self.note_sent_again(claim, answer)
        is_late = claim.is_copy or claim.task_id not in self.had_lease
        outdated = claim.nesting < goes_on and claim.task_id not in self.may_start_anew and is_late
        if isinstance(answer, Lease) and outdated and not getcurrent().host.is_way:
            self.fail(f"{claim.task_id} runs as it was before it was replaced by itself")
        if isinstance(answer, Lease):
            self.had_lease.add(claim.task_id)
        if isinstance(answer, Lease) or answer.verdict in (Verdict.COMPLETED, Verdict.CRASH_LOOP):
            self.forget_copies(claim.task_id)
            if not claim.is_copy or (not isinstance(answer, Lease) and answer.verdict is Verdict.CRASH_LOOP):
                self.retried.pop(claim.task_id, None)  # it has failed, or was published again
        elif answer.verdict is Verdict.SUPERSEDED:
            self.check_superseded(claim)
        elif answer.verdict is Verdict.CONFLICT:
            self.check_conflict(claim, answer.record)

    def note_lease(self, claim: Any, lease: Lease) -> None:
        """Take note of a lease that the store has granted."""
        granted = self.granted[name_of(claim.key)]
        if claim.nesting == RETRIES_LIMIT - 1:  # in the name of a continuation that will not come
            self.given_up.add(claim.task_id)
        elif lease.fence not in granted[-1:]:
            granted.append(lease.fence)
        if lease.taken_over:
            self.taken_over.add((name_of(claim.key), lease.fence))
            self.deaths[name_of(claim.key)] += 1
        elif claim.sender:
            self.overtaken.add(claim.sender)

    def check_crash_loop(self, claim: Any, before: Record | None) -> None:
        order = name_of(claim.key)
        if before is not None and before.state is State.IN_PROGRESS:  # it has lost its lease, and was perhaps killed
            killed = (run.ending == "killed" for run in self.runs if run.held.lease.owner == before.owner)
            # A claim that arrives once its own delivery has released takes a lease that dies with nobody.
            self.deaths[order] += not any(killed) or before.owner in self.freed_by
        deaths = self.deaths[order]
        if deaths < MAX_CRASHES:
            self.fail(f"{claim.task_id} is a crash loop after {deaths} deaths")
        self.loops.append(claim.task_id)

    def check_superseded(self, claim: Any) -> None:
        """Check that a message that is dropped has a later one, or one beside it."""
        if not claim.is_copy:
            self.fail(f"{claim.task_id} is dropped for a later copy, and was published on purpose")
        sent, own = self.sent[claim.task_id], (claim.attempt, claim.copy)
        if max(sent) > own or sent.count(own) > 1:
            return
        # Known, as above: what ended it may have been killed before it released the operation.
        if claim.task_id in self.given_up & self.failed:
            return
        # Known: what has replaced it by itself has failed, and could not release; what came before may not go first.
        if claim.task_id in self.sent_again & self.nested and not claim.nesting:
            self.lost.add(claim.task_id)
            return
        self.fail(f"{claim.task_id} is dropped for a later copy, and there is none")

    def check_conflict(self, claim: Any, record: Any) -> None:
        """Check whom a delivery waits for."""
        self.counts["conflicts"] += 1
        for run in self.runs:
            if run.held.lease.owner == record.owner and not run.ending:  # another one is there to take over
                run.worker.awaited = True
        if record.owner == claim.owner and not getcurrent().host.is_way:
            self.fail(f"{claim.task_id} waits for its own lease")
        if claim.sender and record.owner == claim.sender:
            self.fail(f"a retry of {claim.task_id} waits for the run that published it")
        # What was replaced by itself goes on as what is nested more deeply, and not as what came before.
        goes_on = self.retried.get(claim.task_id, 0) // RETRIES_LIMIT <= claim.nesting < RETRIES_LIMIT - 1
        if record.state is State.RELEASED and record.task_id == claim.task_id and goes_on:
            self.fail(f"{claim.task_id} waits for its own retry")
        # A renewal on its way may restore what was lost or forgotten meanwhile, until that lease runs out.
        known = record.fence > self.robbed_up_to[name_of(record.key)]
        if record.state is State.IN_PROGRESS and record.owner in self.gone - self.late and known:
            self.fail(
                f"{claim.task_id} waits for a delivery that has ended, or whose worker knows its child to be gone"
            )
        if not claim.copy:
            self.forget_copies(claim.task_id)
            return
        alike = self.waiting[claim.task_id, claim.attempt, claim.copy]
        alike.add(getcurrent().host.request.serial)
        if len(alike) > 1:
            self.fail(f"{len(alike)} copies {claim.copy} of {claim.task_id} wait for one turn")

    def forget_copies(self, task_id: str) -> None:
        for known in [known for known in self.waiting if known[0] == task_id]:
            del self.waiting[known]

    def released(self, lease: Lease, release: Release) -> None:
        reason = release.reason
        self.freed_by.add(lease.owner)
        run = next((run for run in self.runs if run.held.fence == lease.fence and run.held.key == lease.key), None)
        if run is not None and reason is Reason.CRASHED and getcurrent() is run.process and not self.is_crash(run):
            self.fail(f"run {run.number} of {run.order} has ended by itself, and counts as a crash")
        for each in self.runs:  # a worker that releases for its child does not know the fence
            each.requeued = each.requeued or (reason is Reason.REQUEUED and each.held.lease.owner == lease.owner)
        record = self.simulation.store.get(lease.key)
        noted = record is None or record.reason == reason  # else an operator has released it before
        if noted and reason not in (Reason.CRASHED, Reason.SHUTDOWN, Reason.REVOKED):
            self.deaths[name_of(lease.key)] = 0
        if run is None and lease.claim.nesting == RETRIES_LIMIT - 1:  # the end of a continuation that does not come
            self.retried.pop(lease.claim.task_id, None)
        if run is not None and reason is Reason.RETRY:
            self.retried[run.task_id] = release.next_attempt
            self.had_lease.discard(run.task_id)
            (self.may_start_anew.add if self.robbed(run) else self.may_start_anew.discard)(run.task_id)
        elif reason not in (Reason.RETRY, Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED) and (
            noted or record.reason != Reason.RETRY  # else its child has replaced it, and was killed then
        ):
            self.retried.pop(lease.claim.task_id, None)  # also of what has failed before its body began

    def ended_waiting(self, lease: Lease, release: Release) -> None:
        """Take note that a task has ended without the lease: what comes after it under its id is no copy."""
        claim = lease.claim
        if release.reason in (Reason.RETRY, Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED):
            return
        for known in [known for known in self.waiting if known[0] == claim.task_id]:
            if known[1:] <= (claim.attempt, claim.copy):
                del self.waiting[known]
        if self.retried.get(claim.task_id, 0) <= claim.attempt:
            self.retried.pop(claim.task_id, None)

    def is_crash(self, run: Run) -> bool:
        """Return whether a run that has ended by itself counts as one whose worker has died."""
        task, green = run.worker.request.task, run.worker.whole.pool.is_green
        return run.left or (green and run.task_id in self.limited and not task.acks_on_timeout)

    def published(self, message: Any, process: Any) -> None:
        """A process publishes a message."""
        headers = message["headers"]
        own = headers.get("idempotency") or {}
        nesting = max(headers.get("replaced_task_nesting") or 0, own.get("nesting") or 0)
        self.sent[headers["id"]].append((attempt_number(nesting, headers["retries"]), own.get("copy") or 0))
        if nesting:
            self.nested.add(headers["id"])
        run = next((run for run in self.runs[::-1] if run.process is process), None)
        # A time limit may ring before the child knows that it has published it: the copy is superseded then.
        if run is not None and own.get("copy") and run.retried and run.task_id not in self.time_is_over:
            self.fail(f"run {run.number} of {run.order} has published its retry, and then a copy of itself")
        goes_on = run is not None and not own.get("copy") and headers["task"] == self.task
        if goes_on and self.simulation.broker.away_until <= self.world.now:
            run.retried = True
        if headers.get("eta") and own.get("copy"):
            wait = (datetime.fromisoformat(headers["eta"]) - EPOCH).total_seconds() - self.world.now
            longest = min(max(LEASE_TTL, 8.0), 0.45 * VISIBILITY)
            if wait > min(longest, max(0.1, process.host.holder_remains or INFINITE)) + 0.1:
                self.fail(f"a copy of {headers['id']} waits for {wait:.1f} s")
            # A process that was stopped as it published has less left of its wait.
            hasty = wait < 1.0 and process.host.stopped_until < self.world.now - 0.1
            if own["copy"] > 3 and hasty and not process.host.holder_remains:  # an open transaction is in its way
                self.fail(f"copy {own['copy']} of {headers['id']} waits for no more than {wait:.1f} s")

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        for run in self.runs:
            if not run.ending:
                self.check_trust(run)
        broker = self.simulation.broker
        there = len(broker.queue) + len(broker.unacked)
        if there > 8:
            known = {text for text, *_ in [*broker.queue, *broker.unacked.values()]}
            retries = sum(run.ending == "raised" for run in self.runs)
            # Each that is delivered again may be deferred again, before the others are known to be superseded.
            if len(known) > 2 * len(self.published_calls) + retries + broker.deliveries_again + 4:
                self.fail(f"{len(known)} messages for {len(self.published_calls)} calls")

    def check_trust(self, run: Run) -> None:
        """Check that a run relies on its lease for no longer than the store has granted it."""
        told = run.held.lease.owner in self.told_lost and not self.world.between  # and not about to take note of it
        if told and run.held.within is None and self.trusted(run):
            self.fail(f"run {run.number} of {run.order} relies on a lease, and was told that it has lost it")
        row = self.simulation.store._rows.get(run.held.key)
        mine = row is not None and row.owner == run.held.lease.owner and not run.held.lost
        if mine and not self.robbed(run) and run.held.deadline > simulated(row.lease_end) - 0.5:
            self.fail(f"run {run.number} of {run.order} trusts its lease for longer than it has it")

    def ended(self) -> None:
        super().ended()
        self.check_answers()
        for order in [prefix + order for order in ORDERS for prefix in ("", MAIL)]:
            runs = [run for run in self.runs if run.order == order]
            done = [run for run in runs if (run.ending == "returned" or run.final) and not run.excused]
            if len(done) > 1:
                self.fail(f"runs {[run.number for run in done]} of {order} were carried out, and none was cut off")
            self.counts["effects too many"] += max(0, sum(run.effect for run in runs) - 1)

    def check_answers(self) -> None:
        """Check that every call was answered, with what was settled."""
        simulation = self.simulation
        for order, task_id in self.published_calls:
            meta = simulation.producer.backend.get_task_meta(task_id)
            if meta["status"] == states.RETRY and task_id in self.failed | self.revoked:
                continue  # known: what is late to store RETRY stores it over the failure, or the end, of the retry
            if meta["status"] == states.PENDING and task_id in self.failed & self.taken_back:
                continue  # known: another delivery of its message had failed, and has acked it; then it was killed
            if task_id in self.lost or (task_id in self.sent_again and task_id in self.heirs_of(order)):
                continue  # what it was replaced by has failed, and what was replaced is done
            self.check_answer_of(order, task_id, meta)

    def check_answer_of(self, order: str, task_id: str, meta: Any) -> None:
        if meta["status"] not in states.READY_STATES:
            self.fail(f"{task_id} was never answered: {meta['status']}")
        self.counts[meta["status"]] += 1
        if meta["status"] == states.SUCCESS:
            self.check_result(order, task_id, meta["result"])
        else:
            self.check_failure(order, task_id, meta["result"])

    def check_result(self, order: str, task_id: str, result: str) -> None:
        """Check that a caller got what was settled, or what could not be."""
        ids = {task_id, *self.heirs_of(order)}
        own = [run for run in self.runs if run.order[-5:] == order and run.task_id in ids and run.unsettled]
        if result in {f"receipt {run.number}" for run in own} | {f"mail {run.number}" for run in own}:
            return
        theirs = {f"receipt {run.number}" for run in self.runs if run.task_id != task_id}
        if self.task == "bill" and result in theirs:
            self.fail(f"{task_id} got {result!r} of another, and was to fail")
        if not any(f'"{result}"'.encode() in settled for settled in self.answers[order] | self.answers[MAIL + order]):
            self.fail(f"{task_id} got {result!r}, and {self.answers[order]} was settled")

    def check_failure(self, order: str, task_id: str, error: object) -> None:
        """Check that a task that failed has a body that raised, that killed, or that took too long."""
        runs, kind = [run for run in self.runs if run.order[-5:] == order], type(error).__name__
        ids = {task_id, *self.heirs_of(order)}
        self.counts[kind] += 1
        if kind == "KeyError":
            self.check_final(order, task_id, error)
        elif kind == "CrashLoop":
            if ids.isdisjoint(self.loops):
                self.fail(f"{task_id} failed as a crash loop, and the store did not say so")
        elif kind in ENDED_BY:  # Celery rejects what cannot be published in time
            if ids.isdisjoint(self.limited if kind == "TimeLimitExceeded" else self.time_is_over):
                self.fail(f"{task_id} failed with a time limit of another one")
        elif not self.may_fail_with(kind, task_id, runs):
            self.fail(f"{task_id} failed with {error!r}, and no run of it did")
        late = [run.number for run in runs if run.held.lease.owner in self.refused]
        if kind == "ValueError" and getattr(error, "args", ("",))[0] in late:
            self.fail(f"{task_id} failed with what a run raised that had lost its lease")

    def heirs_of(self, order: str) -> set[str]:
        """Return the ids under which another task has taken the place of an order's."""
        return {run.task_id for run in self.runs if run.order == order and run.handed_over}

    def may_fail_with(self, kind: str, task_id: str, runs: list[Run]) -> bool:
        """Return whether a run failed so, or could not be replaced, or another one had or has done its operation."""
        if kind == "Conflict":
            done = any(run.ending == "returned" and run.task_id != task_id for run in runs)
            return self.task == "refund" or (self.task == "bill" and done)
        if kind == "ResultUnavailable":
            return bool(self.heirs_of(runs[0].order[-5:]) - {task_id})
        if kind == "OSError":
            return any(run.unanswered and run.task_id == task_id for run in runs)
        return kind in ("ValueError", "Abandoned", "StoreUnreachable") and any(run.ending == "raised" for run in runs)

    def check_final(self, order: str, task_id: str, error: object) -> None:
        """Check that a caller got the failure that was settled, or one that could not be."""
        (refusal,) = getattr(error, "args", ("",))
        ids = {task_id, *self.heirs_of(order)}
        own = {f"refusal {run.number}" for run in self.runs if run.task_id in ids and run.unsettled}
        settled = self.answers[order]
        if refusal not in own and not any(f'"{refusal}"'.encode() in answer for answer in settled):
            self.fail(f"{task_id} failed with {error!r}, and {settled} was settled")


def name_of(key: str) -> str:
    """Return of which order a record is, or of which mail."""
    task, _, order = key.removeprefix("idem:").split(":")
    return MAIL + order if task == "mail" else order


def is_copy(request: Any) -> bool:
    """Return whether the broker delivers a message again, or the library has published it again."""
    identity = request._idempotency.identity
    return bool(identity.copy or (request.delivery_info or {}).get("redelivered"))
