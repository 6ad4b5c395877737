"""The real code of a delivery, cut into the steps at which others may come between.

A program is a greenlet in which the library's own code runs: `CeleryDelivery` with `Guard.run` below it, or what a
worker's main process does for a child that died. It stops wherever it asks the store, sleeps, runs the body or
publishes. Where it has stopped is a *point*: the stack of its frames, each with its line. The model knows
points by number, and what a point does with an input is found out by running the real code up to it again, once.

What is written here in the library's place, because it is I/O, is `Delivery.body` (of `IdempotentTask.retry`: check,
publish, give up), `_publish_copy`, and what Celery makes of a delivery's end; `test_real.py` holds them to the library.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from celery.exceptions import Ignore, Reject, Retry
from greenlet import GreenletExit, getcurrent, greenlet

from celery_idempotent.celery import canvas, delivery, message
from celery_idempotent.core import backoff, breaker, guard, heartbeat, lease
from celery_idempotent.core.history import DeliveryEvents
from celery_idempotent.core.policy import Policy
from celery_idempotent.core.results import Kind, Payload
from celery_idempotent.errors import IdempotencyError, LeaseLost, StoreError, StoreUnreachable
from celery_idempotent.stores.records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from tests.support.unit.scripted import ScriptedStore

#: Time passes in ticks. A lease lasts for two: it is trusted for one and a part, and renewed after a part of one.
TICK, LEASE_TICKS = 10.0, 2
LEASE_TTL, KEEP_TTL = TICK * LEASE_TICKS, 1000.0
RETRY_TICKS = 1
MAX_CRASHES = 2
_START = 10_000.0
#: Longer than anything is patient.
_LATE = 1000.0
_FENCE, _OTHER_FENCE = 7, 5
#: What is waited for by those to whom their lease is nothing any more.
NO_HOLD = (("copy",), ("get",), ("mark_dispatched",))
#: Requests whose answers are judged by the time since they were made.
AGED = ("acquire", "renew")

clock = SimpleNamespace(now=_START)


class Hold(NamedTuple):
    """What a holder believes of its lease: for how many ticks it trusts it, when it renews it, whether it is lost."""

    trust: int
    due: int
    lost: bool


class Point(NamedTuple):
    """Where a program has stopped.

    Arguments:
        what: What it waits for: ``("call", verb, ...)``, ``("sleep",)``, ``("body",)``, ``("publish", kind)``,
            ``("dispatch", whose)`` or ``("end", how, ...)``.
        in_body: Whether the body is running.
        watched: Whether its lease is being renewed.
        unsettled: Whether it was reported that the result could not be recorded.
    """

    what: tuple[Any, ...]
    in_body: bool
    watched: bool
    unsettled: bool


class Boom(Exception):
    """What a body raises."""


# -- a program ---------------------------------------------------------------------------------------------------------


class Program:
    """One delivery, or what a main process does for a dead child.

    Arguments:
        kind: ``("delivery", retries, whether it has callbacks)`` or ``("reaper",)``.
        claim: What it asks for.
        own: What its body returns.
    """

    def __init__(self, kind: tuple[Any, ...], claim: Claim, own: str = "own") -> None:
        self.kind, self.claim, self.own = kind, claim, own
        self.held: Any = None
        self.heartbeat: Any = None
        self.emitted: list[str] = []
        self.in_body = False
        self.told: list[str] = []
        self.dispatches = ""
        self.dead = False
        self.stack: tuple[Any, ...] = ()
        self.greenlet = greenlet(self._run)
        self.greenlet.program = self
        self.what = self.greenlet.switch()

    # -- seen from outside ---------------------------------------------------------------------------------------------

    def resume(self, answer: Any) -> None:
        """Let it go on, to where it stops next."""
        self.what = self.greenlet.switch(answer)

    def kill(self) -> None:
        """End it; what it does in passing has no effect."""
        self.dead = True
        self.greenlet.throw(GreenletExit)

    @property
    def hold(self) -> Hold | None:
        """What it believes of its lease, as long as that can make a difference."""
        if (
            self.held is None
            or not self.held.fence
            or self.what[0] in ("end", "dispatch")
            or described(self.what, self.own)[1:] in NO_HOLD
        ):
            return None
        hold = read_hold(self.held)
        return hold if self.point.watched else hold._replace(due=0)

    @hold.setter
    def hold(self, hold: Hold) -> None:
        write_hold(self.held, hold)

    @property
    def point(self) -> Point:
        """Where it is."""
        watched = self.held is not None and self.held in self.heartbeat.holdings()
        body = self.in_body and self.what[0] != "publish"
        return Point(described(self.what, self.own), body, watched, "SettleFailed" in self.emitted)

    # -- what runs within it -------------------------------------------------------------------------------------------

    def _run(self) -> tuple[Any, ...]:
        return self._reap() if self.kind[0] == "reaper" else self._deliver()

    def _reap(self) -> tuple[Any, ...]:
        """As `IdempotentRequest._release` and Celery's ``on_failure`` after it."""
        with suppress(IdempotencyError):
            lease.release(Wire(), self.claim, Reason.CRASHED)
        return ("end", "requeue")

    def _deliver(self) -> tuple[Any, ...]:
        """As Celery's tracer, around the delivery."""
        own = Delivery(self)
        try:
            value = own._answer()
        except Retry:
            return ("end", "retried")
        except Reject as rejected:
            return ("end", "requeue" if rejected.requeue else "rejected")
        except Ignore:
            return ("end", "ignored")
        except Exception as error:  # noqa: BLE001 - every failure is the caller's
            return ("end", "failed", type(error).__name__)
        if self.dispatches:
            suspend("dispatch", self.dispatches)
            with suppress(StoreError):
                own.binding.guard.store.mark_dispatched(self.claim.key, self.claim.task_id)
        return ("end", "value", value)


def suspend(*what: Any) -> Any:
    """Stop here; return what comes, or raise it."""
    program = getcurrent().program
    if program.dead:
        raise GreenletExit
    program.stack = _positions()
    answer = getcurrent().parent.switch(what)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _positions() -> tuple[Any, ...]:
    frame, found = sys._getframe(2), []
    while frame is not None and frame.f_code is not Program._run.__code__:
        found.append((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class Wire(ScriptedStore):
    """The way to the store: each request stops its program."""

    def _do(self, verb: str, *args: Any, **_: Any) -> Any:
        return suspend("call", verb, *args)


class _Codec:
    """Values are their own payloads."""

    @staticmethod
    def encode_value(value: object, **_: Any) -> bytes:
        return str(value).encode()

    @staticmethod
    def decode(payload: bytes, **_: Any) -> Payload:
        return Payload(Kind.VALUE, payload.decode())


class Delivery(delivery.CeleryDelivery):
    """`CeleryDelivery` of a message that nothing but the model has."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.came = clock.now
        claim = program.claim
        retries = program.kind[1]
        guarded = guard.Guard(Wire(), Policy(), _Codec(), heartbeat.Heartbeat(), breaker.Breaker())
        program.heartbeat = guarded.heartbeat
        self.binding = SimpleNamespace(policy=guarded.policy, guard=guarded, is_final=lambda error: False)
        self.task = SimpleNamespace(name="task", acks_late=True, app=_App(), backend=None)
        self.request = SimpleNamespace(
            id=claim.task_id, retries=retries, is_eager=False, expires=None, callbacks=None, chain=None, chord=None,
            group=None, errbacks=None,
        )  # fmt: skip
        self.state = message.DeliveryState(message.MessageHeaders(claim.owner, copy=claim.copy, token=claim.token))
        events = DeliveryEvents(claim)
        self.identify(events)
        self.emit = lambda kind, **_: program.emitted.append(kind.__name__)

    def _free_if_failed(self, busy: Any) -> bool:
        """No result backend reports a failure."""
        return False

    def body(self, held: Any) -> Any:
        """Do as the model says, as a task's body would."""
        program = self.program
        program.held, program.in_body = held, True
        self.state.holding = held
        try:
            while True:
                told = suspend("body")
                program.told = [*program.told, told] if told != "checks" else program.told
                if told == "checks":
                    try:
                        held.check()
                    except StoreError as error:
                        raise Boom from error
                elif told == "raises":
                    raise Boom
                elif told == "retries":
                    with suppress(StoreError):  # as `IdempotentTask._check_lease`
                        held.check()
                    program.in_body = False
                    self._publish_retry()
                    raise Retry(when=RETRY_TICKS * TICK)
                else:
                    return program.own
        finally:
            program.in_body = False

    def _publish_retry(self) -> None:
        try:
            suspend("publish", "retry")
        except OSError as error:
            raise delivery.put_back("The broker took no retry.") from error


class _App:
    def connection_for_write(self) -> Any:
        return SimpleNamespace(connection_errors=())


def _publish_copy(task: Any, request: Any, identity: Any, delay: float) -> int:
    suspend("publish", "copy")
    return int(identity.copy) + 1


def _assign_callback_ids(request: Any, app: Any, fence: int) -> None:
    program = getcurrent().program
    if program.kind[2]:
        program.dispatches = {_FENCE: "own", _OTHER_FENCE: "theirs"}.get(fence, f"fence {fence}")


def _clear_continuations(task: Any, request: Any) -> None:
    getcurrent().program.dispatches = ""


# -- the clock ---------------------------------------------------------------------------------------------------------


def ticks(seconds: float) -> int:
    """Return the number of ticks after which so many seconds are over."""
    return min(9, max(0, ceil(seconds / TICK)))


def read_hold(held: Any) -> Hold:
    """Return what a holder believes, in ticks from now."""
    due = held.due - clock.now
    # What is due within a pause of the heartbeat's is due now: no tick need pass.
    return Hold(ticks(held.deadline - clock.now), ticks(due - heartbeat.RETRY_PAUSE), held.lost)


def write_hold(held: Any, hold: Hold) -> None:
    """Have a holder believe this."""
    held.deadline = clock.now + hold.trust * TICK - (2.0 if hold.trust else 0.0)
    held.due = clock.now + hold.due * TICK - 3.0
    held.lost = hold.lost


class NoThread:
    """The thread of a heartbeat, whose steps the model takes."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def is_alive(self) -> bool:
        return True


@contextmanager
def real_code() -> Iterator[None]:
    """Have the library's modules on the clock of the model, and stop where they would wait."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, heartbeat, lease, backoff, breaker):
            patch.setattr(module, "monotonic", lambda: clock.now)
        for module in (backoff, delivery):
            patch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: suspend("sleep")))
        patch.setattr(backoff, "random", SimpleNamespace(uniform=lambda low, high: high))
        patch.setattr(backoff, "LOOK_EVERY", float("inf"))  # a long pause is one
        patch.setattr(breaker, "PROBE_EVERY", 0.0)
        patch.setattr(heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Thread": NoThread}))
        patch.setattr(message, "publish_copy", _publish_copy)
        patch.setattr(message, "copy_delay", lambda app, copy, remaining: 1.0)
        patch.setattr(canvas, "assign_callback_ids", _assign_callback_ids)
        patch.setattr(canvas, "clear_continuations", _clear_continuations)
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# -- inputs and outputs, without names ---------------------------------------------------------------------------------


def described(what: tuple[Any, ...], own: str) -> tuple[Any, ...]:
    """Return what a program waits for, as the model has it."""
    if what[:2] == ("end", "value"):
        return ("end", "value", "own" if what[2] == own else "theirs" if isinstance(what[2], str) else repr(what[2]))
    if what[0] != "call":
        return what
    match what[1], what[2:]:
        case "settle", (Lease(), Outcome(state, payload), *_):
            return ("call", "settle", state.value, b"own" if payload.decode() == own else payload)
        case "release", (Lease(), Release(reason, retry_in, next_attempt)):
            return ("call", "release", reason.value, ticks(retry_in), next_attempt)
        case verb, _:
            return ("call", verb)


class Seen(NamedTuple):
    """A record, as far as a program can tell records apart."""

    state: str
    my_task: bool
    my_owner: bool
    done: bool = False
    dispatched: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is the record of a lease that the asker holds."""
        return self.my_owner and self.state == State.IN_PROGRESS


def answer_for(what: tuple[Any, ...], told: tuple[Any, ...], claim: Claim) -> Any:
    """Return the real answer to what a program waits for: of the store, of the broker, or none."""
    if told[0] == "error":
        return StoreUnreachable("the store does not answer") if what[0] == "call" else OSError("no broker")
    if what[0] != "call":
        return told[0]
    match what[1], told:
        case "acquire", ("lease", taken_over):
            return Lease(claim, _FENCE, taken_over=taken_over)
        case "acquire", ("refused", verdict, seen):
            return Refusal(Verdict(verdict), _record(seen, claim))
        case "get", ("found", None):
            return None
        case "get", ("found", seen):
            return _record(seen, claim)
        case "renew", (good,):
            return [] if good else list(what[2])
        case "settle", (good,):
            return None if good else LeaseLost("taken over")
        case (("release" | "mark_dispatched"), (good,)):
            return good
    raise AssertionError((what, told))


def _record(seen: Seen, claim: Claim) -> Record:
    return Record(
        claim.key,
        State(seen.state),
        fence=_OTHER_FENCE,
        owner=claim.owner if seen.my_owner else "another",
        task_id=claim.task_id if seen.my_task else "another",
        reason=Reason.DONE.value if seen.done else "",
        payload=b"theirs" if seen.state == State.COMPLETED else b"",
        remaining=TICK,
        dispatched=frozenset([claim.task_id]) if seen.dispatched else frozenset(),
    )


# -- points, by number -------------------------------------------------------------------------------------------------

Input = tuple[tuple[Any, ...], int, "Hold | None", bool]


class Points:
    """The points that were found, and what leads from one to the next."""

    def __init__(self) -> None:
        self.known: list[Point] = []
        self._paths: list[tuple[tuple[Any, ...], tuple[Input, ...]]] = []
        self._numbers: dict[Any, int] = {}
        self._steps: dict[Any, tuple[int, Hold | None, tuple[str, ...]]] = {}
        self._starts: dict[tuple[Any, ...], int] = {}
        self._beats: dict[Any, Any] = {}
        #: paths that led to a point that was known, for a test that they behave alike
        self.merged: list[tuple[int, tuple[Any, ...], tuple[Input, ...]]] = []

    def start(self, kind: tuple[Any, ...]) -> int:
        """Return the first point of a program."""
        if kind not in self._starts:
            program = self.replay(kind, ())
            self._starts[kind] = self._number(program, kind, ())
            program.kill()
        return self._starts[kind]

    def step(
        self, point: int, told: tuple[Any, ...], age: int, hold: Hold | None, *, late: bool = False
    ) -> tuple[int, Hold | None, tuple[str, ...]]:
        """Return what follows from an input: the next point, what the holder believes then, and the events.

        Arguments:
            point: Where the program is.
            told: The input.
            age: Ticks since it came to this point.
            hold: What its holder believes now.
            late: Whether more time has passed than it is patient.
        """
        asked = (point, told, age, hold, late)
        if asked not in self._steps:
            kind, path = self._paths[point]
            path = (*path, (told, age, hold, late))
            program = self.replay(kind, path)
            self._steps[asked] = (
                self._number(program, kind, path),
                program.hold,
                tuple(program.emitted[program.before :]),
            )
            program.kill()
        return self._steps[asked]

    def replay(self, kind: tuple[Any, ...], path: tuple[Input, ...]) -> Any:
        """Run a program along a path, and return it."""
        clock.now = _START
        program: Any = Program(kind, template(kind))
        program.before = 0
        for told, age, hold, late in path:
            clock.now += age * TICK + (_LATE if late else 0.0)
            if hold is not None and program.held is not None:
                program.hold = hold
            program.before = len(program.emitted)
            program.resume(answer_for(program.what, told, program.claim))
        return program

    def _number(self, program: Program, kind: tuple[Any, ...], path: tuple[Input, ...]) -> int:
        key = self.key(program)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.known)
            self.known.append(program.point)
            self._paths.append((kind, path))
        elif self._paths[number] != (kind, path) and len(self.merged) < 5000:
            self.merged.append((number, kind, path))
        return number

    @staticmethod
    def key(program: Program) -> Any:
        """Return what makes two programs alike: where they are, and what their bodies did."""
        stack = () if program.what[0] == "end" else program.stack
        return (program.kind, program.point, stack, tuple(program.told), program.dispatches)

    # -- the heartbeat's -----------------------------------------------------------------------------------------------

    def sends(self, hold: Hold) -> bool:
        """Return whether the heartbeat of a lease that it watches asks the store now."""
        if hold not in self._beats:
            beat = Beat(hold)
            self._beats[hold] = not beat.greenlet.dead
            beat.kill()
        found: bool = self._beats[hold]
        return found

    def renewed(self, hold: Hold, watched: bool, age: int, told: tuple[Any, ...]) -> Hold:
        """Return what the holder believes after an answer to its heartbeat, which asked some ticks ago."""
        asked = (hold, watched, age, told)
        if asked not in self._beats:
            beat = Beat(Hold(1, 0, False))
            clock.now += age * TICK
            write_hold(beat.held, hold)
            if not watched:
                beat.server.holdings.clear()
            error = StoreUnreachable("the store does not answer")
            beat.greenlet.switch(error if told == ("error",) else ([] if told[0] else [beat.held.lease]))
            self._beats[asked] = read_hold(beat.held)
            beat.kill()
        found: Hold = self._beats[asked]
        return found


class Beat:
    """One beat of the real heartbeat, for one lease."""

    def __init__(self, hold: Hold) -> None:
        clock.now = _START
        self.dead = False
        store = Wire()
        self.held = lease.HeldLease(store, Lease(template(("delivery", 0, False)), _FENCE), clock.now)
        write_hold(self.held, hold)
        self.server = heartbeat._Server(heartbeat.Heartbeat(), (store, ""))
        self.server.holdings[id(self.held)] = self.held
        self.greenlet = greenlet(partial(self.server.beat, clock.now))
        self.greenlet.program = self
        self.greenlet.switch()

    def kill(self) -> None:
        self.dead = True
        if self.greenlet:
            self.greenlet.throw(GreenletExit)


def template(kind: tuple[Any, ...]) -> Claim:
    """Return the claim of a program that is run to find out what it does."""
    retries = kind[1] if kind[0] == "delivery" else 0
    return Claim("key", "me", LEASE_TTL, KEEP_TTL, task_id="mine", retries=retries, max_crashes=MAX_CRASHES)
