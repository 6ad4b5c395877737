"""`IdempotentTask`: the process that runs the body, and the receivers of Celery's signals."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from celery import current_app, signals, states
from celery._state import get_current_worker_task
from celery.app.annotations import resolve_all
from celery.app.task import Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from ..core.backoff import sleep
from ..core.binding import confirmations
from ..core.history import history
from ..core.keys import KeySource
from ..core.lease import HeldLease, current_lease
from ..core.policy import IdempotencyOptions, Policy, Unique, UniqueOptions
from ..errors import AlreadyPublished, ConfigurationError, MissingKey, NoLease, StoreError
from ..events import in_words, logger
from . import canvas, declarations, message, propagation, unique
from .app import LAYERS, TaskBinding, is_idempotent, is_shared
from .declarations import REQUEST, mistaken_key
from .delivery import SLOT_PAUSE, CeleryDelivery, is_nacked, is_outage, put_back, takes_no_writes, was_acked
from .message import KEY_HEADER, META_HEADER, STATE_ATTRIBUTE, UNGUARDED, DeliveryState

if TYPE_CHECKING:
    from celery.canvas import Signature
    from celery.result import AsyncResult, EagerResult
    from typing_extensions import Unpack

    from .message import MessageOptions

    BaseTask: TypeAlias = Task[..., Any]  # celery-types has it generic, Celery has not
else:
    BaseTask = Task

#: By name, as Celery's blueprints take them: what runs in workers alone is imported there alone.
_HOME = __name__.rpartition(".")[0]
DECLARATION_STEP = f"{_HOME}.worker:DeclarationStep"
WORKER_STEPS = {f"{_HOME}.worker:{name}" for name in ("IdempotencyStep", "RenewalStep", "ShutdownStep")}
CONSUMER_STEPS = {f"{_HOME}.worker:ObservingStep", f"{_HOME}.visibility:VisibilityStep"}
#: Seconds for which a call waits for another thread to bind its task, which takes as long as the app's annotations do.
BINDING = 5.0
#: By app: how many tasks it had when they were last examined.
_examined: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
#: Plain tasks for which a key was given; it was logged.
_plain: set[str] = set()
#: Tasks whose bodies publish their own operation; it was logged.
_repeating: set[str] = set()
#: Tasks for messages of which `unique` was given where nothing reads it; it was logged.
_not_unique: set[Any] = set()


def connect() -> None:
    """Connect the receivers of Celery's signals; twice is the same as once."""
    for signal, receiver, name in (
        (signals.before_task_publish, move_key_into_headers, "key"),
        # Sent once the callbacks, the chain, the result and the chord's part are all out, and only then: task_postrun
        # comes with state SUCCESS also where Celery failed to publish them.
        (signals.task_success, mark_announced, "announced"),
        # Likewise, with the errbacks: they are published, or called, before it is sent.
        (signals.task_failure, mark_failure_announced, "failed"),
        # No task of the app need be idempotent: that may be what is wrong with it.
        (signals.celeryd_init, check_when_started, "declarations"),
        # Children leave without Python's atexit.
        (signals.worker_process_shutdown, finish, "end"),
        (signals.worker_shutdown, finish, "end"),
        (signals.task_unknown, unique.release_unrun, "unknown"),
        (signals.task_rejected, unique.release_unrun, "rejected"),
    ):
        signal.connect(receiver, dispatch_uid=f"celery_idempotent.{name}", weak=False)


def move_key_into_headers(sender: Any = None, headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Let ``apply_async(idempotency_key=...)`` travel with the message; Celery makes properties of unknown options.

    And what a base class of the task has left out of the headers.
    """
    if headers:
        message.restore_headers(sender, headers)
    stamps = (headers or {}).get("stamped_headers")
    wrong = mistaken_key({**(properties or {}), "stamped_headers": stamps}, guarded=False)
    if wrong:  # Celery logs what a receiver raises, and publishes all the same
        logger.error("Expected options that Celery or %s= knows for a message of %s, %s", KEY_HEADER, sender, wrong)
    if properties and KEY_HEADER in properties:
        key = properties.pop(KEY_HEADER)
        if key is not None:
            headers[KEY_HEADER] = key
            _warn_of_plain_task(sender)
    if headers and headers.get(KEY_HEADER) is not None:
        headers[KEY_HEADER] = message.write_key(headers[KEY_HEADER])
    if properties and properties.get("unique") and sender not in _not_unique:  # which an idempotent task takes away
        _not_unique.add(sender)
        logger.warning(
            "unique= changes nothing for this message of %s, which is published whatever waits. It is an option of an "
            "idempotent task's apply_async(): declare the task with @app.task(base=IdempotentTask), and do not publish "
            "it by send_task().",
            sender,
        )


def _warn_of_plain_task(name: Any) -> None:
    """Log once that the key of a message protects nothing, where this process has its task, and that is a plain one."""
    task = current_app._tasks.get(name)
    if task is not None and not is_idempotent(task) and name not in _plain:
        _plain.add(name)
        logger.warning(
            "%s= changes nothing for %s, which is no idempotent task: each message of it runs. Declare it with "
            "@app.task(base=IdempotentTask).",
            KEY_HEADER,
            name,
        )


def check_when_started(instance: Any = None, **_: Any) -> None:
    """Have a worker check what its app declares; Celery would log what is raised here, and go on."""
    instance.app.steps["worker"].add(DECLARATION_STEP)


def finish(**_: Any) -> None:
    """Publish and write what is left to this process before it ends."""
    unique.hand_over()
    confirmations.close()
    history.flush()


def mark_announced(sender: Any = None, **_: Any) -> None:
    """Record that Celery has dispatched the callbacks and the chain of a task that succeeded, and returned its part."""
    _mark_dispatched(sender, "fans_out")


def mark_failure_announced(sender: Any = None, **_: Any) -> None:
    """Record that Celery has dispatched the errbacks of a task that failed for good."""
    _mark_dispatched(sender, "fans_out_failed")


def _mark_dispatched(task: Any, pending: str) -> None:
    request = task.request_stack.top  # none in the worker's main process, which sends task_failure for lost children
    state = _state_of(request)
    if state is None or not state.key or not getattr(state, pending):
        return
    setattr(state, pending, False)  # once: a task's own on_success comes before the signal
    try:
        task._binding.guard.store.mark_dispatched(state.key, request.id)
    except StoreError as error:
        logger.warning(
            "%s[%s] has dispatched what follows it, and the store could not record it: %s", task.name, request.id, error
        )


connect()  # not when a task is bound: app.send_task() may publish before that
canvas.refuse_keys()
propagation.derive_canvas_ids()


class IdempotentTask(BaseTask):
    """A task that takes effect once per operation.

    Use it as ``@app.task(base=IdempotentTask)``; options go into ``idempotency``, see `Policy`. A direct call is a
    plain call; ``apply()`` is guarded like a delivery.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    Request = REQUEST

    idempotency: ClassVar[Policy | IdempotencyOptions | None] = None
    """Options of this task: a `Policy`, or a mapping of the options that differ from ``app.conf.idempotency``."""
    unique: ClassVar[bool | KeySource | Unique | UniqueOptions] = None
    """Which of its calls are not published while a message waits: True (of equal arguments), a key, a `Unique`, or a
    mapping of its options."""

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind the task to its app, as Celery does when it is declared.

        Raises:
            ConfigurationError: an option is wrong, or contradicts another.
        """
        if "__bound__" not in vars(cls):  # nor annotated: an annotation may be for every task
            declarations.check_name(cls)
        bound = super().bind(app)
        # The guard stays outermost: the __call__ of a subclass, of a mixin or of an annotation, which need not call
        # this one, becomes the body's. Here, where every task passes; a mixin may keep __init_subclass__ to itself.
        if getattr(cls.__call__, "guard", None) is not cls.__call__:  # functools.wraps copies the mark
            setattr(cls, "__call__", _outermost(cls.__call__))  # noqa: B010 - mypy knows no other way
        # Celery calls a task's own on_success between the dispatch and its signal; it may take long, and
        # its process may die in it.
        hook = inspect.getattr_static(cls, "on_success")
        if isinstance(hook, FunctionType) and hook is not Task.on_success and not hasattr(hook, "marks_first"):
            setattr(cls, "on_success", _marking_first(hook))  # noqa: B010
        # It comes before the guard, so that nothing else frees what the message holds where it ends the delivery.
        hook = inspect.getattr_static(cls, "before_start")
        if isinstance(hook, FunctionType) and hook is not Task.before_start and not hasattr(hook, "gives_back"):
            setattr(cls, "before_start", _giving_back(hook))  # noqa: B010
        if not (cls.name or "").startswith(UNGUARDED):
            # A class without a name is found by its instance, which register_task has named; an abstract one has none.
            declared = [app._tasks.get(cls.name)] if cls.name else app._tasks.values()
            for task in [task for task in declared if type(task) is cls]:
                declarations.check_declaration(task)
            app.steps["worker"].update(WORKER_STEPS)
            app.steps["consumer"].update(CONSUMER_STEPS)
            # The app's other tasks, once all that wait for it are evaluated, and again when there are more.
            if app.finalized and not app._pending and _examined.get(app) != len(app._tasks):
                declarations.check_unprotected(app)
                _examined[app] = len(app._tasks)
        return bound

    @classmethod
    def annotate(cls) -> None:
        """Apply the annotations of the app's configuration, as Celery does, and keep what was declared below them."""
        found = [vars(cls), *resolve_all(cls._app.annotations, cls)]
        layers = {name: [each[name] for each in found if name in each] for name in ("idempotency", "unique")}
        setattr(cls, LAYERS, layers)
        super().annotate()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: guarded if this call is a delivery, plainly if it is a call."""
        request = self.request_stack.top
        if _is_new_delivery(self, request):
            return CeleryDelivery(self, request, self.run, args, kwargs).answer()
        state = _state_of(request)
        if state is not None and not state.entered:  # called by a subclass's __call__ within the delivery
            state.entered = True
            return self.run(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    __call__.guard = __call__  # type: ignore[attr-defined]

    @property
    def lease(self) -> HeldLease:
        """What the running delivery holds.

        It has ``key``, ``fence``, ``lost``, ``check()``, ``settle()`` and ``derived_key(name)``, see `HeldLease`. A run
        without the store (``on_store_error="run"``) has one too, with the fence 0.

        Raises:
            NoLease: no delivery of this task is running here, as in a direct call; an AttributeError, so that
                ``getattr(self, "lease", None)`` is None there.
        """
        state = _state_of(self.request_stack.top)
        held = _loose_lease() if state is None else state.holding
        if held is None:
            raise NoLease(
                f"Expected self.lease in a delivery of {self.name}, got "
                + ("a direct call" if state is None else "a delivery whose body has not begun")
                + ": neither holds a lease, nor does a thread beside the body. Publish the task, or call its apply(), "
                "which is guarded; read current_lease() where it may be None; in a unit test, stand in with "
                "lease_for() of celery_idempotent.testing."
            )
        return held

    def key_for(
        self,
        *args: Any,
        idempotency_key: str | None = None,
        idempotency_headers: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the store's key of a call with these arguments, as the commands and the log have it.

        Arguments:
            *args: The positional arguments of the call.
            **kwargs: The keyword arguments of the call.
            idempotency_key: The key that the producer gives, where it gives one.
            idempotency_headers: The headers of the message, where the scope is one of them.

        Raises:
            MissingKey: the key is the id of each message, or the arguments or headers have none.
            TypeError: the arguments do not fit the task.
        """
        sent, named = message.sent_arguments(self, args, kwargs, self._get_exec_options())
        given = message.read_key(message.write_key(idempotency_key))
        key, arguments = self._binding.operation(given, self.name, sent, named, idempotency_headers)
        if arguments is None:
            raise MissingKey(
                f"Expected {self.name} to have a key that follows from its arguments, and its key is the id of each "
                "message. Give the task a key, or pass idempotency_key."
            )
        return key

    @functools.cached_property
    def _binding(self) -> TaskBinding:
        self._get_app()  # which binds the task, unless another thread is about to: its annotations are not there yet
        end = monotonic() + BINDING
        while self.request_stack is None and monotonic() < end:
            sleep(0.001)
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
        **options: Unpack[MessageOptions],
    ) -> AsyncResult[Any]:
        """Publish the task as Celery does, unless it is ``unique`` and a message waits that will do its work.

        Beside Celery's options there are ``idempotency_key``, and ``unique``: False to publish whatever waits, or
        options of `Unique` for this call. Returns the result of the message that does the work: the one that was
        published, or the one that waits. Within an HTTP request that a middleware of this library guards, a call
        without ``task_id`` gets one that follows from the request, the task and its arguments.

        Raises:
            errors.AlreadyPublished: a message waits, and the task has ``on_duplicate="raise"``.
            ConfigurationError: an option or an argument is meant as the key of the message, and is not.
        """
        given = cast(dict[str, Any], options)
        # In what Celery dispatches for a task that has ended, an error would make its success a failure.
        if current_lease() is not None or get_current_worker_task() is None:
            declarations.refuse_mistakes(self.name, given)
            declarations.refuse_key_argument(self, kwargs)
        if isinstance(task_id, UUID):  # as which it would arrive, where the broker takes it at all
            task_id = str(task_id)
        _restore_retry_headers(self, task_id, given)
        _warn_of_own_operation(self, args, kwargs, task_id, given)
        wanted = given.pop("unique", None)
        send = message.Publishing(self.name, functools.partial(super().apply_async, args, kwargs, shadow=shadow))
        producer = producer or given.pop("publisher", None)  # Celery's old name of it
        ids = {"task_id": task_id, "producer": producer, "link": link, "link_error": link_error}

        def publish(derived: str) -> Any:
            if link_error and not self.name.startswith(UNGUARDED):
                headers = given.get("headers") or {}
                own = {"sending": propagation.sending(task_id or derived), **message.own_header(headers)}
                given["headers"] = {**headers, META_HEADER: own}
            return unique.publish(self, wanted, args, kwargs, ids, given, send, derived)

        result: AsyncResult[Any] = publish("") if task_id else propagation.publish(self, args, kwargs, given, publish)
        return result

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Call ``delay`` when Django commits its transaction on the default database; at once where none is open.

        Raises:
            ConfigurationError: an argument is meant as the key of the message, and is not; or there is no Django.
        """
        declarations.refuse_key_argument(self, kwargs)  # now, and not when the transaction is committed already
        _on_commit(functools.partial(self.delay, *args, **kwargs))

    def apply_async_on_commit(self, *args: Any, **options: Any) -> None:
        """Call ``apply_async`` when Django commits its transaction on the default database; at once where none is open.

        Raises:
            ConfigurationError: an option or an argument is meant as the key of the message, and is not; or there is no
                Django.
        """
        declarations.refuse_mistakes(self.name, options)
        declarations.refuse_key_argument(self, args[1] if len(args) > 1 else options.get("kwargs"))
        _on_commit(functools.partial(self.apply_async, *args, **options))

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *others: Any,
        idempotency_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> EagerResult[Any]:
        """Run the task in this process, guarded like a delivery of a message with these arguments.

        Raises:
            ConfigurationError: an option or an argument is meant as the key of the delivery, and is not.
        """
        options.pop("unique", None)  # a call in this process waits for nothing
        declarations.refuse_mistakes(self.name, {**options, KEY_HEADER: idempotency_key, "headers": headers})
        declarations.refuse_key_argument(self, kwargs)
        if idempotency_key is not None:
            headers = {**(headers or {}), KEY_HEADER: idempotency_key}
        args, kwargs = message.sent_arguments(self, args, kwargs, {**self._get_exec_options(), **options})
        return super().apply(args, kwargs, *others, headers=headers, **options)

    def signature(self, args: Any = None, *starargs: Any, **starkwargs: Any) -> Signature[Any]:
        """Return a signature of the task, as Celery does; ``s()`` and ``si()`` make theirs here too.

        Raises:
            ConfigurationError: an option or an argument is meant as the key of the message, and is not.
        """
        declarations.refuse_mistakes(self.name, starkwargs)
        declarations.refuse_key_argument(self, starargs[0] if starargs else starkwargs.get("kwargs"))
        return super().signature(args, *starargs, **starkwargs)

    subtask = signature

    def signature_from_request(self, request: Any = None, *args: Any, **options: Any) -> Any:
        """Return a signature that continues the request, as Celery's retry needs it, under the same key."""
        request = self.request if request is None else request
        # The worker's main process calls this too, for a lost child (retry_on_worker_lost), without its context pushed.
        if request.called_directly and not DeliveryState.is_known(request):
            return super().signature_from_request(request, *args, **options)
        state = DeliveryState.of(request)
        signature = super().signature_from_request(request, *args, **options)
        if not options.keys() & {"queue", "exchange", "routing_key"} and not signature.options.get("queue"):
            signature.set(**message.destination(self.app, request.delivery_info, state.identity.exchange_type))
        # A run ends with the retry that it publishes, which may overtake it; another message of its own making may not.
        is_retry = options.get("retries") == (request.retries or 0) + 1
        own = {"from": state.identity.owner if is_retry else None}
        given = (*args[:2], *map(options.get, ("args", "kwargs", KEY_HEADER)))
        changed = any(part is not None for part in given)
        if is_retry and changed:  # it is the same operation, whatever key its arguments give
            own["retried"] = state.named or None
        signature.set(headers=message.without_deaths(signature.options.get("headers")))
        headers = state.identity.headers(**own)
        state.retry_headers = headers if is_retry else None
        return _with_headers(signature, headers)

    subtask_from_request = signature_from_request

    def retry(self, *args: Any, **options: Any) -> Retry:
        """Retry the task as Celery does, unless its lease was lost: then another run has taken over, retries and all.

        With ``throw=False`` the lease is given up to the retry as soon as it is published. The body goes on, but the
        result is the retry's.

        Raises:
            errors.LeaseLost: the lease is lost; nothing was published.
            Reject: the broker could not be reached, or its queue is full; the message goes back. One that was acked
                before it ran (``allow_early_ack``) is not there any more: it waits until the broker takes the retry,
                as any does while a Redis takes no writes.
            ConfigurationError: an option is meant as the key of the message, and is not; ``signature()`` refuses it.
        """
        self._check_lease("Retrying")
        state, level = _state_of(self.request_stack.top), logging.ERROR
        while True:
            try:
                retry: Retry = super().retry(*args, **options)
                break
            except Retry as published:
                if state is not None:
                    state.left_by = published
                raise
            except Reject as rejected:
                # Celery drops the message when it cannot publish the retry; with the broker away, or a queue that is
                # full, that loses the task.
                refused = rejected.reason
                if not isinstance(refused, Exception):
                    raise
                full = takes_no_writes(refused)
                if not (full or is_outage(self.app, refused) or is_nacked(refused)):
                    raise
                reason = f"The broker took no retry of this message ({str(refused) or repr(refused.__cause__)})."
                if not (full or was_acked(self, self.request)):
                    raise put_back(reason) from rejected
                logger.log(level, "%s[%s]: %s It waits in its slot.", self.name, self.request.id, reason)
                level = logging.DEBUG  # once for each retry
                sleep(SLOT_PAUSE)
        if state is not None and state.give_up is not None:
            state.give_up(retry)
        return retry

    def replace(self, sig: Any) -> Any:
        """Replace the task as Celery does; where it is replaced by what ends in itself, that end is this operation.

        Raises:
            errors.LeaseLost: the lease is lost; nothing was published.
        """
        request = self.request_stack.top
        state = _state_of(request)
        if state is None:
            return super().replace(sig)
        self._check_lease("Replacing")
        last = _mark_parts(self, request, state, sig)
        continued = last is not None and last.task == self.name
        if last is not None and not request.is_eager and is_shared(self.backend):
            self._forget_failure(request.id)
        try:
            return super().replace(sig)
        except Ignore as published:
            state.replaced, state.continued, state.left_by = True, continued, published
            raise
        except Exception as error:
            state.failed = error if continued and request.is_eager else None
            raise

    def _forget_failure(self, task_id: str) -> None:
        """Have a failure that the result backend has of the task's id from now on be one of what replaces it."""
        try:
            if self.backend.get_task_meta(task_id, cache=False)["status"] in states.PROPAGATE_STATES:
                self.backend.store_result(task_id, None, states.PENDING)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - the backend's own
            logger.warning("The result backend does not know that %s goes on: %s", task_id, in_words(error))

    def _check_lease(self, what: str) -> None:
        state = _state_of(self.request_stack.top)
        if state is not None and state.holding is not None:
            try:
                state.holding.check()
            except StoreError as error:
                # The message names its publisher: if the lease was lost after all, the store does not let it overtake.
                logger.warning("%s without knowing whether the lease still holds: %s", what, error)


def _restore_retry_headers(task: IdempotentTask, task_id: Any, options: dict[str, Any]) -> None:
    """Give a retry its headers back where a base class that comes before this one has put others in their place."""
    requests = task.request_stack
    state = _state_of(requests.top) if requests is not None else None
    if state is None or state.retry_headers is None or META_HEADER in (options.get("headers") or {}):
        return
    request = requests.top
    if task_id == request.id and options.get("retries") == (request.retries or 0) + 1:
        options["headers"] = {**(options.get("headers") or {}), **state.retry_headers}


def _warn_of_own_operation(task: IdempotentTask, args: Any, kwargs: Any, task_id: str | None, options: Any) -> None:
    """Log once that a body publishes the operation that it runs: such a message is a duplicate, and does not run."""
    # Another thread may be about to bind the task, at the first calls of a process.
    requests, headers = task.request_stack, options.get("headers")
    state = _state_of(requests.top) if requests is not None else None
    if state is None or state.holding is None or task.name in _repeating or not task._binding.policy.result_ttl:
        return
    if message.own_header(headers).keys() & {"from", "operation", "within"}:  # a retry, or what replaces it
        return
    with suppress(TypeError, MissingKey):
        given = message.read_key(message.write_key(message.given_key(options)))
        key, _ = task._binding.operation(given, task_id or "", args or (), kwargs or {}, headers)
        if key == state.key:
            _repeating.add(task.name)
            logger.warning(
                "%s publishes itself under the key that it runs, %s: the message is a duplicate, which gets the result "
                "of this run, and does not run. Use self.retry(), or give each step a key of its own.",
                task.name,
                key,
            )


def _on_commit(publish: Callable[[], Any]) -> None:
    """Publish as Celery's own class for Django does, which ``base=IdempotentTask`` takes the place of."""
    try:
        from django.db import transaction
    except ModuleNotFoundError:
        raise ConfigurationError(
            "Expected Django for a call that is published when its transaction is committed, and it is not installed. "
            "Call delay() or apply_async() after the commit."
        ) from None

    def publish_after_commit() -> None:
        try:
            publish()
        except AlreadyPublished as error:  # the caller cannot catch it, and Django would call no later hook
            logger.info("Nothing was published after the commit: %s", error)

    transaction.on_commit(publish_after_commit if transaction.get_connection().in_atomic_block else publish)


def _is_new_delivery(task: IdempotentTask, request: Any) -> bool:
    """Return whether this call is the delivery itself, and not a call within a body or from anywhere else."""
    if request is None or request.called_directly:
        return False
    state = request.__dict__.get(STATE_ATTRIBUTE)
    return (state is None or not state.delivered) and not task.name.startswith(UNGUARDED)


def _state_of(request: Any) -> DeliveryState | None:
    return None if request is None else request.__dict__.get(STATE_ATTRIBUTE)


def _loose_lease() -> HeldLease | None:
    """Return the lease of no run that was put here, as for a unit test; None if there is none.

    That of a run is not a direct call's within it: two such calls would derive the same keys of it.
    """
    found = current_lease()
    return None if found is None or found.open or get_current_worker_task() is not None else found


def _mark_parts(task: IdempotentTask, request: Any, state: DeliveryState, sig: Any) -> Any:
    """Write on the tasks of a replacing signature what they are to the operation; return the one that ends it, or None.

    The last of them gets the id of the replaced task. If it is the same task, it is the operation. The others precede
    it: those that name the same operation must not wait for it.
    """
    eager, explicit = bool(request.is_eager), state.named != task._binding.default_key(request.id)
    within = state.identity.parts(*([state.named] if explicit or eager else []))
    parts, last = canvas.parts_of(sig), canvas.last_of(sig)
    if last is not None and last.options.get("task_id", request.id) != request.id:
        last = None
    for place, part in enumerate(parts):
        other = task.app.tasks.get(part.task)
        if not isinstance(other, IdempotentTask) or other.name.startswith(UNGUARDED):
            continue
        if part is not last:
            _with_headers(
                part, {META_HEADER: {**within, **({"part": f"{state.identity.part}/{place}"} if eager else {})}}
            )
        elif other.name != task.name:
            _with_headers(part, {META_HEADER: {"nesting": state.nesting + 1, **within}})
        else:
            goes_on = {"from": state.identity.owner, "nesting": state.nesting + 1, "operation": state.key}
            scope = task._binding.policy.scope
            tenant = {scope: (request.headers or {}).get(scope)} if isinstance(scope, str) else {}
            _with_headers(part, {**tenant, **(part.options.get("headers") or {}), **state.identity.headers(**goes_on)})
    return last


def _with_headers(signature: Any, headers: Mapping[str, Any]) -> Any:
    return signature.set(headers={**(signature.options.get("headers") or {}), **headers})


def _outermost(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` that guards the delivery and lets ``inner`` run the body."""

    @functools.wraps(inner)
    def guarded(self: IdempotentTask, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if _is_new_delivery(self, request):
            return CeleryDelivery(self, request, functools.partial(inner, self), args, kwargs).answer()
        return inner(self, *args, **kwargs)

    guarded.guard = guarded  # type: ignore[attr-defined]
    return guarded


def _marking_first(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``on_success`` that records what was dispatched before ``inner`` runs."""

    @functools.wraps(inner)
    def on_success(self: IdempotentTask, *args: Any, **kwargs: Any) -> Any:
        mark_announced(self)
        return inner(self, *args, **kwargs)

    on_success.marks_first = True  # type: ignore[attr-defined]
    return on_success


def _giving_back(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``before_start`` that frees what the message has reserved if ``inner`` ends the delivery."""

    @functools.wraps(inner)
    def before_start(self: IdempotentTask, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(self, *args, **kwargs)
        except Exception as error:
            unique.end_unrun(self, error)
            raise

    before_start.gives_back = True  # type: ignore[attr-defined]
    return before_start
