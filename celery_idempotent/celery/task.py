"""The seam in the process that runs the body: a task base class whose deliveries take effect once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from celery.app.task import Task
from celery.canvas import _chain
from celery.exceptions import Reject

from ..errors import ConfigurationError, StoreError
from ..holding import Holding
from ..hooks import logger
from ..pauses import sleep
from ..policy import Policy
from . import brokers, fanout, groups, inspection, listening, worker
from .binding import TaskBinding
from .delivery import SLOT_PAUSE, MessageDelivery, is_outage, put_back, was_acked
from .identity import KEY, MESSAGE, PLAIN, STATE, DeliveryState, new_token

__all__ = ["IdempotentTask"]

listening.connect()  # not when a task is bound: app.send_task() may publish before that
groups.refuse_keys()
inspection.register()


class IdempotentTask(Task):
    """A task that takes effect once per operation.

    Use it as ``@app.task(base=IdempotentTask)``; options go into ``idempotency``, see `Policy`. A direct call is a
    plain call; ``apply()`` is guarded like a delivery.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    Request = "celery_idempotent.celery.request:IdempotentRequest"

    #: Options of this task: a `Policy`, or a mapping of the options that differ from ``app.conf.idempotency``.
    idempotency: ClassVar[Policy | Mapping[str, Any] | None] = None

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind the task to its app, as Celery does when it is declared.

        Raises:
            ConfigurationError: an option is wrong, or contradicts another.
        """
        bound = super().bind(app)
        # The guard stays outermost: the __call__ of a subclass, of a mixin or of an annotation, which need not call
        # ours, becomes the body's. Here, where every task passes; a mixin may keep __init_subclass__ to itself.
        if not getattr(cls.__call__, "is_guard", False):
            setattr(cls, "__call__", _outermost(cls.__call__))  # noqa: B010 - mypy knows no other way
        if not (cls.name or "").startswith(PLAIN):
            # A class without a name is found by its instance, which register_task has named; an abstract one has none.
            declared = [app._tasks.get(cls.name)] if cls.name else app._tasks.values()
            for task in [task for task in declared if type(task) is cls]:
                _check_declaration(cls, TaskBinding(task).policy)
            worker.install(app)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: guarded if this call is a delivery, plainly if it is a call."""
        request = self.request_stack.top
        if _is_new_delivery(self, request):
            return _answer(self, request, self.run, args, kwargs)
        state = _state_of(request)
        if state is not None and not state.entered:  # called by a subclass's __call__ within the delivery
            state.entered = True
            return self.run(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    __call__.is_guard = True  # type: ignore[attr-defined]

    @property
    def lease(self) -> Holding | None:
        """What the running delivery holds, None in a direct call.

        It has ``key``, ``fence``, ``lost``, ``check()`` and ``derived_key(name)``, see `Holding`.
        """
        state = _state_of(self.request_stack.top)
        return None if state is None else state.holding

    @functools.cached_property
    def _binding(self) -> TaskBinding:
        return TaskBinding(self)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Publish the task as Celery does; a message with errbacks is told from a later one under the same id."""
        if link_error and not self.name.startswith(PLAIN):
            headers = options.get("headers") or {}
            options["headers"] = {**headers, MESSAGE: {"sending": new_token(), **(headers.get(MESSAGE) or {})}}
        return super().apply_async(args, kwargs, task_id, producer, link, link_error, shadow, **options)

    def apply(
        self, *args: Any, idempotency_key: object = None, headers: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Run the task in this process, guarded like a delivery."""
        if idempotency_key is not None:
            headers = {**(headers or {}), KEY: idempotency_key}
        return super().apply(*args, headers=headers, **options)

    def signature_from_request(self, request: Any = None, *args: Any, **options: Any) -> Any:
        """Return a signature that continues the request, as Celery's retry needs it, under the same key."""
        request = self.request if request is None else request
        # The worker's main process asks too, for a lost child (retry_on_worker_lost); its context is never pushed.
        if request.called_directly and not DeliveryState.is_known(request):
            return super().signature_from_request(request, *args, **options)
        identity = DeliveryState.of(request).identity
        signature = super().signature_from_request(request, *args, **options)
        if not options.keys() & {"queue", "exchange", "routing_key"} and not signature.options.get("queue"):
            signature.set(**brokers.destination(self.app, request.delivery_info))
        # A run ends with the retry that it publishes, which may overtake it; another message of its own making may not.
        is_retry = options.get("retries") == (request.retries or 0) + 1
        return _with_headers(signature, identity.headers(**{"from": identity.owner if is_retry else None}))

    def retry(self, *args: Any, **options: Any) -> Any:
        """Retry the task as Celery does, unless its lease was lost: then another run has taken over, retries and all.

        With ``throw=False`` the lease is given up to the retry as soon as it is published. The body goes on, but the
        result is the retry's.

        Raises:
            LeaseLost: the lease is lost; nothing was published.
            Reject: the broker could not be reached; the message goes back to its queue. One that was acked before it
                ran (``allow_early_ack``) is not there any more: it waits until the broker takes the retry.
        """
        if self.lease is not None:
            try:
                self.lease.check()
            except StoreError as error:
                # The retry names its publisher: if the lease was lost after all, the store does not let it overtake.
                logger.warning("Retrying without knowing whether the lease still holds: %s", error)
        while True:
            try:
                retry = super().retry(*args, **options)
                break
            except Reject as rejected:
                # Celery drops the message when it cannot publish the retry; with the broker away, that loses the task.
                if not (isinstance(rejected.reason, Exception) and is_outage(self.app, rejected.reason)):
                    raise
                reason = f"The broker took no retry of this message ({rejected.reason})."
                if not was_acked(self, self.request):
                    raise put_back(reason) from rejected
                logger.error("%s[%s]: %s It was acked, and waits in its slot.", self.name, self.request.id, reason)
                sleep(SLOT_PAUSE)
        state = _state_of(self.request_stack.top)
        if state is not None and state.give_up is not None:
            state.give_up(retry)
        return retry

    def on_replace(self, sig: Any) -> Any:
        """Publish the replacement; one of the same name is this operation and keeps its key."""
        state = _state_of(self.request_stack.top)
        if state is not None:
            if state.holding is not None and state.holding.lost:
                state.holding.check()  # raises: what took over, or goes on in its place, is the operation
            # Within a chain, Celery has put the rest of the chain behind what replaces us.
            first = sig.tasks[0] if isinstance(sig, _chain) else sig
            state.replaced_by = first
            if getattr(first, "task", None) == self.name:
                _with_headers(first, state.identity.headers(**{"from": state.identity.owner}))
        return super().on_replace(sig)


def _is_new_delivery(task: IdempotentTask, request: Any) -> bool:
    """Tell whether this call is the delivery itself, and not a call within a body or from anywhere else."""
    if request is None or request.called_directly or STATE in request.__dict__:
        return False
    return not task.name.startswith(PLAIN)


def _answer(task: IdempotentTask, request: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return MessageDelivery(task, request, run, args, kwargs).answer()
    except Exception:
        fanout.give_errback_ids(request, task.app)
        raise


def _state_of(request: Any) -> DeliveryState | None:
    return None if request is None else request.__dict__.get(STATE)


def _with_headers(signature: Any, headers: Mapping[str, Any]) -> Any:
    return signature.set(headers={**(signature.options.get("headers") or {}), **headers})


def _outermost(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` that guards the delivery and lets ``inner`` run the body."""

    @functools.wraps(inner)
    def guarded(self: IdempotentTask, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if _is_new_delivery(self, request):
            return _answer(self, request, functools.partial(inner, self), args, kwargs)
        return inner(self, *args, **kwargs)

    guarded.is_guard = True  # type: ignore[attr-defined]
    return guarded


def _check_declaration(cls: type[IdempotentTask], policy: Policy) -> None:
    from .request import IdempotentRequest, request_class

    if not cls.acks_late and not policy.allow_early_ack:
        raise ConfigurationError(
            f"Expected {cls.name} to be acknowledged late, got acks_late=False: a message that is acked before it runs "
            "is lost with its worker, and nothing would run again. Leave acks_late out, or accept that with "
            'idempotency={"allow_early_ack": True}.'
        )
    if not issubclass(request_class(cls.Request), IdempotentRequest):
        raise ConfigurationError(
            f"Expected the Request of {cls.name} to derive from celery_idempotent.celery.IdempotentRequest, "
            f"got {cls.Request!r}: without it a lost child's lease is not released."
        )
