"""The same events on the real memory store, with programs that go on instead of being run up to a point again.

Nothing is reduced here: times pass, owners and tokens are new each time, copies are counted on. `Real.core` is what the
model should have in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from greenlet import greenlet

from celery_idempotent.core import heartbeat
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import rules
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import Claim, Lease, Reason, Refusal, Release

from .programs import AGED, LEASE_TICKS, TICK, Points, Program, clock
from .protocol import (
    NO_SENDER,
    NOBODY,
    Configuration,
    Core,
    Entry,
    Ghost,
    Message,
    Worker,
    canonical,
    claim_of,
    model_row,
    order,
    told_of,
)

_LOST = StoreUnreachable("the store does not answer")


@dataclass(eq=False)
class Delivered:
    """A worker with a message."""

    owner: int
    message: Message
    program: Program
    since: float
    answer: Any = None
    has_answer: bool = False
    beat: Any = None
    beat_since: float = 0.0
    beat_answer: Any = None


@dataclass(eq=False)
class OnTheWay:
    """A request for whose answer nobody waits."""

    owner: int
    message: Message
    what: tuple[Any, ...]
    call: tuple[Any, ...]
    fence: int


class Real:
    """What happens for real."""

    def __init__(self, configuration: Configuration, points: Points) -> None:
        self.points = points
        self.store = MemoryStore()
        self.names = count(100)
        self.entries = [
            Entry(Message(task, n, 0, 0, 0, NO_SENDER, False), True, False)
            for n, task in enumerate(configuration.messages)
        ]
        self.workers: list[Delivered] = []
        self.ghosts: list[OnTheWay] = []
        clock.now = 50_000.0

    # -- what the model should have in its place -----------------------------------------------------------------------

    def core(self) -> Core:
        """Return the core of the model that stands for this."""
        return canonical(self._raw())

    def points_known(self) -> bool:
        """Return whether the model knows all points at which programs are."""
        return all(Points.key(worker.program) in self.points._numbers for worker in self.workers)

    def _raw(self) -> Core:
        now = int(clock.now * rules.SECOND)
        row = self.store._rows.get("key")
        return Core(
            None if row is None else model_row(row, now),
            tuple(self._worker(each) for each in self.workers),
            tuple(self.entries),
            tuple(Ghost(ghost.call, ghost.owner, ghost.message, ghost.fence) for ghost in self.ghosts),
        )

    def _worker(self, each: Delivered) -> Worker:
        program = each.program
        what = program.point.what
        age = _age(each.since) if what[0] == "call" and what[1] in AGED else 0
        told, fence, value = None, program.held.fence if program.hold is not None else 0, NOBODY
        if each.has_answer:
            told = self._told(each)
            if isinstance(each.answer, Lease):
                fence = each.answer.fence
            elif isinstance(each.answer, Refusal) and each.answer.record.payload:
                value = int(each.answer.record.payload)
        if what == ("end", "value", "theirs"):
            value = int(program.what[2])
        beat: Any = None
        if each.beat is not None:
            answered = each.beat_answer
            beat_told = ("error",) if isinstance(answered, Exception) else (not answered,)
            beat = (_age(each.beat_since), None if answered is None else beat_told)
        return Worker(
            each.owner,
            program.kind[0] == "reaper",
            self.points._numbers[Points.key(program)],
            each.message,
            age,
            fence,
            value,
            program.hold,
            False,
            beat,
            told,
        )

    @staticmethod
    def _told(each: Delivered) -> tuple[Any, ...]:
        if isinstance(each.answer, (Lease, Refusal)):
            return told_of(each.answer, each.program.claim)
        return (not each.answer,)  # a renewal's

    # -- events --------------------------------------------------------------------------------------------------------

    def happen(self, label: str, core: Core) -> None:
        """Do what the model calls by this name in a core."""
        row, raw = self._raw().row, self._raw()
        self._sorted = sorted(range(len(raw.workers)), key=lambda at: order(raw.workers[at], row))
        if label == "a tick":
            clock.now += TICK
        elif label == "the record is forgotten":
            self.store.delete("key")
        elif label == "an operator releases":
            real = self.store._rows["key"]
            self.store.release(Lease(Claim("key", real.owner, 1.0, 1000.0), real.fence), Release(Reason.SHUTDOWN))
        elif found := re.fullmatch(r"ghost 0: arrives", label):
            ghost = self.ghosts.pop()
            self._call(ghost.what)
        elif found := re.fullmatch(r"entry (\d): (.*)", label):
            self._entry(self._entry_at(int(found[1]), core), found[2])
        else:
            found = re.fullmatch(r"worker (\d): (.*)", label)
            assert found is not None, label
            self._of_worker(self.workers[self._sorted[int(found[1])]], found[2])

    def _entry_at(self, at: int, core: Core) -> int:
        """Return the place here of an entry that the model has at ``at``: it makes the same difference."""

        def without(core: Core, place: int) -> Core:
            entries = list(core.entries)
            entries[place] = entries[place]._replace(queued=True, unacked=True)
            return comparable(core._replace(entries=tuple(entries)))

        return next(place for place in range(len(self.entries)) if without(self._raw(), place) == without(core, at))

    def _entry(self, place: int, what: str) -> None:
        message = self.entries[place].message
        if what.startswith("delivered again"):
            marked = message.redelivered or "unmarked" not in what
            self.entries[place] = Entry(message._replace(redelivered=marked), True, False)
            return
        self.entries[place] = Entry(message, False, True)
        owner = next(self.names)
        program = Program(("delivery", message.retries, False), claim_of(message, owner), str(owner))
        self.workers.append(Delivered(owner, message, program, clock.now))

    def _call(self, what: tuple[Any, ...]) -> Any:
        options = {"ttl": 1000.0} if what[1] == "settle" else {}
        try:
            return getattr(self.store, what[1])(*what[2:], **options)
        except Exception as error:  # noqa: BLE001 - the program's to handle
            return error

    def _resume(self, worker: Delivered, answer: Any) -> None:
        worker.answer, worker.has_answer = None, False
        worker.program.resume(answer)
        worker.since = clock.now

    def _of_worker(self, worker: Delivered, what: str) -> None:  # noqa: C901 - a list
        program = worker.program
        if "renewal" in what:
            self._renewal(worker, what)
        elif re.fullmatch(r"its \w+ is served", what):
            worker.answer, worker.has_answer = self._call(program.what), True
        elif what == "gets its answer":
            self._resume(worker, worker.answer)
        elif re.fullmatch(r"its \w+ is answered", what):
            self._resume(worker, self._call(program.what))
        elif re.fullmatch(r"its \w+ is lost", what):
            self._resume(worker, _LOST)
        elif re.fullmatch(r"its \w+ is late", what):
            self._haunt(worker)
            self._resume(worker, _LOST)
        elif re.fullmatch(r"the answer to its \w+ is lost", what):
            self._call(program.what)
            self._resume(worker, _LOST)
        elif what == "the broker is away":
            self._resume(worker, OSError("no broker"))
        elif what in ("its copy is published", "its retry is published"):
            self._publish(worker, what)
        elif what.startswith("ends"):
            self._ends(worker, restored="requeue" in what or "dies" in what)
        elif "killed" in what:
            self._kill(worker, child="child" in what, haunt="on the way" in what)
        else:
            self._resume(worker, what.removesuffix(" its lease"))

    def _haunt(self, worker: Delivered) -> None:
        program = worker.program
        fence = program.held.fence if program.held is not None else 0
        self.ghosts = [OnTheWay(worker.owner, worker.message, program.what, program.point.what, fence)]

    def _publish(self, worker: Delivered, what: str) -> None:
        old = worker.message
        if "copy" in what:
            new = old._replace(copy=old.copy + 1, token=next(self.names), redelivered=False)
        else:
            new = Message(old.task, old.published, old.retries + 1, 0, 0, worker.owner, False)
        self.entries.append(Entry(new, True, False))
        self._resume(worker, "published")

    def _renewal(self, worker: Delivered, what: str) -> None:
        match what:
            case "its renewal is sent":
                (server,) = worker.program.heartbeat._servers.values()
                # What is due within a pause of the heartbeat's is due now.
                worker.beat = greenlet(partial(server.beat, clock.now + heartbeat.RETRY_PAUSE))
                worker.beat.program = SimpleNamespace(dead=False, stack=())
                worker.beat_what = worker.beat.switch()  # type: ignore[attr-defined]
                worker.beat_since, worker.beat_answer = clock.now, None
            case "its renewal is served":
                worker.beat_answer = self._call(worker.beat_what)  # type: ignore[attr-defined]
            case "the answer to its renewal is lost":
                self._call(worker.beat_what)  # type: ignore[attr-defined]
                worker.beat_answer = _LOST
            case "its renewal is lost":
                worker.beat_answer = _LOST
            case "its renewal is late":
                self._haunt_beat(worker)
                worker.beat_answer = _LOST
            case "its renewal is answered":
                worker.beat.switch(worker.beat_answer)
                worker.beat = None

    def _haunt_beat(self, worker: Delivered) -> None:
        if not self.ghosts:
            what = worker.beat_what  # type: ignore[attr-defined]
            self.ghosts = [OnTheWay(worker.owner, worker.message, what, ("call", "renew"), worker.program.held.fence)]

    def _ends(self, worker: Delivered, *, restored: bool) -> None:
        self._leave(worker)
        self.workers.remove(worker)
        self._entries_of(worker.message, _restored if restored else _acked)

    def _leave(self, worker: Delivered) -> None:
        if worker.beat is not None:
            if worker.beat_answer is None:
                self._haunt_beat(worker)
            worker.beat.program.dead = True
            worker.beat.throw()
        if not worker.program.greenlet.dead:
            worker.program.kill()

    def _entries_of(self, message: Message, change: Callable[[Entry], Entry | None]) -> None:
        changed = [change(e) if e.message[:6] == message[:6] else e for e in self.entries]
        self.entries = [entry for entry in changed if entry is not None]

    def _kill(self, worker: Delivered, *, child: bool, haunt: bool) -> None:
        beating = worker.beat is not None and worker.beat_answer is None
        if haunt:
            assert not beating or self.ghosts, "one request on the way at a time"
            self._haunt(worker)
        self._leave(worker)
        if child:
            program = Program(("reaper",), claim_of(worker.message, worker.owner))
            self.workers[self.workers.index(worker)] = Delivered(worker.owner, worker.message, program, clock.now)
        else:
            self.workers.remove(worker)
            self._entries_of(worker.message, _restored)


def _age(since: float) -> int:
    return min(LEASE_TICKS, int((clock.now - since) / TICK))


def _restored(entry: Entry) -> Entry:
    return Entry(entry.message._replace(redelivered=True), True, False) if entry.unacked else entry


def _acked(entry: Entry) -> Entry | None:
    return entry._replace(unacked=False) if entry.queued else None


def comparable(core: Core) -> Core:
    """Return a core without what the model alone keeps, and what makes no difference any more."""
    workers = tuple(worker._replace(overtaken=False, value=NOBODY) for worker in core.workers)
    return canonical(core._replace(workers=workers, ghosts=tuple(ghost._replace(fence=0) for ghost in core.ghosts)))
