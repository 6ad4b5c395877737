"""The proof that a task takes effect once, whenever its worker dies."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.binding import Binding
from ..core.guard import Delivery
from ..core.lease import HeldLease, current_lease
from ..errors import ConfigurationError, Conflict
from ..functions import FunctionBinding
from .deliveries import Point, binding_of, crash_at, is_of, redelivery
from .override import CrashPoint, fresh, is_active, override, override_store

if TYPE_CHECKING:
    from rq import Queue

#: The order in which they are tried: first that which is the task's own to close, where the first effect is seen.
ORDER: tuple[Point, ...] = ("after_effect", "after_settle", "before_effect")

MEANING = {
    "before_effect": "its lease is taken, and its body has not begun",
    "after_effect": "its body has returned, and its result is not recorded yet",
    "after_settle": "its result is recorded, and its message not acked yet",
}
ADVICE = {
    "before_effect": "No body had run by then. What has an effect before it is not guarded: before_start, a signal, "
    "the code that publishes the task.",
    "after_effect": "No library can close this window from outside the body; the task can:\n"
    '- pass self.lease.derived_key("charge") (in a function: current_lease()) as the idempotency key of the service\n'
    "  that has the effect, which then refuses the second; or\n"
    "- have the effect in the database of the store, and call self.lease.settle(result, using=...) in the same\n"
    "  transaction. The page on exactly-once effects has both.",
    "after_settle": "No body had to run any more. What has an effect beside it is not guarded: on_success, a signal, "
    "a callback.",
}
#: The advice where nothing is remembered.
FORGETS = (
    "The task has result_ttl=0, so that nothing is remembered once it has run. Give it a result_ttl if its messages "
    "are to take effect once."
)


def assert_takes_effect_once(
    target: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    effects: Callable[[], Any],
    queue: Queue | None = None,
) -> None:
    """Assert that a task takes effect once, whether its worker dies before its effect, after it, or after its record.

    It is delivered three times, each time as if for the first time, cut off at another point of `crash_at`, delivered
    again, and published again. A task with a key is delivered another three times, and published again before it is
    delivered again. Everything runs in this process, on the store of `override_store`, or on an empty one in memory.

    Arguments:
        target: A task, a signature of one, a function with ``@idempotent`` (a coroutine function too, where no loop
            runs), or the function of a job.
        args: The positional arguments of the delivery; each gets lists, mappings and sets of its own.
        kwargs: The keyword arguments of the delivery, in the same way.
        effects: Returns what the task has done so far: a count, a list, rows as tuples; anything that can be compared.
        queue: For the function of a job: a queue with ``is_async=False``.

    Raises:
        AssertionError: it takes effect more than once, or has none. The message names the window and what closes it.
        ConfigurationError: nothing guards the target, an argument of this function is of another type, or the target is
            a coroutine function and a loop runs.
        Exception: what the task raises.
    """
    __tracebackhide__ = True  # pytest shows the user's line, and not these
    if not callable(effects):
        raise ConfigurationError(
            f"Expected effects to be a function that returns what the task has done, got {effects!r}. Write "
            "effects=lambda: len(gateway.charges)."
        )
    if isinstance(args, (str, bytes)):
        raise ConfigurationError(f"Expected the positional arguments in a tuple, got {args!r}. Write ({args!r},).")
    subject = _subject_of(target, args, dict(kwargs or {}), queue)
    if not is_active():
        raise ConfigurationError(
            "Expected guards to assert something of, and they are switched off: leave out idempotency_off, inactive() "
            "and set_active(False)."
        )
    with override_store() if override.store is None else nullcontext():
        for order in _orders(subject):
            _check(subject.binding, [_Trial.of(subject, point, _snapshots(effects), order) for point in ORDER])


class _Keys(CrashPoint):
    """What has the keys of a binding's deliveries that ran, each once; calls within a body count for nothing."""

    def __init__(self, of: Binding) -> None:
        super().__init__()
        self.of, self.found = of, list[str]()

    def wants(self, point: str, delivery: Delivery, held: HeldLease) -> bool:
        """Note the key, and let the delivery live."""
        if current_lease() is None and is_of(self.of, delivery) and held.key not in self.found:
            self.found.append(held.key)
        return False


def _check(binding: Binding, trials: list[_Trial]) -> None:
    __tracebackhide__ = True
    if trials[0].before == trials[0].died and trials[0].order.is_first:
        raise AssertionError(
            f"Expected {binding.name} to have an effect, and effects() was {trials[0].before!r} before it ran "
            "and after that. Let effects() return what the task changes: a count of rows, the calls of a fake."
        )
    wrong = [trial for trial in sorted(trials, key=_in_time) if not trial.is_right]
    for trial in wrong:
        if len(trial.keys) > 1:
            raise AssertionError(
                f"Expected deliveries of {binding.name} with the same arguments to have the same key, got "
                f"{trial.keys[0]!r} and then {trial.keys[1]!r}, so that each is an operation of its own, and runs. "
                "Make the key of the arguments alone, and not of what changes, as the time or a random number."
            )
    if wrong:
        raise AssertionError("\n\n".join(trial.report(binding) for trial in wrong))


class _Subject(NamedTuple):
    """What is delivered: each ``deliver`` is a message of its own; ``again`` repeats the one that was cut off."""

    binding: Binding
    deliver: Callable[[], Any]
    again: Callable[[Any], Any]
    has_messages: bool = True


class _Order(NamedTuple):
    """What comes after a crash, and what a report calls the first of that."""

    after: str
    calls: tuple[Callable[[Any], Any], ...]
    is_first: bool = True


def _orders(subject: _Subject) -> list[_Order]:
    again = _Order("after the message came again", (subject.again, subject.again))
    if subject.binding.policy.key is None:  # each message is an operation of its own
        return [again]

    def published(_: Any) -> Any:
        return subject.deliver()

    orders = [again._replace(calls=(*again.calls, published))]
    if subject.has_messages:
        orders.append(_Order("after it was published again", (published, subject.again), is_first=False))
    return orders


class _Trial(NamedTuple):
    """What ``effects()`` returned around one crash, and the keys under which bodies ran."""

    point: Point
    order: _Order
    before: Any
    died: Any
    after: Any
    last: Any
    keys: list[str]

    @classmethod
    def of(cls, subject: _Subject, point: Point, effects: Callable[[], Any], order: _Order) -> _Trial:
        """Cut a delivery off at a point, and have what comes after that come."""
        before, noted = effects(), _Keys(subject.binding)
        with override.watch(noted), crash_at(point, of=subject.binding) as crash:
            subject.deliver()
        died = effects()
        first, *others = order.calls
        with override.watch(noted):
            if order.is_first:
                first(crash)  # no duplicate: it must not be refused
            else:
                _as_duplicate(first, crash)
            after = effects()
            for call in others:
                _as_duplicate(call, crash)
            last = effects()
        for held in crash.leases:
            held.store.delete(held.key)  # the next one is to be the first
        return cls(point, order, before, died, after, last, noted.found)

    @property
    def is_right(self) -> bool:
        """Whether the effect was there once, and from the right moment on."""
        return self._is_right_at_death and self._is_right_later

    @property
    def _is_right_at_death(self) -> bool:
        return bool(self.died == (self.before if self.point == "before_effect" else self.after))

    @property
    def _is_right_later(self) -> bool:
        return bool(self.after == self.last)

    def report(self, binding: Binding) -> str:
        """Return what is wrong, and what to do."""
        return (
            f"{binding.name} does not take effect once if its worker dies {self.point}: {MEANING[self.point]}.\n\n"
            f"    effects() before:                {self.before!r}\n"
            f"    when the worker died:            {self.died!r}\n"
            f"    {self.order.after + ':':<32} {self.after!r}\n"
            f"    after further duplicates:        {self.last!r}\n\n"
            f"{self._advice(binding)}"
        )

    def _advice(self, binding: Binding) -> str:
        if not binding.policy.result_ttl and (self.point == "after_settle" or not self._is_right_later):
            return FORGETS
        return ADVICE["after_settle" if self._is_right_at_death else self.point]


def _in_time(trial: _Trial) -> bool:
    return trial.point != "before_effect"


def _as_duplicate(deliver: Callable[..., Any], *args: Any) -> None:
    try:
        deliver(*args)
    except Conflict:  # with on_duplicate="raise"
        return


def _snapshots(effects: Callable[[], Any]) -> Callable[[], Any]:
    """Return what calls ``effects``, and keeps what it returned from changing: a list of calls, a query."""

    def snapshot() -> Any:
        found = effects()
        if isinstance(found, Iterable) and not isinstance(found, (str, bytes, tuple, Mapping, Set)):
            found = list(found)
        return deepcopy(found)

    return snapshot


def _subject_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any], queue: Queue | None) -> _Subject:
    binding = binding_of(getattr(target, "type", target))
    if queue is not None:
        return _job(target, binding, args, kwargs, queue)
    if hasattr(target, "apply"):
        return _task(target, binding, args, kwargs)
    if type(binding) is not FunctionBinding:
        raise ConfigurationError(
            f"Expected the queue of {binding.name}, which is guarded in jobs alone, got none: pass "
            "queue=Queue(is_async=False, connection=...)."
        )
    if inspect.iscoroutinefunction(target) and _is_loop_running():
        raise ConfigurationError(
            f"Expected no loop of asyncio that runs here, where {binding.name} is to run to its end, got one. Call it "
            "from a test that is no coroutine, or write await asyncio.to_thread(assert_takes_effect_once, ...)."
        )

    def call(*_: Any) -> Any:
        value = target(*fresh(args), **fresh(kwargs))
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    return _Subject(binding, call, call, has_messages=False)


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _task(target: Any, binding: Binding, args: Sequence[Any], kwargs: dict[str, Any]) -> _Subject:
    sig = target if hasattr(target, "type") else target.s()
    sig = sig.clone(args, kwargs)

    def deliver() -> Any:
        message = sig.clone()
        message.update(args=fresh(message.args), kwargs=fresh(message.kwargs))
        return _run(message.apply)

    return _Subject(binding, deliver, lambda crash: _run(redelivery(crash)))


def _run(apply: Callable[..., Any]) -> Any:
    """Apply a task, and the retries that it makes; raise what it raises, whatever the app does with errors of tasks."""
    from celery.exceptions import Retry

    while True:
        try:
            return apply(throw=True)
        except Retry as retry:
            if retry.sig is None:
                raise
            apply = retry.sig.apply


def _job(target: Any, binding: Binding, args: Sequence[Any], kwargs: dict[str, Any], queue: Queue) -> _Subject:
    def enqueue() -> Any:
        return _checked(queue.enqueue(target, args=fresh(tuple(args)), kwargs=fresh(kwargs)))

    return _Subject(binding, enqueue, lambda crash: _checked(redelivery(crash)()))


def _checked(job: Any) -> Any:
    """Return a job, unless it failed: RQ raises nothing, not even how a worker is made to die here."""
    result = job.latest_result()
    if job.is_failed and result is not None and "WorkerCrash" not in str(result.exc_string):
        raise AssertionError(f"Expected the job {job.id} to run, got:\n{result.exc_string}")
    return job
