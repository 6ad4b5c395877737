"""The protocol as a graph: its states, and what can happen in each.

A state has a *core* (the record, the workers, the messages, requests on their way) and a *tally* (how many faults may
yet happen, who was answered). Cores are reduced to what makes a difference: times are ticks from now, names and fences
and the numbers of copies are ranks, workers and messages are sorted.

The record is changed by the functions of `stores/rules.py`, applied to a `rules.Row` made of it; deliveries go on as
the points of `programs` have it. The broker is the model's own: an entry is in the queue, or with a worker and not
acked; all deliveries of one entry share the ack, as on Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_idempotent.stores import rules
from celery_idempotent.stores.records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State

from . import law
from .programs import AGED, KEEP_TTL, LEASE_TICKS, LEASE_TTL, MAX_CRASHES, TICK, Hold, Points, Seen, ticks

#: The store's time, which is always the same: times are relative to it. It is above every fence.
NOW = 1000
_TICK = int(TICK * rules.SECOND)
#: Names: of workers by their place; of the asker of a request on its way; of an owner that only a message names; of
#: nobody who can come back.
GHOST, SENDER, NOBODY, NO_SENDER, SETTLED, OTHER_VALUE = 2, 3, 9, 8, 7, 6
NEW = 10


@dataclass(frozen=True)
class Configuration:
    """What there is, and what may happen.

    Arguments:
        messages: The task ids of what is published, all with one key; an id that is there twice was published twice.
        faults: How many faults may happen in all.
        raises, retries: How many bodies may raise, or retry.
        ghosts: Whether a request that was given up may arrive later.
        kills, lost_replies, redeliveries, unmarked, broker: Whether these faults happen.
        checks: Whether bodies call ``self.lease.check()``.
        callbacks: Whether the tasks have callbacks.
        ticks: Whether time passes.
        operator, data_loss: Whether an operator releases, or the record is forgotten.
        depth: Events from the start, or None: to the end.
        states: About how many states to stop at.
    """

    messages: str = "AB"
    faults: int = 2
    raises: int = 1
    retries: int = 1
    ghosts: bool = True
    kills: bool = True
    lost_replies: bool = True
    redeliveries: bool = True
    unmarked: bool = False
    broker: bool = False
    checks: bool = False
    callbacks: bool = False
    ticks: bool = True
    operator: bool = False
    data_loss: bool = False
    depth: int | None = None
    states: int | None = None


class Row(NamedTuple):
    """The record."""

    state: str
    fence: int
    owner: int
    task: str
    lease: int
    not_before: int
    crashes: int
    reason: str
    payload: int
    #: by task: attempt, copy, token
    waiting: tuple[tuple[str, int, int, int], ...]
    attempts: tuple[tuple[str, int], ...]
    dispatched: tuple[str, ...]


class Message(NamedTuple):
    """A message, as one delivery sees it."""

    task: str
    #: which of the publishes it came from
    published: int
    retries: int
    copy: int
    token: int
    sender: int
    redelivered: bool


class Entry(NamedTuple):
    """A message at the broker."""

    message: Message
    queued: bool
    unacked: bool


class Worker(NamedTuple):
    """A worker that does something: its child has a delivery, or its main process reaps the child.

    Arguments:
        name: The owner of the delivery.
        reaper: Whether it is the main process.
        point: Where the program is.
        message: The message.
        age: Ticks since it made its request.
        fence: The fence of its lease.
        value: Whose value it was answered.
        hold: What it believes of its lease.
        overtaken: Whether the store gave the lease to another since, or an operator took it.
        beat: Of a renewal on its way, the ticks since it was sent, and the answer.
        answer: The store's answer to its request, on its way.
    """

    name: int
    reaper: bool
    point: int
    message: Message
    age: int = 0
    fence: int = 0
    value: int = NOBODY
    hold: Hold | None = None
    overtaken: bool = False
    beat: tuple[int, tuple[Any, ...] | None] | None = None
    answer: tuple[Any, ...] | None = None


class Ghost(NamedTuple):
    """A request on its way, for whose answer nobody waits."""

    call: tuple[Any, ...]
    owner: int
    message: Message
    fence: int


class Core(NamedTuple):
    """What the next events depend on."""

    row: Row | None
    workers: tuple[Worker, ...]
    entries: tuple[Entry, ...]
    ghosts: tuple[Ghost, ...]


class Change(NamedTuple):
    """What an event does to the tally, and what it needs of it."""

    faults: int = 0
    raises: int = 0
    retries: int = 0
    died: int = 0
    suspects: int = 0
    alive: bool = False
    meddled: bool = False
    answered: tuple[str, str] | None = None
    crash_loop: bool = False
    runs_on: bool = False
    excused: bool = False
    #: whether time passes, or a body goes on
    moves: bool = False


NONE, FAULT, MOVE = Change(), Change(faults=1), Change(moves=True)
RENEW = ("call", "renew")


class Event(NamedTuple):
    """One thing that can happen in a core.

    Arguments:
        label: Its name, by which it is found again.
        core: What follows; None if what happens must not.
        change: What it does to the tally.
        broken: What must not happen, which it is, or "".
        excused: Whether that may happen once an operator or a loss of data has meddled.
    """

    label: str
    core: Core | None
    change: Change
    broken: str = ""
    excused: bool = False


class Tally(NamedTuple):
    """What may yet happen, and what has.

    Arguments:
        faults, raises, retries: How many may yet happen.
        died: How many holders in a row were killed while their bodies ran.
        suspects: How many were killed, or let their leases run out.
        meddled: Whether the record was forgotten, or released by an operator.
        answers: By task: whether it was answered with the settled value, or failed.
    """

    faults: int
    raises: int
    retries: int
    died: int
    suspects: int
    meddled: bool
    answers: tuple[tuple[str, str], ...]

    def after(self, change: Change) -> Tally | str | None:
        """Return the tally after a change; what is broken; or None if it cannot happen any more."""
        faults, raises, retries = (
            self.faults - change.faults,
            self.raises - change.raises,
            self.retries - change.retries,
        )
        if faults < 0 or raises < 0 or retries < 0:
            return None
        if change.excused and not self.meddled:
            return None
        if change.crash_loop and self.suspects < MAX_CRASHES and not self.meddled:
            return f"an operation is refused as a crash loop after {self.suspects} of {MAX_CRASHES} crashes"
        if change.runs_on and self.died >= MAX_CRASHES and not self.meddled:
            return f"an operation runs again after {self.died} holders in a row have died of it"
        answers = self.answers
        if change.answered is not None:
            answers = tuple(sorted({**dict(answers), change.answered[0]: change.answered[1]}.items()))
        died = 0 if change.alive else min(MAX_CRASHES, self.died + change.died)
        suspects = 0 if change.alive else min(MAX_CRASHES, self.suspects + change.suspects)
        return Tally(faults, raises, retries, died, suspects, self.meddled or change.meddled, answers)


class Served(NamedTuple):
    """What the store makes of a request.

    Arguments:
        row: The record afterwards; a new fence is `NOW`.
        told: The answer.
        granted: Whether a new lease was given.
        fence: The fence of the lease that was given, or 0.
        value: Whose value the answer carries.
        change: What it means for the tally.
        broken: What must not happen, which it is, or "".
    """

    row: Row | None
    told: tuple[Any, ...]
    granted: bool
    fence: int
    value: int
    change: Change
    broken: str


class Protocol:
    """The graph of one configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.points = Points()
        self._served: dict[Any, Served] = {}

    # -- the start -----------------------------------------------------------------------------------------------------

    def start(self) -> tuple[Core, Tally]:
        """Return the first core: all is published, nothing is delivered."""
        given = self.configuration
        messages = [Message(task, n, 0, 0, 0, NO_SENDER, False) for n, task in enumerate(given.messages)]
        core = Core(None, (), tuple(Entry(message, True, False) for message in messages), ())
        return core, Tally(given.faults, given.raises, given.retries, 0, 0, False, ())

    # -- the store -----------------------------------------------------------------------------------------------------

    def serve(self, row: Row | None, call: tuple[Any, ...], owner: int, message: Message, fence: int) -> Served:
        """Let the store answer a request."""
        asked = (row, call, owner, message, fence)
        found = self._served.get(asked)
        if found is None:
            found = self._served[asked] = _serve(row, call, owner, message, fence)
        return found

    # -- what can happen -----------------------------------------------------------------------------------------------

    def events(self, core: Core, *, faults: bool) -> Iterator[Event]:
        """Yield what can happen: without a fault, or by one."""
        return self._faults(core) if faults else self._calm(core)

    def _calm(self, core: Core) -> Iterator[Event]:
        if len(core.workers) < 2:
            for at, entry in enumerate(core.entries):
                if entry.queued:
                    yield self._deliver(core, at)
        for at in range(len(core.workers)):
            yield from self._steps(core, at)
        for at, ghost in enumerate(core.ghosts):
            served = self.serve(core.row, ghost.call, ghost.owner, ghost.message, ghost.fence)
            changed = core._replace(ghosts=_drop(core.ghosts, at))
            event = self._with_record(f"ghost {at}: arrives", changed, served, ghost.owner, sort=False)
            yield event if event.core is None else self._event(event.label, event.core, event.change)
        if self.configuration.ticks:
            yield from self._time(core)

    def _faults(self, core: Core) -> Iterator[Event]:
        given = self.configuration
        for at, entry in enumerate(core.entries):
            if given.redeliveries and entry.unacked:
                for marked in (True, False) if given.unmarked and not entry.message.redelivered else (True,):
                    again = Entry(entry.message._replace(redelivered=marked or entry.message.redelivered), True, False)
                    changed = core._replace(entries=_put(core.entries, at, again))
                    label = f"entry {at}: delivered again{'' if marked else ' unmarked'}"
                    yield self._event(label, changed, FAULT)
        for at, worker in enumerate(core.workers):
            point = self.points.known[worker.point]
            if given.lost_replies:
                yield from self._loss(core, at, point)
            if given.broker and point.what[0] == "publish":
                yield self._goes_on(core, at, "the broker is away", ("error",), FAULT)
            if given.kills:
                yield from self._kill(core, at, point)
        yield from self._meddling(core)

    def _event(self, label: str, core: Core, change: Change = NONE, *, named: bool = False) -> Event:
        core = sorted_workers(core) if named else canonical(core)
        broken, excused = law.of_core(core, self.points)
        return Event(label, core, change, broken, excused)

    def _deliver(self, core: Core, at: int) -> Event:
        message = core.entries[at].message
        kind = ("delivery", message.retries, self.configuration.callbacks)
        worker = Worker(NEW, False, self.points.start(kind), message)
        entries = _put(core.entries, at, Entry(message, False, True))
        return self._event(f"entry {at}: delivered", core._replace(entries=entries, workers=(*core.workers, worker)))

    def _time(self, core: Core) -> Iterator[Event]:
        row, workers, suspects = core.row, [], 0
        if row is not None and (row.lease or row.not_before):
            suspects = int(row.state == State.IN_PROGRESS and row.lease == 1)
            row = row._replace(lease=max(0, row.lease - 1), not_before=max(0, row.not_before - 1))
        for worker in core.workers:
            what = self.points.known[worker.point].what
            hold, beat, age = worker.hold, worker.beat, worker.age
            if hold is not None:
                hold = Hold(max(0, hold.trust - 1), max(0, hold.due - 1), hold.lost)
            if beat is not None:
                beat = (min(LEASE_TICKS, beat[0] + 1), beat[1])
            if what[0] == "call" and what[1] in AGED:
                age = min(LEASE_TICKS, age + 1)
            if hold != worker.hold or beat != worker.beat or age != worker.age:
                worker = worker._replace(hold=hold, beat=beat, age=age)
            workers.append(worker)
        changed = core._replace(row=row, workers=tuple(workers))
        if changed != core:
            yield self._event("a tick", changed, Change(suspects=suspects, moves=True), named=True)

    def _meddling(self, core: Core) -> Iterator[Event]:
        given, row = self.configuration, core.row
        if given.data_loss and row is not None:
            yield self._event("the record is forgotten", core._replace(row=None), Change(faults=1, meddled=True))
        if given.operator and row is not None and row.state == State.IN_PROGRESS and row.lease:
            # As `cli.release.release_for_holder` does.
            call = ("call", "release", Reason.SHUTDOWN.value, 0, 0)
            served = self.serve(row, call, row.owner, Message(row.task, 0, 0, 0, 0, NO_SENDER, False), row.fence)
            workers = tuple(w._replace(overtaken=w.overtaken or w.name == row.owner) for w in core.workers)
            changed = core._replace(row=served.row, workers=workers)
            yield self._event("an operator releases", changed, Change(faults=1, meddled=True))

    # -- steps of a worker ---------------------------------------------------------------------------------------------

    def _steps(self, core: Core, at: int) -> Iterator[Event]:
        worker, given = core.workers[at], self.configuration
        point = self.points.known[worker.point]
        match point.what:
            case ("call", *_):
                yield from self._call(core, at, point.what)
            case ("sleep",):
                yield self._goes_on(core, at, "wakes", ("wakes",), named=True)
            case ("body",):
                yield self._goes_on(core, at, "returns", ("returns",), MOVE, named=True)
                yield self._goes_on(core, at, "raises", ("raises",), Change(raises=1, moves=True), named=True)
                yield self._goes_on(core, at, "retries", ("retries",), Change(retries=1, moves=True), named=True)
                if given.checks:
                    checked = self._goes_on(core, at, "checks its lease", ("checks",))
                    if checked.core != core:
                        yield checked
                    elif worker.hold is None or worker.hold.lost or not worker.hold.trust:
                        yield checked._replace(core=None, broken="a check of a lease that is in doubt asks nobody")
            case ("publish", kind):
                yield self._publish(core, at, kind)
            case ("dispatch", whose):
                yield self._dispatch(core, at, whose)
            case ("end", *how):
                yield from self._end(core, at, how)
        yield from self._beat(core, at, point.watched)

    def _goes_on(
        self,
        core: Core,
        at: int,
        label: str,
        told: tuple[Any, ...],
        change: Change = NONE,
        *,
        late: bool = False,
        named: bool = False,
    ) -> Event:
        """Let a worker's program go on, with the record and the rest as they are in ``core``."""
        worker = core.workers[at]
        point, hold, emitted = self.points.step(worker.point, told, worker.age, worker.hold, late=late)
        lost = "LeaseLost" in emitted or (hold is not None and hold.lost and not (worker.hold and worker.hold.lost))
        label = f"worker {at}: {label}"
        known = self.points.known
        before, after = (known[worker.point].what, worker.hold), (known[point].what, hold)
        if broken := law.of_step(before, told, after, emitted):
            return Event(label, None, change, broken)
        if lost and not worker.overtaken:
            return Event(label, None, change, "a lease is given up for lost, and nobody else had it")
        fence, overtaken = worker.fence, worker.overtaken
        if hold is None and self.points.known[point].what[0] != "dispatch":
            fence, overtaken = 0, False
        changed = Worker(
            worker.name,
            worker.reaper,
            point,
            worker.message,
            0,
            fence,
            worker.value,
            hold,
            overtaken,
            worker.beat,
            None,
        )
        following = Core(core.row, _put(core.workers, at, changed), core.entries, core.ghosts)
        return self._event(label, following, change, named=named and fence == worker.fence)

    def _call(self, core: Core, at: int, call: tuple[Any, ...]) -> Iterator[Event]:
        worker = core.workers[at]
        if worker.answer is not None:
            yield self._goes_on(core, at, "gets its answer", worker.answer, named=True)
            return
        served = self.serve(core.row, call, worker.name, worker.message, worker.fence)
        if call[1] in ("acquire", "renew"):  # how long the answer takes makes a difference
            answered = worker._replace(answer=served.told, value=served.value, fence=served.fence or worker.fence)
            changed = core._replace(workers=_put(core.workers, at, answered))
            yield self._with_record(f"worker {at}: its {call[1]} is served", changed, served, worker.name)
            return
        found = self._with_record(f"worker {at}: its {call[1]} is answered", core, served, worker.name, sort=False)
        if found.core is None:
            yield found
        else:
            changed = found.core
            if call[1] == "get":
                valued = changed.workers[at]._replace(value=served.value)
                changed = changed._replace(workers=_put(changed.workers, at, valued))
            yield self._goes_on(changed, at, f"its {call[1]} is answered", served.told, found.change)

    def _loss(self, core: Core, at: int, point: Any) -> Iterator[Event]:
        """Let a request be lost, or come later, or its answer be lost."""
        worker, call, ghosts = core.workers[at], point.what, self.configuration.ghosts and not core.ghosts
        if call[0] == "call" and worker.answer is None:
            served = self.serve(core.row, call, worker.name, worker.message, worker.fence)
            for late in (False, True) if call[1] == "settle" and worker.hold and not worker.hold.trust else (False,):
                text = ", for too long" if late else ""
                yield self._goes_on(core, at, f"its {call[1]} is lost{text}", ("error",), FAULT, late=late)
                if call[1] == "get":
                    continue
                if ghosts:
                    later = core._replace(ghosts=(Ghost(call, worker.name, worker.message, worker.fence),))
                    yield self._goes_on(later, at, f"its {call[1]} is late{text}", ("error",), FAULT, late=late)
                found = self._with_record("", core, served, worker.name, sort=False)
                if found.core is not None:
                    label, change = f"the answer to its {call[1]} is lost{text}", found.change._replace(faults=1)
                    yield self._goes_on(found.core, at, label, ("error",), change, late=late)
        if worker.beat is not None and worker.beat[1] is None:
            label = f"worker {at}: its renewal"
            error = self._beating(core, at, (worker.beat[0], ("error",)))
            yield self._event(f"{label} is lost", error, FAULT, named=True)
            if ghosts:
                later = error._replace(ghosts=(Ghost(RENEW, worker.name, worker.message, worker.fence),))
                yield self._event(f"{label} is late", later, FAULT)
            served = self.serve(core.row, RENEW, worker.name, worker.message, worker.fence)
            found = self._with_record(f"worker {at}: the answer to its renewal is lost", error, served, worker.name)
            yield found._replace(change=found.change._replace(faults=1))

    def _with_record(self, label: str, core: Core, served: Served, owner: int, *, sort: bool = True) -> Event:
        """Put into ``core`` what the store has made of the record."""
        broken = served.broken
        workers = core.workers
        if served.granted:
            others = [worker.fence for worker in core.workers if worker.name != owner]
            broken = broken or law.fence(served.row, others)
        if served.granted or served.change.crash_loop:
            workers = tuple(w._replace(overtaken=True) if w.name != owner and w.fence else w for w in workers)
        changed = Core(served.row, workers, core.entries, core.ghosts)
        if broken:
            return Event(label, None, served.change, broken)
        if not sort:
            return Event(label, changed, served.change)
        return self._event(label, changed, served.change, named=served.row == core.row)

    def _publish(self, core: Core, at: int, kind: str) -> Event:
        worker = core.workers[at]
        old = worker.message
        if kind == "copy":
            new = old._replace(copy=old.copy + 1, token=NEW, redelivered=False)
        else:
            new = Message(old.task, old.published, old.retries + 1, 0, 0, worker.name, False)
        entries = (*core.entries, Entry(new, True, False))
        return self._goes_on(core._replace(entries=entries), at, f"its {kind} is published", ("published",))

    def _dispatch(self, core: Core, at: int, whose: str) -> Event:
        event = self._goes_on(core, at, "dispatches callbacks", ("dispatched",))
        worker = core.workers[at]
        broken = law.dispatch(core, worker, whose, self.points.known[worker.point].unsettled)
        return event._replace(broken=broken, excused=True) if broken else event

    def _end(self, core: Core, at: int, how: list[Any]) -> Iterator[Event]:
        worker = core.workers[at]
        point = self.points.known[worker.point]
        answered, broken = None, ""
        if how[0] == "value":
            value = {"own": worker.name, "theirs": worker.value}.get(how[1], NOBODY)
            broken = law.answer(core.row, value, point.unsettled and how[1] == "own")
            answered = (worker.message.task, "value")
        elif how[0] == "failed":
            broken = law.failure(how[1])
            answered = (worker.message.task, "failure")
        label = f"worker {at}: ends ({how[0]})"
        if broken and how[0] != "value":
            yield Event(label, None, NONE, broken)
            return
        rest = core._replace(workers=_drop(core.workers, at))
        rest = _with_beat_on_its_way(rest, worker)
        change = Change(answered=answered)
        if how[0] == "requeue":
            yield self._event(label, rest._replace(entries=_restored(rest.entries, worker.message)), change)
            return
        event = self._event(label, rest._replace(entries=_acked(rest.entries, worker.message)), change)
        yield event._replace(broken=broken, excused=True) if broken else event
        if self.configuration.kills and answered:
            restored = rest._replace(entries=_restored(rest.entries, worker.message))
            yield self._event(f"{label}, and dies before its ack", restored, change._replace(faults=1))

    def _beat(self, core: Core, at: int, watched: bool) -> Iterator[Event]:
        worker = core.workers[at]
        label = f"worker {at}: its renewal"
        if worker.beat is None:
            if watched and worker.hold is not None and self.points.sends(worker.hold):
                yield self._event(f"{label} is sent", self._beating(core, at, (0, None)), named=True)
        elif worker.beat[1] is None:
            served = self.serve(core.row, RENEW, worker.name, worker.message, worker.fence)
            beating = self._beating(core, at, (worker.beat[0], served.told))
            yield self._with_record(f"{label} is served", beating, served, worker.name)
        elif worker.hold is None:
            yield self._event(f"{label} is answered", self._beating(core, at, None), named=True)
        else:
            age, told = worker.beat
            assert told is not None
            hold = self.points.renewed(worker.hold, watched, age, told)
            if not watched:
                hold = hold._replace(due=0)
            if hold.lost and not worker.hold.lost and not worker.overtaken:
                yield Event(label, None, Change(), "a lease is given up for lost, and nobody else had it")
                return
            changed = worker._replace(hold=hold, beat=None)
            beaten = core._replace(workers=_put(core.workers, at, changed))
            yield self._event(f"{label} is answered", beaten, named=True)

    @staticmethod
    def _beating(core: Core, at: int, beat: tuple[int, tuple[Any, ...] | None] | None) -> Core:
        return core._replace(workers=_put(core.workers, at, core.workers[at]._replace(beat=beat)))

    def _kill(self, core: Core, at: int, point: Any) -> Iterator[Event]:
        worker, row = core.workers[at], core.row
        held = row is not None and row.state == State.IN_PROGRESS and row.owner == worker.name
        change = Change(faults=1, died=int(point.in_body and held), suspects=1)
        left = _with_beat_on_its_way(core, worker)
        sent = point.what[0] == "call" and worker.answer is None and point.what[1] != "get" and not left.ghosts
        ghost = Ghost(point.what, worker.name, worker.message, worker.fence) if sent else None
        if not worker.reaper:
            reaper = Worker(worker.name, True, self.points.start(("reaper",)), worker.message)
            reaped = left._replace(workers=_put(core.workers, at, reaper))
            yield self._event(f"worker {at}: its child is killed", reaped, change)
            if ghost is not None and self.configuration.ghosts:
                yield self._event(
                    f"worker {at}: its child is killed, its {point.what[1]} on the way",
                    reaped._replace(ghosts=(ghost,)),
                    change,
                )
        gone = left._replace(workers=_drop(core.workers, at), entries=_restored(core.entries, worker.message))
        yield self._event(f"worker {at}: killed", gone, change)
        if ghost is not None and self.configuration.ghosts:
            yield self._event(
                f"worker {at}: killed, its {point.what[1]} on the way", gone._replace(ghosts=(ghost,)), change
            )


def _put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _drop(items: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*items[:at], *items[at + 1 :])


def _with_beat_on_its_way(core: Core, worker: Worker) -> Core:
    """Return the core where a renewal of a worker that is gone may yet arrive."""
    if worker.beat is None or worker.beat[1] is not None or core.ghosts:
        return core
    return core._replace(ghosts=(Ghost(("call", "renew"), worker.name, worker.message, worker.fence),))


def _same(entry: Entry, message: Message) -> bool:
    return entry.message[:6] == message[:6]


def _acked(entries: tuple[Entry, ...], message: Message) -> tuple[Entry, ...]:
    return tuple(
        entry._replace(unacked=False) if _same(entry, message) else entry
        for entry in entries
        if entry.queued or not _same(entry, message)
    )


def _restored(entries: tuple[Entry, ...], message: Message) -> tuple[Entry, ...]:
    """Return the entries once one that was not acked is back in its queue."""
    return tuple(
        Entry(entry.message._replace(redelivered=True), True, False)
        if entry.unacked and _same(entry, message)
        else entry
        for entry in entries
    )


# -- the store, by the real rules --------------------------------------------------------------------------------------


def _serve(row: Row | None, call: tuple[Any, ...], owner: int, message: Message, fence: int) -> Served:
    real = None if row is None else real_row(row)
    claim = claim_of(message, owner)
    lease = Lease(claim, fence)
    change, value, granted, new = Change(), NOBODY, False, 0
    match call[1:]:
        case ("acquire",):
            answer, after = rules.acquire("key", real, claim, NOW)
            told = told_of(answer, claim)
            if isinstance(answer, Lease):
                new, granted = answer.fence, row is None or row.state != State.IN_PROGRESS or row.owner != owner
                mine = row is not None and row.task == message.task and row.owner != message.sender
                change = Change(runs_on=mine and claim.is_copy)
            else:
                value = int(answer.record.payload or NOBODY)
                change = Change(crash_loop=answer.verdict.value == "crash_loop")
        case ("renew",):
            after = rules.renew(real, lease, NOW)
            told = (after is not None,)
            after = after or (None if row is None else real_row(row))
        case ("settle", state, payload):
            name = owner if payload == b"own" else OTHER_VALUE
            after = rules.settle(real, lease, Outcome(State(state), str(name).encode()), KEEP_TTL, NOW)
            told = (after is not None,)
            change = Change(alive=told[0])
            after = after or (None if row is None else real_row(row))
        case ("release", reason, retry_in, next_attempt):
            good = rules.release(real, lease, Release(Reason(reason), retry_in * TICK, next_attempt), NOW)
            told, after = (good,), real
            change = Change(alive=good and row is not None and reason in ("failed", "retry", "requeued", "rejected"))
        case ("mark_dispatched",):
            told, after = (rules.mark_dispatched(real, message.task),), real
        case ("get",):
            record = None if real is None else rules.view("key", real, NOW)
            told, after = ("found", None if record is None else _seen(record, claim)), real
            value = int(record.payload or NOBODY) if record is not None else NOBODY
        case _:
            raise AssertionError(call)
    found = None if after is None else model_row(after)
    broken = law.kept(after, NOW, KEEP_TTL) if after is not None and found != row else ""
    broken = broken or law.of_store(row, call, owner, message, fence, found, told)
    return Served(found, told, granted, new, value, change, broken)


def claim_of(message: Message, owner: int) -> Claim:
    """Return what a delivery of a message asks for."""
    return Claim(
        "key",
        str(owner),
        LEASE_TTL,
        KEEP_TTL,
        task_id=message.task,
        retries=message.retries,
        copy=message.copy,
        token=str(message.token) if message.copy else "",
        redelivered=message.redelivered,
        sender="" if message.sender == NO_SENDER else str(message.sender),
        max_crashes=MAX_CRASHES,
    )


def told_of(answer: Lease | Refusal, claim: Claim) -> tuple[Any, ...]:
    """Return an answer to a claim as the model has it."""
    if isinstance(answer, Lease):
        return ("lease", answer.taken_over)
    return ("refused", answer.verdict.value, _seen(answer.record, claim))


def _seen(record: Record, claim: Claim) -> Seen:
    return Seen(
        record.state.value,
        record.task_id == claim.task_id,
        record.owner == claim.owner,
        record.reason == Reason.DONE,
        claim.task_id in record.dispatched,
    )


def real_row(row: Row) -> rules.Row:
    """Return the record as a store has it."""
    end = NOW + row.lease * _TICK
    settled = row.state == State.COMPLETED
    return rules.Row(
        State(row.state),
        fence=row.fence,
        owner="" if settled else str(row.owner),
        task_id=row.task,
        lease_end=end,
        not_before=NOW + row.not_before * _TICK if row.not_before else 0,
        crashes=row.crashes,
        reason=row.reason,
        payload=str(row.payload).encode() if settled else b"",
        expires=end + int((KEEP_TTL + row.not_before * TICK) * rules.SECOND),
        waiting={task: (attempt, copy, str(token) if copy else "") for task, attempt, copy, token in row.waiting},
        attempts=dict(row.attempts),
        dispatched=list(row.dispatched),
    )


def model_row(row: rules.Row, now: int = NOW) -> Row:
    """Return a store's record as the model has it, at its time."""
    running, released = row.state is State.IN_PROGRESS, row.state is State.RELEASED
    return Row(
        row.state.value,
        row.fence,
        int(row.owner or NOBODY),
        row.task_id,
        ticks((row.lease_end - now) / rules.SECOND) if running else 0,
        ticks((row.not_before - now) / rules.SECOND) if released else 0,
        min(row.crashes, 2 * MAX_CRASHES),
        row.reason,
        int(row.payload or NOBODY),
        tuple(sorted((task, mark[0], mark[1], int(mark[2] or 0)) for task, mark in row.waiting.items())),
        tuple(sorted(row.attempts.items())),
        tuple(row.dispatched),
    )


# -- what makes no difference ------------------------------------------------------------------------------------------


def order(worker: Worker, row: Row | None) -> tuple[Any, ...]:
    """Return by what workers are sorted; of their names, only whether it is the record's owner."""
    owns = row is not None and row.owner == worker.name
    message = worker.message
    program = (message.redelivered, worker.reaper, worker.point, worker.age, worker.hold or ())
    flight = (repr(worker.beat), repr(worker.answer), worker.fence, owns)
    return message[:4], program, flight, worker.overtaken, message.token, worker.name


def _entry_order(entry: Entry) -> tuple[Any, ...]:
    message = entry.message
    return message[:4], message.sender, message.redelivered, entry.queued, entry.unacked, message.token


def sorted_workers(core: Core) -> Core:
    """Return the canonical core, of one that is, but for a worker that changed beside its name and its message."""
    workers = core.workers
    if (
        len(workers) == 2
        and workers[0].message[:4] == workers[1].message[:4]
        and order(workers[1], core.row) < order(workers[0], core.row)
    ):
        return canonical(core)
    return core


def canonical(core: Core) -> Core:
    """Return the one core that stands for all that differ from it in names alone."""
    core = _renamed(core)
    core = _ranked(core)
    return _renumbered(core)


def _renamed(core: Core) -> Core:
    row, ghosts = core.row, core.ghosts
    workers = (
        core.workers if len(core.workers) < 2 else tuple(sorted(core.workers, key=lambda worker: order(worker, row)))
    )
    names: dict[int, int] = {worker.name: place for place, worker in enumerate(workers)}
    for ghost in ghosts:
        names.setdefault(ghost.owner, GHOST)
    living = frozenset(names)
    owner = NOBODY if row is None else row.owner
    if owner not in names and owner != NOBODY:
        sent = any(entry.message.sender == owner for entry in core.entries)
        sent = sent or any(each.message.sender == owner for each in (*workers, *ghosts))
        names[owner] = SENDER if sent else NOBODY
    payload = NOBODY if row is None else row.payload
    if all(old == new for old, new in names.items()) and (payload in (NOBODY, SETTLED) or payload in living):
        values = (
            {NOBODY, SETTLED, OTHER_VALUE, *living} if payload in (NOBODY, SETTLED) else {NOBODY, OTHER_VALUE, *living}
        )
        named = {NO_SENDER, *names}
        if (
            workers == core.workers
            and all(worker.value in values and worker.message.sender in named for worker in workers)
            and all(entry.message.sender in named for entry in core.entries)
            and all(ghost.message.sender in named for ghost in ghosts)
        ):
            return core

    def message_of(message: Message) -> Message:
        sender = names.get(message.sender, NO_SENDER)
        return message if sender == message.sender else message._replace(sender=sender)

    def value_of(value: int) -> int:
        if value in (NOBODY, OTHER_VALUE):
            return value
        if value in living:
            return names[value]
        return SETTLED if value == payload else OTHER_VALUE

    if row is not None:
        row = row._replace(owner=names.get(owner, NOBODY), payload=value_of(payload) if payload != NOBODY else NOBODY)
    return Core(
        row,
        tuple(
            worker._replace(name=names[worker.name], message=message_of(worker.message), value=value_of(worker.value))
            for worker in workers
        ),
        tuple(entry._replace(message=message_of(entry.message)) for entry in core.entries),
        tuple(ghost._replace(owner=names[ghost.owner], message=message_of(ghost.message)) for ghost in ghosts),
    )


def _ranked(core: Core) -> Core:
    row = core.row
    fences = {worker.fence for worker in core.workers} | {ghost.fence for ghost in core.ghosts}
    if row is not None:
        fences.add(row.fence)
    fences.discard(0)
    if max(fences, default=0) <= len(fences):
        return core
    rank = {0: 0, **{fence: place for place, fence in enumerate(sorted(fences), 1)}}
    return core._replace(
        row=None if row is None else row._replace(fence=rank[row.fence]),
        workers=tuple(worker._replace(fence=rank[worker.fence]) for worker in core.workers),
        ghosts=tuple(ghost._replace(fence=rank[ghost.fence]) for ghost in core.ghosts),
    )


def _renumbered(core: Core) -> Core:
    """Give copies the lowest numbers of their order, and their tokens too."""
    row = core.row
    waiting = () if row is None else row.waiting
    messages = [
        *(worker.message for worker in core.workers),
        *(entry.message for entry in core.entries),
        *(ghost.message for ghost in core.ghosts),
    ]
    if not any(message.copy for message in messages) and not any(mark[2] for mark in waiting):
        entries = tuple(sorted(core.entries))
        return core if entries == core.entries else core._replace(entries=entries)
    copies: dict[tuple[str, int], set[int]] = {}
    for task, attempt, copy, _ in waiting:
        copies.setdefault((task, attempt), set()).add(copy)
    for message in messages:
        copies.setdefault((message.task, message.retries), set()).add(message.copy)
    number: dict[tuple[str, int, int], int] = {}
    for (task, attempt), known in copies.items():
        last, new = None, 0
        for copy in sorted(known):
            if last is None:
                new = min(copy, 1)
            else:
                new += min(copy - last, 2)
            number[task, attempt, copy] = new
            last = copy
    tokens: dict[tuple[str, int, int, int], int] = {}
    given: dict[tuple[str, int, int], int] = {}

    def token_of(task: str, attempt: int, copy: int, token: int) -> int:
        if not copy:
            return 0
        known = (task, attempt, copy, token)
        if known not in tokens:
            tokens[known] = given[known[:3]] = given.get(known[:3], -1) + 1
        return tokens[known]

    marks = tuple((task, n, number[task, n, copy], token_of(task, n, copy, token)) for task, n, copy, token in waiting)
    workers = tuple(worker._replace(message=_numbered(worker.message, number, token_of)) for worker in core.workers)
    entries = tuple(
        sorted(
            entry._replace(message=_numbered(entry.message, number, token_of))
            for entry in sorted(core.entries, key=_entry_order)
        )
    )
    ghosts = tuple(ghost._replace(message=_numbered(ghost.message, number, token_of)) for ghost in core.ghosts)
    return Core(None if row is None else row._replace(waiting=marks), workers, entries, ghosts)


def _numbered(message: Message, number: dict[Any, int], token_of: Any) -> Message:
    copy = number[message.task, message.retries, message.copy]
    return message._replace(copy=copy, token=token_of(message.task, message.retries, message.copy, message.token))


def tasks_in(core: Core) -> Iterable[str]:
    """Yield the tasks that a message or a worker is to answer."""
    for entry in core.entries:
        yield entry.message.task
    for worker in core.workers:
        yield worker.message.task
