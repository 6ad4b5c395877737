"""A clock that moves when it is told to, and a store that fails, answers and blocks when it is told to."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import events
from celery_idempotent.core import backoff, breaker, guard, heartbeat
from celery_idempotent.core import lease as holding
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.events import Event
from celery_idempotent.stores import Claim, Lease, Outcome, Record, Refusal, Release, State, memory
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.memory import MemoryStore

CLOCKED: tuple[ModuleType, ...] = (guard, heartbeat, holding, backoff, breaker)
#: How long a test waits for another thread before it fails, in seconds.
PROMPTLY = 10.0


class Clock:
    """The clock of the core and of the store in memory: it stands still but for `advance` and what the core sleeps.

    `slept` are the pauses that were made. What was planned with `at` happens on the way, and may raise.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        for module in CLOCKED:
            monkeypatch.setattr(module, "monotonic", self)
        monkeypatch.setattr(memory, "time", self)
        monkeypatch.setattr(backoff, "time", SimpleNamespace(sleep=self.sleep))
        # Pauses are shortened by chance; here they are not.
        monkeypatch.setattr(backoff, "random", SimpleNamespace(uniform=lambda low, high: high))
        return self

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do this when so many seconds from now have passed."""
        self._plans.append((self.now + seconds, action))
        self._plans.sort(key=lambda plan: plan[0])

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._plans and self._plans[0][0] <= end:
            self.now, action = self._plans.pop(0)
            action()
        self.now = end


class Door:
    """Where a call of a blocked verb stands until somebody opens."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self.entered.set()
        assert self._opened.wait(PROMPTLY), "nobody opened the door"


Call = Callable[[], Any]
Step = Callable[[Call], Any]


class ScriptedStore(Store):
    """A memory store whose next calls go as a test says.

    Each of `fail`, `lose_reply`, `answer`, `before`, `after` and `block` speaks of the next call of one verb that
    nothing was said of yet; other calls go to the memory store. `down` fails the verbs it names until `up`.
    """

    def __init__(self, inner: Store | None = None) -> None:
        self.inner = inner or MemoryStore()
        #: every call in order: the verb, and its arguments
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._steps: dict[str, deque[Step]] = defaultdict(deque)
        self._down: dict[str, BaseException] = {}

    # -- the script ----------------------------------------------------------------------------------------------------

    def fail(self, verb: str, *errors: BaseException, times: int = 1) -> None:
        """Let the next calls raise, and do nothing."""
        for error in errors or [StoreUnreachable(f"no {verb}") for _ in range(times)]:
            self._then(verb, lambda call, error=error: _raise(error))

    def lose_reply(self, verb: str, error: BaseException | None = None) -> None:
        """Let the next call do its work, and raise."""
        self.after(verb, lambda: _raise(error or StoreUnreachable(f"lost the reply to {verb}")))

    def answer(self, verb: str, *answers: Any) -> None:
        """Let the next calls return this, and do nothing."""
        for answer in answers:
            self._then(verb, lambda call, answer=answer: answer)

    def before(self, verb: str, action: Callable[[], object]) -> None:
        """Let something happen before the next call."""
        self._then(verb, lambda call: (action(), call())[1])

    def after(self, verb: str, action: Callable[[], object]) -> None:
        """Let something happen between the next call and its reply."""
        self._then(verb, lambda call: (call(), action())[0])

    def block(self, verb: str) -> Door:
        """Let the next call stand at a door before it does its work."""
        door = Door()
        self.before(verb, door.pass_through)
        return door

    def down(self, *verbs: str, error: BaseException | None = None) -> None:
        """Let every call of these verbs raise until `up`; of all verbs, if none is named."""
        for verb in verbs or ("acquire", "renew", "settle", "release", "mark_dispatched", "get", "ping"):
            self._down[verb] = error or StoreUnreachable("the store is down")

    def up(self) -> None:
        self._down.clear()

    def calm(self) -> None:
        """Forget what was to happen to the next calls."""
        self.up()
        self._steps.clear()

    def count(self, verb: str) -> int:
        """Return how often a verb was called."""
        return [name for name, _ in self.calls].count(verb)

    def _then(self, verb: str, step: Step) -> None:
        self._steps[verb].append(step)

    def _do(self, verb: str, *args: Any, **options: Any) -> Any:
        self.calls.append((verb, (*args, *options.values())))

        def call() -> Any:
            return getattr(self.inner, verb)(*args, **options)

        if verb in self._down:
            raise self._down[verb]
        return self._steps[verb].popleft()(call) if self._steps[verb] else call()

    # -- the contract --------------------------------------------------------------------------------------------------

    def acquire(self, claim: Claim) -> Lease | Refusal:
        return self._do("acquire", claim)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        return self._do("renew", list(leases))

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        return self._do("settle", lease, outcome, ttl=ttl)

    def release(self, lease: Lease, release: Release) -> bool:
        return self._do("release", lease, release)

    def mark_shutdown(self, lease: Lease) -> bool:
        return self._do("mark_shutdown", lease)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        return self._do("mark_dispatched", key, task_id)

    def get(self, key: str) -> Record | None:
        return self._do("get", key)

    def delete(self, key: str) -> bool:
        return self._do("delete", key)

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        return self._do("scan", prefix=prefix, state=state)

    def ping(self) -> None:
        return self._do("ping")


def _raise(error: BaseException) -> None:
    raise error


def listening() -> Iterator[list[Event]]:
    """Yield a list to which every event is added; the body of a fixture."""
    heard: list[Event] = []
    events.add_hook(heard.append)
    yield heard
    with suppress(ValueError):
        events.remove_hook(heard.append)
