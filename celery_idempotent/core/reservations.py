"""Reservations: the leases that messages hold while they wait, so that no second message is published beside them.

A reservation saves work and carries no correctness. Its one law: a call is only skipped if a message that has yet to
do its work exists. Where that is in doubt the call is published: twice is safe, never is not.

A publisher acquires the slot for 10 s, publishes, and has it renewed once the broker has the message: then it is
*confirmed*. The message carries the owner's token, with which a worker gives the slot back.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty
from time import monotonic, sleep, time
from typing import Any, NamedTuple, TypeVar

from ..errors import StoreUnreachable
from ..events import logger
from ..stores.base import Store
from ..stores.records import NO_CRASH_LOOP, Claim, Lease, Reason, Record, Release, State
from .breaker import Breaker

T = TypeVar("T")

#: Seconds for which a slot is taken before the broker's word; with more than these left, a reservation is confirmed.
UNCONFIRMED = 10.0
#: Seconds for which a publisher that meets an unconfirmed reservation looks again, and between two looks.
LOOK, LOOK_PAUSE = 0.2, 0.02
#: Seconds for which a process gathers what it confirms.
GATHER = 0.01
#: Seconds that the store may take of one call, all in all.
BUDGET = 0.5
#: Seconds for which the record of a reservation is kept that is not to be replaced.
KEEP = 60.0
#: How many messages that run as well a record names; those before the first of them are in doubt.
BESIDE = 16
#: Threads of a process that wait for stores of publishers.
THREADS = 8
#: A number in a token is less; the fence is a time in microseconds.
MOST = 2**63
#: Why a call was published beside a reservation that its publisher has not confirmed.
IS_UNCONFIRMED = "unconfirmed"
#: Why one has no reservation: it begins a period of a throttle, and another message gathers the calls that follow.
GATHERS = "gathers calls"
#: Likewise: there was no time left to try again.
LATE = "late"
#: Why a message takes the place of another one that would do.
REPLACED = "replaced"
#: Why one takes the place of another that has waited for as long as a debounce may have it wait, and runs as well.
OVERDUE = "max_wait is over"
#: Likewise of a throttle, whose period it has waited for.
PERIOD_OVER = "period is over"


@dataclass(frozen=True, slots=True)
class Token:
    """The part of a reservation that its message carries; workers act on it alone.

    Arguments:
        slot: The key of the reservation.
        owner: Proof that the message holds it.
        fence: Of the lease; 0 where the store's reply was lost.
        until: ``start`` or ``done``, as in `Unique`.
        hold: Seconds for which it outlives the time at which the message is due.
        newest: Whether a later message takes the place of this one.
        throttle: Seconds for which the start of its run holds others back; 0 for none.
        late: Seconds, from when it was published, until the last of the messages is due that it replaced: for so much
            longer the record is kept. A time would be one by the clock of the publisher, and not of a worker.
    """

    slot: str
    owner: str
    fence: int = 0
    until: str = "start"
    hold: float = 3600.0
    newest: bool = False
    throttle: float = 0.0
    late: float = 0.0

    @classmethod
    def read(cls, header: object) -> Token | None:
        """Return the token in a message's header; None if there is none that this version understands."""
        if not isinstance(header, Mapping):
            return None
        slot, owner, until = header.get("slot"), header.get("owner"), header.get("until")
        numbers = [header.get(name) or 0 for name in ("fence", "for", "throttle", "late")]
        # Not every store can keep what cannot be printed, which this library does not write.
        texts = all(isinstance(text, str) and text and text.isprintable() for text in (slot, owner))
        if (
            not texts
            or until not in ("start", "done")
            or not all(isinstance(n, (int, float)) and 0 <= n < MOST for n in numbers)
        ):
            return None
        fence, hold, *others = numbers
        return cls(str(slot), str(owner), int(fence), str(until), hold, bool(header.get("newest")), *others)

    def header(self) -> dict[str, Any]:
        """Return the header of a message that carries it."""
        optional = {"newest": self.newest, "throttle": self.throttle, "late": self.late}
        return {
            "slot": self.slot,
            "owner": self.owner,
            "fence": self.fence,
            "until": self.until,
            "for": self.hold,
            **{name: value for name, value in optional.items() if value},
        }

    def claim(self, ttl: float, *, sender: str = "", note: str = "") -> Claim:
        """Return the claim of its lease, which renews what is there and revives nothing."""
        return Claim(
            key=self.slot,
            owner=self.owner,
            lease_ttl=ttl,
            keep_ttl=max(KEEP, self.hold + self.late) if self.newest else KEEP,
            max_crashes=NO_CRASH_LOOP,
            sender=sender,
            holder=note,
            revive=False,
        )


class WaitingMessage(NamedTuple):
    """The facts about the message that a record has, as its holder.

    Arguments:
        task_id: The message's id.
        eta: When it is due, as it is written in the message; empty for at once.
        expires: When it expires, likewise; empty for never.
        first: Fence of the first of the messages that it replaced, directly or not; 0 for itself.
        before: Fence of the last message that was confirmed before it, which it replaced; 0 for none.
        before_id: The id of that one.
        waited: Seconds between the reservation of the first and its own.
        beside: Fences of earlier messages that it left alone, which run as well.
        since: Fence from which on these are all; 0 for ``first``.
        begun: Fence of the last message before it that has begun; 0 for none.
        latest: When the last of those which it replaced is due, in seconds since 1970; 0 for at once.
        holder: Host and process of its publisher.
    """

    task_id: str
    eta: str = ""
    expires: str = ""
    first: int = 0
    before: int = 0
    before_id: str = ""
    waited: float = 0.0
    beside: Sequence[int] = ()
    since: int = 0
    begun: int = 0
    latest: float = 0.0
    holder: str = ""

    @classmethod
    def read(cls, text: str) -> WaitingMessage | None:
        """Return the note that a record has; None if it is none."""
        try:
            found = json.loads(text)
            return cls(str(found["id"]), *(found.get(n) or d for n, d in cls._field_defaults.items()))
        except (ValueError, TypeError, KeyError):
            return None

    def write(self) -> str:
        """Return the text for a record."""
        facts = {"id": self.task_id, **{n: v for n, v in zip(self._fields[1:], self[1:], strict=True) if v}}
        return _write(facts)


_write = json.JSONEncoder(separators=(",", ":")).encode

Follow = Callable[[Record, WaitingMessage], tuple[WaitingMessage, str]]


class Reserved(NamedTuple):
    """A slot that was taken for a call.

    Arguments:
        lease: Its lease.
        instead: The record of the reservation that it took over, or None.
        reason: Why it was taken over.
        late: Seconds until the last of the messages is due that it replaced.
    """

    lease: Lease
    instead: Record | None = None
    reason: str = ""
    late: float = 0.0


def is_confirmed(record: Record) -> bool:
    """Return whether the broker has the message that holds a reservation."""
    return record.state is State.IN_PROGRESS and record.remaining > UNCONFIRMED


def reserve(
    store: Store,
    token: Token,
    note: WaitingMessage,
    doubt: Callable[[Record, WaitingMessage], str],
    end: float,
    own: Container[str] = (),
    follow: Follow | None = None,
    *,
    look: bool = False,
) -> Reserved | Record | str:
    """Take a slot for a call that is about to be published, or return the record of the message that stands for it.

    Returns `GATHERS` where it is to be published beside that, and `LATE` if neither was possible in time.

    Arguments:
        store: The store.
        token: What the message will carry.
        note: What its record will say.
        doubt: Returns why a confirmed reservation does not do for this call; "" if it does.
        end: Monotonic time at which the call is published whatever is known.
        own: Owners of the reservations that this process is about to confirm.
        follow: Returns what the record of a message will say that meets another of its kind, where only the newest
            counts; and why the other one runs as well, or `REPLACED` (default: each replaces the other).
        look: Whether a message probably waits (default: no), so that to look costs less than to try.

    Raises:
        StoreError: the store cannot serve.
    """
    began, instead, reason = monotonic(), None, ""
    if token.newest:
        # Once the record is this message's, it no longer has what began before.
        before = store.peek(token.slot)
        note = note._replace(begun=_last_begun(before), latest=_last_due(before, token))
    elif look and (record := _waiting(store, token, doubt)) is not None:
        return record
    known = note
    while monotonic() < end:
        sender = instead.owner if instead is not None else ""
        found = store.acquire(token.claim(UNCONFIRMED, sender=sender, note=known.write()))
        if isinstance(found, Lease):
            return Reserved(found, instead, reason, max(0.0, known.latest - time()) if known.latest else 0.0)
        record = found.record
        met, certain = WaitingMessage.read(record.holder), is_confirmed(record) or record.owner in own
        known = note
        if met is None and certain:
            reason = "unreadable"
        elif met is not None and token.newest:
            known, reason = (note, REPLACED) if follow is None else follow(record, met)
            known = _after(known, record, met, certain=certain, replaces=reason == REPLACED)
            begun, latest = max(note.begun, met.begun), max(note.latest, met.latest, known.latest)
            known = known._replace(begun=begun, latest=latest)
        elif met is not None and certain:
            reason = doubt(record, met)
            if reason in ("", GATHERS):
                return reason or record
        else:
            reason = IS_UNCONFIRMED
            if monotonic() < began + LOOK:
                instead = None
                sleep(LOOK_PAUSE)
                continue
        # A call that is published although a message waits takes its place: else one that is due in an hour would
        # switch uniqueness off until then.
        instead = record
    return LATE


def _after(
    note: WaitingMessage, record: Record, met: WaitingMessage, *, certain: bool, replaces: bool
) -> WaitingMessage:
    """Return the note of a message that replaces the one in the record, or leaves it alone.

    Those which that one replaced are replaced in either case.
    """
    if not replaces and not certain:  # it may not be there to do the work of those which it replaced
        return note
    before, before_id = (record.fence, met.task_id) if certain else (met.before, met.before_id)
    first = met.first or record.fence
    note = note._replace(before=before, before_id=before_id, beside=met.beside, since=met.since or first)
    if replaces:
        return note._replace(first=first, waited=waited(record, met))
    if len(met.beside) < BESIDE:
        return note._replace(beside=[*met.beside, record.fence])
    return note._replace(beside=[*met.beside[1:], record.fence], since=met.beside[0] + 1)


def _waiting(store: Store, token: Token, doubt: Callable[[Record, WaitingMessage], str]) -> Record | None:
    record = store.peek(token.slot)
    met = WaitingMessage.read(record.holder) if record is not None and is_confirmed(record) else None
    return record if record is not None and met is not None and not doubt(record, met) else None


def _last_begun(record: Record | None) -> int:
    """Return the fence of the last message that has begun, as far as the record of a slot has that; 0 for none."""
    if record is None:
        return 0
    if record.state is State.RELEASED:
        return record.fence if record.reason == Reason.STARTED else 0
    met = WaitingMessage.read(record.holder)
    return met.begun if met is not None else 0


def _last_due(record: Record | None, token: Token) -> float:
    """Return when the last of the replaced messages is due for which a record is kept; 0 if it is kept for none."""
    if record is None:
        return 0.0
    if record.state is not State.RELEASED:  # its lease may have run out, so that no claim is answered with it
        met = WaitingMessage.read(record.holder)
        return met.latest if met is not None else 0.0
    longer = record.retention - token.hold
    # Some stores keep a record for a second more.
    return time() + longer if record.retention > KEEP + 2.0 and longer > 2.0 else 0.0


def waited(record: Record, met: WaitingMessage) -> float:
    """Return the seconds since the first of the messages that replaced one another was reserved."""
    return met.waited + record.held_for


def confirm(store: Store, token: Token, wait: float) -> bool:
    """Record that the broker has the message, which is due in ``wait`` seconds; False if its slot is no longer its."""
    return not store.renew([confirmed(token, wait)])


def confirmed(token: Token, wait: float) -> Lease:
    """Return the lease of a message that the broker has and that is due in ``wait`` seconds."""
    return Lease(token.claim(max(0.0, wait) + token.hold + UNCONFIRMED), token.fence)


def release(store: Store, token: Token, reason: Reason) -> bool:
    """Give a slot back, and return whether the message still had it."""
    return store.release(Lease(token.claim(UNCONFIRMED), token.fence), Release(reason))


def replaced_by(store: Store, token: Token) -> str | None:
    """Return the id of the later message that does the work of this one ("" if it has begun), or None: run this one."""
    if not (token.newest and token.fence):
        return None
    record = store.get(token.slot)
    if record is None or record.fence <= token.fence or record.owner == token.owner:
        return None
    if record.state is State.RELEASED:
        return "" if record.reason == Reason.STARTED else None
    met = WaitingMessage.read(record.holder)
    if met is not None and token.fence < met.begun:
        return ""
    if met is None or token.fence < (met.since or met.first or record.fence) or token.fence in met.beside:
        return None  # it replaced no message so old, or left this one alone
    if is_confirmed(record):
        return met.task_id
    # Of those that came after this one, the last that the broker surely has; unless it is this one itself.
    return met.before_id if met.before > token.fence else None


def throttle(store: Store, token: Token, holder: str, *, runs: bool = False) -> float:
    """Hold others back for the period of a throttle from now on; return the seconds that are left of another one.

    A message that runs ends the other one: that may be of a call that was skipped meanwhile, or not quite over by the
    clock of the store.
    """
    period = replace(token, slot=f"{token.slot}:~throttle", newest=False)
    found = store.acquire(period.claim(token.throttle, note=holder))
    if runs and not isinstance(found, Lease):
        found = store.acquire(period.claim(token.throttle, sender=found.record.owner, note=holder))
    return 0.0 if isinstance(found, Lease) else found.record.remaining


class Confirmations:
    """What this process has to confirm: in a thread, many at once, so that no publisher waits for it.

    Until the store knows what the broker has, this process does. What a process does not confirm before it dies ends by
    itself, and the next call is published.

    Arguments:
        breaker: Spares a store that cannot serve.
    """

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self._reset()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._owners: dict[str, None] = {}
        self._waiting: deque[tuple[Store, Token, float]] = deque()
        # All three may be used wherever a time limit rings: none has a lock of Python's.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        #: whether a thread is about to take what waits
        self._awake = False
        #: one; more where several threads published first at once
        self._threads: list[threading.Thread] = []

    def __contains__(self, owner: object) -> bool:
        return owner in self._owners

    def add(self, store: Store, token: Token, wait: float) -> None:
        """Confirm a reservation soon, as `confirm` does."""
        if not self._threads:
            if type(self._wake) is not queue.SimpleQueue:  # gevent has replaced it since, and would wait for ever
                self._wake = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, name="celery-idempotent-confirm", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end
                return
            self._threads.append(thread)
        self._owners[token.owner] = None
        self._waiting.append((store, token, wait))
        if not self._awake:  # to wake a thread takes as long as the rest of this
            self._awake = True
            self._wake.put(True)

    def close(self) -> None:
        """Confirm at once what is left, as long as a publisher would wait for it."""
        end = monotonic() + BUDGET
        threads, self._threads = self._threads, []
        for _ in threads:
            self._wake.put(False)
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))

    def _run(self) -> None:
        go_on = True
        while go_on:
            go_on = self._wake.get()
            if go_on:
                with suppress(Empty):
                    go_on = self._wake.get(timeout=GATHER)
            self._awake = False  # before it looks: what comes after that wakes it again
            self._confirm()

    def _confirm(self) -> None:
        leases: dict[Store, list[Lease]] = defaultdict(list)
        with suppress(IndexError):
            while True:
                store, token, wait = self._waiting.popleft()
                leases[store].append(confirmed(token, wait))
        for store, sent in leases.items():
            try:
                self.breaker.call(store, store.renew, sent)
            except Exception as error:  # noqa: BLE001 - they end by themselves
                logger.info("%d reservations could not be confirmed: %r", len(sent), error)
            for lease in sent:
                self._owners.pop(lease.owner, None)


class _Threads:
    """Threads of this process, which ends without them: what they wait for may never answer.

    A forked child makes its own. None has a lock of Python's, as in `Confirmations`.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: one entry for each thread that waits for a call, and for each that may yet be started
        self._idle: deque[bool] = deque()
        self._unstarted = deque([True] * THREADS)

    @property
    def inside(self) -> bool:
        """Whether this thread is one of them."""
        return hasattr(self._local, "inside")

    def submit(self, call: Callable[[], T]) -> Future[T]:
        if self._pid != os.getpid() or type(self._calls) is not queue.SimpleQueue:  # gevent has replaced it since
            self._reset()
        future: Future[T] = Future()
        self._calls.put(partial(_answer, future, call))
        if not _take(self._idle) and _take(self._unstarted):
            work = partial(self._work, self._calls, self._idle)
            try:
                threading.Thread(target=work, name="celery-idempotent-publish", daemon=True).start()
            except RuntimeError:
                self._unstarted.append(True)
                future.cancel()
                raise
        return future

    def _work(self, calls: queue.SimpleQueue[Callable[[], None]], idle: deque[bool]) -> None:
        self._local.inside = True
        while True:
            try:
                call = calls.get_nowait()
            except Empty:
                idle.append(True)
                call = calls.get()
            call()
            del call  # until the next one comes


def _take(entries: deque[bool]) -> bool:
    try:
        return entries.pop()
    except IndexError:  # another thread may have taken the last one
        return False


def _answer(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():  # its caller waits no longer
        return
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        future.set_exception(error)
    else:
        future.set_result(found)


_threads = _Threads()


def within(seconds: float, call: Callable[[], T], what: str = "store") -> T:
    """Return what a call of a store returns, if it does so in time; a call that has begun goes on in its thread.

    A call within another one has the time of that.

    Arguments:
        seconds: What it may take.
        call: The call.
        what: Whose call it is, for the error.

    Raises:
        StoreUnreachable: it does not.
    """
    if _threads.inside:  # to wait there for one of the others may be to wait for oneself
        return call()
    try:
        future = _threads.submit(call)
        try:
            return future.result(seconds)
        finally:
            future.cancel()  # it does nothing to what has begun
    except Late:
        raise StoreUnreachable(f"The {what} did not answer a publisher within {seconds:g} s.") from None
    except RuntimeError as error:  # the interpreter is about to end, and starts no threads
        raise StoreUnreachable(f"No thread waits for the {what} ({error}).") from error
