"""Deliveries that a test repeats or cuts off, and the lease of one that a test stands in for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any, Literal, get_args

from ..core.binding import BINDING, Binding
from ..core.guard import Delivery
from ..core.lease import HeldLease, running
from ..errors import ConfigurationError
from ..stores.memory import MemoryStore
from ..stores.records import Lease, Outcome, State, new_owner
from .override import CrashPoint, Delivered, NoStore, WorkerCrash, override

#: Before the body; after the body, and before its result is recorded; after that, and before the message is acked.
Point = Literal["before_effect", "after_effect", "after_settle"]
POINTS: tuple[Point, ...] = get_args(Point)


class Crash(CrashPoint):
    """The death of a worker, as `crash_at` yields it.

    Arguments:
        point: Where it happens.
        of: The binding whose delivery it is, or None: of whichever comes first.
    """

    def __init__(self, point: Point, of: Binding | None) -> None:
        super().__init__()
        self.point, self.of = point, of
        self._lock = threading.Lock()
        #: whether a delivery reached the point, and died there
        self.happened = False
        #: the id of its message, call or job
        self.id = ""

    def __repr__(self) -> str:
        return f"crash_at({self.point!r})"

    def wants(self, point: str, delivery: Delivery, held: HeldLease) -> bool:
        """Return whether this delivery is to die here; it is the only one."""
        if point != self.point or (self.of is not None and not is_of(self.of, delivery)):
            return False
        with self._lock:
            if self.happened:
                return False
            self.happened, self.id = True, getattr(getattr(delivery, "job", None), "id", delivery.task_id)
            return True

    def expire_leases(self) -> None:
        """Have the time pass after which the leases of the dead process have run out."""
        for held in self.leases:
            _expire(held)


def is_of(wanted: Binding, delivery: Delivery) -> bool:
    """Return whether a delivery is of the task, function or job's function with this binding."""
    binding = getattr(delivery, "binding", None)  # a job has one for each connection
    return binding is not None and (binding.namespace, binding.name) == (wanted.namespace, wanted.name)


def _expire(held: HeldLease) -> None:
    store = held.store
    record = store.get(held.key)
    if isinstance(store, MemoryStore):
        store.offset += record.remaining + 0.001 if record is not None else 0.0
        return
    # A renewal may be for a shorter time than the lease was.
    store.renew([Lease(replace(held.lease.claim, lease_ttl=0.001), held.fence)])
    while (record := store.get(held.key)) and record.state is State.IN_PROGRESS and record.remaining:
        sleep(min(0.01, record.remaining))


@contextmanager
def crash_at(point: Point, *, of: Any = None) -> Iterator[Crash]:
    """Have the next delivery in this process end as if its worker were killed there; leave the block at that point.

    Nothing is released or settled, and nothing that Celery does after the task is done. At the end of the block the
    lease has run out, so that `redeliver` takes over.

    Arguments:
        point: ``before_effect``: the lease is taken, and the body has not begun. ``after_effect``: the body has
            returned, and its result is not recorded, but for what it settled in its own transaction.
            ``after_settle``: the result is recorded; the message is not acked, and callbacks are not published.
        of: The task, function or job's function whose delivery it is (default: whichever comes first).

    Yields:
        The crash: whether it ``happened``, and the ``id`` of what was delivered.

    Raises:
        AssertionError: no delivery reached the point.
    """
    if point not in POINTS:
        raise ConfigurationError(
            f"Expected a point of {', '.join(POINTS)}, got {point!r}. "
            'Write crash_at("after_effect") for the window that is the task\'s own to close.'
        )
    crash = Crash(point, None if of is None else binding_of(of))
    with override.watch(crash):
        try:
            yield crash
        except WorkerCrash as died:
            if died.crash is not crash:
                raise
    if not crash.happened:
        raise AssertionError(
            f"Expected a delivery to reach {point} within the block, got none. Deliver a task there with apply(), or "
            "with delay() under task_always_eager; a plain call is no delivery, and what was done before does not run. "
            "A body that raises is never after its effect."
        )
    crash.expire_leases()


def redeliver(what: Any) -> Any:
    """Deliver a message again in this process, with the same id, as a broker does that did not see it acked.

    Arguments:
        what: The result of the task, the `Crash` in which it was cut off, or the job of RQ.

    Returns:
        The result of the task, as ``apply()`` returns it, or the job.

    Raises:
        ConfigurationError: it was not delivered in this process while `override_store`, `inactive` or `crash_at` was in
            force.
    """
    return redelivery(what)()


def redelivery(what: Any) -> Callable[..., Any]:
    """Return what delivers a message again, with further options of ``apply()``; raises what `redeliver` raises."""
    found = override.deliveries.get(getattr(what, "id", ""))
    if found is None:
        raise ConfigurationError(
            f"Expected the result of a task, or a job, that was delivered in this process and under the fixture "
            f"idempotency_store, got {what!r}. Call a plain function again instead; each call is a delivery."
        )
    return _job_again(found.delivery) if not found.request else _task_again(found)


def _task_again(found: Delivered) -> Callable[..., Any]:
    from ..celery.message import STATE_ATTRIBUTE

    delivery, request = found
    identity = request[STATE_ATTRIBUTE].identity
    headers = {**(request.get("headers") or {}), **identity.headers(**{"from": identity.sender or None})}

    def again(**options: Any) -> Any:
        return delivery.task.apply(
            request["args"],
            request["kwargs"],
            task_id=request["id"],
            retries=request.get("retries"),
            headers=headers,
            link=request.get("callbacks"),
            link_error=request.get("errbacks"),
            **options,
        )

    return again


def _job_again(delivery: Any) -> Callable[..., Any]:
    from rq import Queue

    job = delivery.job
    queue = Queue(job.origin, connection=job.connection, is_async=False, serializer=job.serializer)

    def again() -> Any:
        job.data = job.data  # as it was enqueued: the body may have changed what was read of it
        return queue.run_sync(job)

    return again


def deliver_twice(sig: Any) -> tuple[Any, Any]:
    """Deliver the message of a task twice in this process, as a broker does that did not see the first one acked.

    Arguments:
        sig: A signature of one task: ``charge.s("ORD-1", 999)``.

    Returns:
        The results of both deliveries, as ``apply()`` returns them.

    Raises:
        ConfigurationError: it is no signature of an idempotent task.
        Exception: what keeps the message from being delivered: arguments that do not fit, or that have no key.
    """
    binding_of(getattr(sig, "type", sig))
    with override.watch():
        first = sig.apply()
        if first.id not in override.deliveries:
            first.get(disable_sync_subtasks=False)
        return first, redeliver(first)


def binding_of(target: Any) -> Binding:
    """Return the binding of a task, a function, or a function of jobs.

    Raises:
        ConfigurationError: it is none that is guarded.
    """
    found = target if isinstance(target, Binding) else getattr(target, "_binding", getattr(target, BINDING, None))
    if not isinstance(found, Binding):
        raise ConfigurationError(
            "Expected a task that is declared with base=IdempotentTask, or a function with @idempotent, got "
            f"{target!r}, which nothing guards."
        )
    return found


class StandInLease(HeldLease):
    """A lease that no store holds: `lease_for` makes it for a function that a test calls itself.

    It has the ``key``, and so the ``derived_key``, that a delivery of these arguments has. ``check()`` returns, unless
    the test sets ``lost``; ``settle`` keeps the result as ``settled``.
    """

    __slots__ = ()

    def __init__(self, binding: Binding, key: str) -> None:
        super().__init__(
            NoStore(noted=False),
            Lease(binding.claim(key, new_owner()), 1),
            monotonic(),
            encode=lambda result: Outcome(State.COMPLETED, b""),
            result_ttl=binding.policy.result_ttl,
        )

    def __repr__(self) -> str:
        return f"<a stand-in for the lease on {self.key!r}, which no store holds: lease_for() of a test made it>"

    @property
    def settled(self) -> Any:
        """What the function settled within its transaction; None if nothing."""
        return self.result(None)


@contextmanager
def lease_for(
    target: Any,
    *args: Any,
    idempotency_key: object = None,
    idempotency_headers: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Iterator[StandInLease]:
    """Stand in for a delivery, so that ``self.lease`` and ``current_lease()`` are there in a plain call.

    Arguments:
        target: The task, function or job's function that is called in the block.
        *args: The positional arguments of the delivery.
        idempotency_key: The key that the producer gives, where it gives one.
        idempotency_headers: The headers of the message, where the scope is one of them.
        **kwargs: The keyword arguments of the delivery.

    Yields:
        The lease.

    Raises:
        ConfigurationError: nothing guards the target.
        MissingKey: the arguments have no key.
        TypeError: the arguments do not fit the target.

    Example::

        with lease_for(charge, "ORD-1", 999) as lease:
            charge("ORD-1", 999)
        assert gateway.keys == [lease.derived_key("charge")]
    """
    binding = binding_of(target)
    key, _ = binding.operation(idempotency_key, new_owner(), args, kwargs, idempotency_headers)
    lease = StandInLease(binding, key)
    with running(lease):
        yield lease
