"""The law of unique publishing as a state machine: whatever happens between any two steps, no call is swallowed.

Publishers, a broker and workers take their steps in any order, and die, pause and lose what they had in between. After
each call that returned, a body of its slot must begin (or end, for ``until="done"``) that began after it. Excused is
what the broker lost, for which only `for` is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from celery_idempotent.core import reservations
from celery_idempotent.core.reservations import BUDGET, Reserved, Token, WaitingMessage
from celery_idempotent.stores import Reason
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import Record, new_owner
from tests.support.unit.scripted import Clock

KINDS = {"start": Token("idem:~unique:start", ""), "done": Token("idem:~unique:done", "", until="done")}
KINDS["newest"] = Token("idem:~unique:newest", "", newest=True)


@dataclass(eq=False)
class Message:
    """A message, from the moment at which its publisher reserves."""

    id: str
    kind: str
    token: Token
    #: the step at which it was called
    called: int
    #: whether it expires, so that its caller does not insist on its run
    expires: bool = False
    state: str = "sending"


@dataclass(eq=False)
class Obligation:
    """A call that has returned, and was made at this step; `cover` is the message that is to do its work."""

    kind: str
    step: int
    cover: Message
    expires: bool = False


class Law(RuleBasedStateMachine):
    """See the module."""

    messages = Bundle("messages")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock().install(self.patch)
        self.patch.setattr(reservations, "monotonic", self.clock)
        self.patch.setattr(reservations, "sleep", self.clock.sleep)
        self.store = MemoryStore()
        self.all: dict[str, Message] = {}
        self.obligations: list[Obligation] = []
        self.step = 0
        #: the steps at which bodies began, or ended
        self.heard: list[int] = []
        self.kind = "start"

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.patch.undo()

    # -- publishers ----------------------------------------------------------------------------------------------------

    @initialize(kind=st.sampled_from(["start", "done", "newest", "newest"]))
    def choose(self, kind: str) -> None:
        """All that happens is about one slot."""
        self.kind = kind

    @rule(
        target=messages,
        steps=st.sampled_from([0, 1, 2, 2]),
        expires=st.sampled_from([False, False, True]),
        look=st.booleans(),
    )
    def call(self, steps: int, expires: bool, look: bool) -> Message:
        """Reserve, and mostly publish and confirm at once; a call that is skipped returns."""
        message = self.reserve(self.kind, expires, look)
        if steps > 0:
            self.publish(message)
        if steps > 1:
            self.confirm(message)
        return message

    def reserve(self, kind: str, expires: bool, look: bool) -> Message:
        self.step += 1
        message = Message(f"m{self.step}", kind, self.token(kind), self.step, expires)
        self.all[message.id] = message
        note = WaitingMessage(message.id, expires="soon" if expires else "")

        def doubt(_: Record, met: WaitingMessage) -> str:
            return "expires sooner" if met.expires and not expires else ""

        def follow(_: Record, met: WaitingMessage) -> tuple[WaitingMessage, str]:
            return note, "expires sooner" if expires and not met.expires else reservations.REPLACED

        end = self.clock() + BUDGET
        found = reservations.reserve(self.store, message.token, note, doubt, end, follow=follow, look=look)
        if isinstance(found, Record):
            met = WaitingMessage.read(found.holder)
            assert met is not None
            self.obligations.append(Obligation(kind, self.step, self.all[met.task_id], expires))
            message.state = "skipped"
            return message
        assert isinstance(found, Reserved)
        message.token = self.token(kind, message.token.owner, found.lease.fence)
        return message

    def token(self, kind: str, owner: str = "", fence: int = 0) -> Token:
        like = KINDS[kind]
        return Token(like.slot, owner or new_owner(), fence, like.until, like.hold, like.newest)

    @rule(message=messages)
    def publish(self, message: Message) -> None:
        """The broker takes it, perhaps long after its publisher has reserved."""
        if message.state == "sending":
            message.state = "queued"
            self.obligations.append(Obligation(message.kind, message.called, message, message.expires))

    @rule(message=messages)
    def confirm(self, message: Message) -> None:
        """Its publisher hears so, perhaps when it has run long ago."""
        if message.state not in ("sending", "skipped"):
            reservations.confirm(self.store, message.token, 0.0)

    # -- workers -------------------------------------------------------------------------------------------------------

    @rule(message=messages, to_its_end=st.booleans())
    def work(self, message: Message, to_its_end: bool) -> None:
        """A worker takes it, and ends it at once or later."""
        self.begin(message)
        if to_its_end:
            self.end(message)

    def begin(self, message: Message) -> None:
        """Begin it; one that a later message replaces is dropped."""
        if message.state != "queued":
            return
        self.step += 1
        later = reservations.replaced_by(self.store, message.token)
        if later is not None:
            message.state = "dropped"
            for obligation in self.obligations:
                if obligation.cover is message and later:
                    obligation.cover = self.all[later]
            return
        if message.token.until == "start":
            reservations.release(self.store, message.token, Reason.STARTED)
        message.state = "running"
        if message.token.until == "start":
            self.heard.append(self.step)

    @rule(message=messages)
    def end(self, message: Message) -> None:
        if message.state == "running":
            self.step += 1
            message.state = "ended"
            if message.token.until == "done":
                reservations.release(self.store, message.token, Reason.DONE)
                self.heard.append(self.step)

    def is_met(self, obligation: Obligation) -> bool:
        """Whether a body began, or ended, after the call was made: it has seen the change before it."""
        return any(step > obligation.step for step in self.heard)

    @rule(message=messages)
    def beat(self, message: Message) -> None:
        """A body that holds its reservation until its end renews it."""
        if message.state == "running" and message.token.until == "done":
            reservations.confirm(self.store, message.token, 0.0)

    @rule(message=messages)
    def die(self, message: Message) -> None:
        """Its worker is killed, and the broker delivers it again."""
        if message.state == "running":
            message.state = "queued"

    @rule(message=messages)
    def expire(self, message: Message) -> None:
        """Nothing is done for it, and those that called it have allowed for that."""
        if message.state == "queued" and message.expires:
            self.step += 1
            message.state = "expired"
            reservations.release(self.store, message.token, Reason.REVOKED)
            self.obligations = [o for o in self.obligations if not (o.cover is message and o.expires)]

    @rule(message=messages)
    def revoke(self, message: Message) -> None:
        """An operator does not want it: its callers have nothing to wait for."""
        if message.state == "queued":
            self.step += 1
            message.state = "revoked"
            reservations.release(self.store, message.token, Reason.REVOKED)

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    @rule(message=consumes(messages))
    def lose(self, message: Message) -> None:
        """The broker loses it, or its publisher dies before it has published."""
        message.state = {"sending": "dead", "queued": "lost"}.get(message.state, message.state)

    @rule()
    def wipe(self) -> None:
        """The store forgets the slot."""
        self.store.delete(KINDS[self.kind].slot)

    @rule(seconds=st.sampled_from([0.01, 0.3, 5.0, 11.0, 61.0, 3700.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- the law -------------------------------------------------------------------------------------------------------

    @invariant()
    def a_call_is_skipped_only_for_a_message_that_is_there(self) -> None:
        """What it is skipped for, or replaced by, was published."""
        for obligation in self.obligations:
            if not self.is_met(obligation):
                assert obligation.cover.state not in ("sending", "dead", "skipped"), obligation

    def drain(self) -> None:
        """Let everything that is queued run to its end; then see that each call was heard."""
        for _ in range(3):
            for message in sorted(self.all.values(), key=lambda message: int(message.id[1:])):
                if message.state == "queued":
                    self.begin(message)
                if message.state == "running":
                    self.end(message)
        excused = {"lost", "revoked"}
        swallowed = [o for o in self.obligations if not self.is_met(o) and o.cover.state not in excused]
        assert not swallowed, swallowed


TestLaw: Any = Law.TestCase
TestLaw.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
