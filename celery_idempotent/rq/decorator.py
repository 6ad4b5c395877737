"""The decorator: a function that is guarded where a job runs it, and is itself everywhere else."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from redis.connection import ConnectionPool
from rq.job import Job

from ..core.binding import BINDING
from ..core.policy import IdempotencyOptions, Policy
from ..functions import FunctionBinding, check_function, policy_of
from ..stores.base import Store
from ..stores.maintenance import NAMESPACE
from . import job as jobs
from .delivery import RqDelivery
from .job import store_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])

_answering: ContextVar[Job | None] = ContextVar("celery_idempotent_job", default=None)


def idempotent(
    policy: Policy | IdempotencyOptions | None = None,
    /,
    *,
    name: str | None = None,
    namespace: str = NAMESPACE,
    serializer: str | None = None,
    **options: Unpack[IdempotencyOptions],
) -> Callable[[F], F]:
    """Make each operation of a job's function take effect once, on every kind of RQ's workers.

    Without ``key`` an operation is one enqueuing of a job, or one occurrence of one that repeats. The function is
    guarded where a job runs it; called from anywhere else, also from within a job, it is a plain call. The decorator
    returns a plain function, or method, and a coroutine function stays one for its callers.

    Arguments:
        policy: Options that several functions share (default: the library's).
        name: What keys and events call the function (default: its module and qualified name).
        namespace: How its keys begin.
        serializer: kombu's name for how results are kept (default: as the job's serializer, pickle or JSON).
        options: Those of `Policy`; ``store`` is the queue's own Redis by default.

    Returns:
        A decorator.

    Raises:
        ConfigurationError: an option is wrong, or the function yields, or it is a lambda or called ``_`` and has no
            ``name``.

    Example::

        @idempotent(key="order_id", result_ttl="7d")
        def charge(order_id, cents): ...
    """
    wanted = policy_of(policy, options)

    def decorate(function: F) -> F:
        check_function(function)
        run = _runner(function)
        # Those of a connection go with it: a process that runs jobs where it enqueues them may have a new one for each.
        bindings: WeakKeyDictionary[ConnectionPool, dict[str, JobBinding]] = WeakKeyDictionary()

        def make(store: Store | None, written: str) -> JobBinding:
            made = cast(Callable[[], Store], lambda: store)
            return JobBinding(function, wanted, name=name, namespace=namespace, store=made, serializer=written)

        declared = make(None, serializer or "json")  # a wrong declaration raises here, and not in the first job

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            job = jobs.job_running(call)
            if job is None or _answering.get() is job:
                return function(*args, **kwargs)
            written = serializer or jobs.serializer_of(job)
            here = bindings.setdefault(job.connection.connection_pool, {})
            if written not in here:
                here[written] = make(store_of(wanted.store, job.connection), written)
            token = _answering.set(job)
            try:
                return RqDelivery(here[written], job, run, args, kwargs).answer()
            finally:
                _answering.reset(token)

        guarded: Any = _like(function, call)
        guarded.__signature__ = declared.signature  # all arguments are handed through
        setattr(guarded, BINDING, declared)
        return cast(F, guarded)

    return decorate


class JobBinding(FunctionBinding):
    """One function with its policy, as jobs run it."""

    scope_hint = "enqueue the job with that entry in its meta, or fix the scope function"


def _like(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``call`` as returning a coroutine, where the function does; Python 3.12 and later can."""
    mark: Any = getattr(inspect, "markcoroutinefunction", None)
    return cast(Callable[..., Any], mark(call)) if mark and inspect.iscoroutinefunction(function) else call


def _runner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs the body to its end, as RQ does with what is a coroutine."""

    def run(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    return run
