"""Idempotent functions: the decorator for plain functions and coroutines. Each call is a delivery."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeout
from contextlib import suppress
from types import CodeType, FunctionType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .core import binding, keys
from .core.binding import BACKEND, BINDING, GUARDED_AS, Binding
from .core.compression import LARGEST, NONE
from .core.file_results import FileResultStorage
from .core.guard import (
    Acquiring,
    Busy,
    Decision,
    Delivery,
    Ending,
    Guard,
    Ignored,
    Ran,
    Replayed,
    in_progress,
    not_kept,
)
from .core.lease import LOOKS, HeldLease, current_lease, running, slot_within
from .core.policy import IdempotencyOptions, Policy
from .core.results import Codec, Kind
from .errors import ConfigurationError, LeaseLost, StoreUnreachable
from .events import logger
from .stores import open_store
from .stores.base import Store
from .stores.maintenance import NAMESPACE
from .stores.records import Outcome, Reason, Release, State, new_owner

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(
    policy: Policy | IdempotencyOptions | None = None,
    /,
    *,
    name: str | None = None,
    namespace: str = NAMESPACE,
    serializer: str = "json",
    **options: Unpack[IdempotencyOptions],
) -> Callable[[F], F]:
    """Make each operation of a function take effect once, whichever process calls it.

    The call that comes first runs the function; those that come later with the same key return what it returned. A
    coroutine function stays one, for asyncio. A call is never delivered again: ``on_conflict="defer"`` raises
    `Conflict` at once, and ``on_store_error="wait"`` waits for ``wait_timeout`` at most. Its ``__wrapped__`` is
    the function as it was declared, without a guard.

    Arguments:
        policy: Options that several functions share (default: the library's).
        name: What keys and events call the function (default: its module and qualified name); give one where the same
            function is found under several, as that of a script is, or several under one.
        namespace: How its keys begin.
        serializer: kombu's name for how results are kept.
        options: Those of `Policy`; ``store`` and ``key`` must be among them, or in ``policy``.

    Returns:
        A decorator.

    Raises:
        ConfigurationError: an option is wrong or missing, or the function yields, or it is a lambda or called ``_`` and
            has no ``name``. When the function is called, it raises what is in `celery_idempotent.errors`, and what its
            body raises.

    Example::

        @idempotent(store="redis://localhost/1", key="order_id")
        def charge(order_id, cents): ...
    """
    wanted = policy_of(policy, options)

    def decorate(function: F) -> F:
        check_function(function)
        binding = FunctionBinding(
            function,
            _complete(wanted, function.__qualname__),
            name=name,
            namespace=namespace,
            store=functools.partial(opened, wanted.store),
            serializer=serializer,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            delivery = CallDelivery(binding, function, args, kwargs)
            return delivery.conclude(binding.guard.run(delivery))

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async def body() -> Any:
                here.lease = current_lease()
                try:
                    with running(here):
                        return check_returned(binding.name, await function(*args, **kwargs))
                finally:
                    here.end()

            # A server that reads on within the body begins its connection's next request in the context of the body.
            here = slot_within()
            running_loop()  # before anything is requested that another framework could not wait for
            delivery = CallDelivery(binding, function, args, kwargs)
            return await run_guarded(binding.guard, delivery, body, delivery.conclude)

        guarded: Any = call_async if inspect.iscoroutinefunction(function) else call
        guarded.__signature__ = binding.signature  # all arguments are handed through
        setattr(guarded, GUARDED_AS, (binding.namespace, binding.name))
        setattr(guarded, BINDING, binding)
        return cast(F, guarded)

    return decorate


def _complete(policy: Policy, name: str) -> Policy:
    lacking = [option for option in ("store", "key") if getattr(policy, option) is None]
    if lacking:
        raise ConfigurationError(
            f"Expected {' and '.join(lacking)} of {name}, got none: a function has no app whose store it could use, "
            'and its calls have no id. Write @idempotent(store="redis://localhost/1", key="order_id").'
        )
    if isinstance(policy.scope, str):
        raise ConfigurationError(
            f"Expected the scope of {name} to be a callable over its arguments, got {policy.scope!r}: that would be "
            f"the name of a header, and a call has none. Write scope=lambda {policy.scope}: {policy.scope}."
        )
    return policy


class CallDelivery(Delivery):
    """One call of a function.

    Arguments:
        binding: Of the function.
        function: The function; a coroutine function is run by its own task, and not by `body`.
        args, kwargs: The call's arguments.

    Raises:
        MissingKey: they do not name the operation.
    """

    alone = True

    def __init__(self, binding: FunctionBinding, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.binding, self.function, self.args, self.kwargs = binding, function, args, kwargs
        self.patience, self.max_lease = binding.policy.wait_timeout, binding.policy.max_lease
        owner = new_owner()
        key, arguments = binding.operation(None, owner, args, kwargs, None)
        claim = binding.claim(key, owner, task_id=owner, fingerprint=binding.fingerprint(arguments))
        self.identify(binding.events_of(claim, owner))

    def body(self, held: HeldLease) -> Any:
        """Call the function."""
        with running(held):
            return check_returned(self.binding.name, self.function(*self.args, **self.kwargs))

    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record, as the policy has it."""
        return self.binding.ending_of(error)

    def conclude(self, decision: Decision) -> Any:
        """Return to the caller what the guard decided, or raise it."""
        match decision:
            case Ran(value):
                return self.binding.as_replayed(value)
            case Replayed(value, _):
                return value
            case Ignored(_, record):
                raise not_kept(record, "the run that did it left none")
            case Busy(remaining) as busy:
                raise busy.error or in_progress(self.claim.key, remaining)
        raise AssertionError(f"the guard decided nothing but {decision!r}")  # pragma: no cover


#: By URL: functions that name the same store share it, with its connections and renewals.
_stores: dict[str, Store] = {}
#: By namespace and name: the function that was declared last.
_declared: dict[tuple[str, str], weakref.ref[Callable[..., Any]]] = {}


def policy_of(given: object, options: Mapping[str, Any]) -> Policy:
    """Return the policy that a decorator was given, with its options laid on top.

    Raises:
        ConfigurationError: one of them is wrong, or the decorator was written without parentheses.
    """
    if inspect.isroutine(given):
        raise ConfigurationError(
            f"Expected options of @idempotent, got the function {given.__qualname__}: write @idempotent(...), "
            "with parentheses."
        )
    for name in options:
        if owner := _OTHERS.get(name):
            raise ConfigurationError(
                f"Expected options of Policy in @idempotent, got {name}={options[name]!r}: {owner}."
            )
    return Policy.of(options, base=Policy.of(given))  # type: ignore[arg-type]


_CELERYS = "it is an option of a Celery task: write @app.task(base=IdempotentTask, idempotency={...}), and it there"
_RQS = "it is an option of RQ: give it to enqueue(), or to @job above this decorator"
#: Options of others that are mistaken for ones of the decorator, and where they belong.
_OTHERS = {
    **dict.fromkeys(("acks_late", "autoretry_for", "base", "bind", "ignore_result", "max_retries"), _CELERYS),
    **dict.fromkeys(("connection", "depends_on", "job_id", "job_timeout", "queue", "retry"), _RQS),
}


def check_function(function: Any) -> None:
    """Refuse what has no one ending that could be recorded.

    Raises:
        ConfigurationError: it is no function, or it yields.
    """
    if _is_celery_task(function):
        raise ConfigurationError(
            "Expected a function to make idempotent, got a task of Celery, which @idempotent would not guard where a "
            "worker runs it: leave @idempotent out, and write @app.task(base=IdempotentTask, idempotency={...})."
        )
    wrapped = isinstance(function, (staticmethod, classmethod))  # routines too
    if wrapped or isinstance(function, functools.partial) or not inspect.isroutine(function):
        hint = "decorate the function within" if wrapped else "write def"
        raise ConfigurationError(f"Expected a function to make idempotent, got {function!r}: {hint}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"Expected {function.__qualname__} to return, and it yields: what a generator has done when its caller "
            "stops iterating cannot be replayed. Return a list, or decorate the function that does one item's work."
        )
    try:
        keys.own_signature(function)
    except ValueError as error:
        raise ConfigurationError(
            f"Expected a function with a signature, got {function!r} ({error}): wrap it in one of your own."
        ) from None


def _is_celery_task(thing: Any) -> bool:
    """Return whether this is a task, or a proxy of one, which reading any attribute would evaluate."""
    return any(base.__module__.split(".")[0] == "celery" for base in type(thing).__mro__)


def check_returned(name: str, value: Any) -> Any:
    """Return what a body returned, unless its work is still to be done: a decorator within may hide what it yields.

    Raises:
        ConfigurationError: it is a coroutine or another awaitable, or a generator.
    """
    remedy = (
        "Decorate the coroutine function itself with @idempotent, inside any other decorator, or await or exhaust that "
        "in the body."
    )
    return binding.check_returned(name, value, remedy)


def opened(wanted: object) -> Store:
    """Return the store that a policy names, or has; the same object for the same URL."""
    if not isinstance(wanted, str):
        return cast(Store, wanted)
    # Of threads that come at once each may open one, which connects to nothing; all use the first.
    return _stores.get(wanted) or _stores.setdefault(wanted, open_store(wanted))


def _receiver(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """Return the name of the argument that is the object of a method, "" where the function is none or is bound."""
    within = function.__qualname__.rpartition(".")[0]
    first = next(iter(signature.parameters), "")
    return first if first in ("self", "cls") and within and not within.endswith("<locals>") else ""


def _warn_of_namesakes(function: Callable[..., Any], namespace: str, name: str) -> None:
    """Log that keys take a function for another one, or for itself as declared before with other values.

    Two functions with one name may be one that was edited and loaded again, which only a person knows.
    """
    before = _declared.get((namespace, name))
    was, now = _layers(before() if before is not None else None), _layers(function)
    with suppress(TypeError):  # a few of Python's own cannot be referred to weakly
        _declared[namespace, name] = weakref.ref(function)
    if not (was and now):
        return
    if not _is_same(was[-1], now[-1]):
        logger.warning(
            "%s is the name of two functions, at %s and %s. To the store they are one: one call is answered with the "
            "result of another. Give each a name=.",
            name,
            *(f"{layers[-1].__code__.co_filename}:{layers[-1].__code__.co_firstlineno}" for layers in (was, now)),
        )
    elif len(was) == len(now) and all(map(_is_same, was, now)) and any(map(_is_around_others, was, now)):
        logger.warning(
            "%s is declared again around other values of %s. To the store it is one function: one call is answered "
            "with the result of another. Give each a name=, or pass the value as an argument.",
            name,
            ", ".join(variable for layer in now for variable in (*layer.__code__.co_freevars, *_defaults(layer))),
        )


def _layers(function: Any) -> list[Any]:
    """Return a function and those that it wraps, the innermost last; of them those that are written in Python."""
    found = [function]
    while (within := getattr(found[-1], "__wrapped__", None)) is not None:
        found.append(within)
    return [layer for layer in found if isinstance(getattr(layer, "__func__", layer), FunctionType)]


def _is_same(function: Any, other: Any) -> bool:
    """Return whether two functions are one, perhaps of a file that was loaded again and has other lines above it."""
    code: CodeType = function.__code__
    of_other: CodeType = other.__code__
    if code.co_filename != of_other.co_filename:
        return False
    same_place = code.co_firstlineno == of_other.co_firstlineno
    return same_place or code.replace(co_firstlineno=1) == of_other.replace(co_firstlineno=1)


#: Types whose equal values are the same to a function.
_PLAIN = (str, bytes, int, float, NoneType)


def _is_around_others(function: Any, other: Any) -> bool:
    """Return whether values around two functions that are the same differ, or their defaults."""
    loaded_again = function.__code__ is not other.__code__  # and so are their objects
    return _around(function, loaded_again) != _around(other, loaded_again)


def _around(function: Any, loaded_again: bool) -> list[object]:
    """Return what distinguishes the values around a function, without itself, which is not there yet."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            value = cell.cell_contents
            if getattr(value, "__qualname__", "") != function.__qualname__:
                found.append(value)
    found += _defaults(function).values()
    return [(type(v), v) if isinstance(v, _PLAIN) else None if loaded_again else id(v) for v in found]


def _defaults(function: Any) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return {**dict(zip(positional, given, strict=True)), **(function.__kwdefaults__ or {})}


class FunctionBinding(Binding):
    """One function with its policy, on one store.

    Arguments:
        function: The function, as `check_function` lets it pass.
        policy: Its options.
        name: What keys and events call it (default: its module and qualified name).
        namespace: How its keys begin.
        store: Returns the store, when it is first needed.
        serializer: kombu's name for how results are written.

    Raises:
        ConfigurationError: an option is wrong, or does not fit the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        policy: Policy,
        *,
        name: str | None,
        namespace: str,
        store: Callable[[], Store],
        serializer: str,
    ) -> None:
        given = name is not None
        if name is None:
            name = f"{keys.module_of(function)}.{function.__qualname__}"
        texts: dict[str, object] = {"name": name, "namespace": namespace}
        for option, text in texts.items():
            if not (isinstance(text, str) and text):
                raise ConfigurationError(f"Expected {option} of {function.__qualname__} to be text, got {text!r}.")
        hidden = keys.hides_arguments(function)
        super().__init__(name, keys.own_signature(function), policy, namespace, hidden=hidden)
        self.receiver = _receiver(function, self.signature)
        self.receiver_class = f"{keys.module_of(function)}.{function.__qualname__.rpartition('.')[0]}"
        if policy.large_results == BACKEND:
            raise ConfigurationError(
                f"Expected large_results of {name} to be a URL of files, got {BACKEND!r}, which is Celery's result "
                'backend. Write large_results="file:///var/results" or another URL that fsspec opens.'
            )
        self._open = store
        self._serializer = serializer
        self._codec()  # a wrong serializer raises where it is declared
        self._plain = Codec(serializer=serializer, compress_above=0, result_max_bytes=LARGEST, compression=NONE)
        if not given:
            if function.__name__ in ("<lambda>", "_"):
                raise ConfigurationError(
                    f"Expected the function to have a name of its own, got {name!r}: any other one that is called so "
                    "would have the same keys, and be answered with its results. Give it a name=."
                )
            _warn_of_namesakes(function, namespace, name)

    def _store(self) -> Store:
        return self._open()

    def _codec(self) -> Codec:
        policy = self.policy
        return Codec(
            serializer=self._serializer,
            compress_above=int(policy.compress_above),
            result_max_bytes=int(policy.result_max_bytes),
            compression=policy.compression,
            storage=FileResultStorage(policy.large_results) if policy.large_results else None,
        )

    def as_replayed(self, value: object) -> object:
        """Return what a body returned as a duplicate will get it, so that both get the same; itself where none will."""
        if self._serializer == "pickle" or not (self.policy.store_result and self.policy.result_ttl):
            return value
        read = self._plain.decode(self._plain.encode_value(value))
        return read.data if read.kind is Kind.VALUE else value

    def ending_of(self, error: BaseException) -> Ending:
        """Return the ending to record, given what the body raised."""
        match error:
            case LeaseLost():
                return Release(Reason.REQUEUED)
            case asyncio.CancelledError():
                return Release(Reason.REVOKED)
            case Exception():
                if self.is_final(error):
                    return Outcome(State.FAILED, self.guard.codec.encode_exception(error))
                return Release(Reason.FAILED)
            case _:
                return Release(Reason.SHUTDOWN)


T = TypeVar("T")

#: Threads that call stores for coroutines, at most: so many in which calls begin, and as many in which they end, for
#: which those that begin must not be in the way.
THREADS = 32


class _Threads:
    """Threads of this process that call stores; made when they are needed, and again after a fork.

    Arguments:
        name: What the names of the threads begin with.
        here: Call in the caller's own thread where none can be started (default: do not call).
    """

    def __init__(self, name: str, *, here: bool = False) -> None:
        self._name, self._here, self._pid = name, here, 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call in a thread, in the caller's context.

        Raises:
            StoreUnreachable: no thread can be started.
        """
        if self._pid != os.getpid():
            self._pool, self._pid = ThreadPoolExecutor(THREADS, thread_name_prefix=self._name), os.getpid()
        calls: list[Callable[[], T]] = [functools.partial(contextvars.copy_context().run, call)]
        submitted = threading.Lock()

        def once() -> T:
            with submitted:
                pass
            # From Python 3.14 on, the traceback of what a call raises keeps what the pool was given. That is not to be
            # the call, which may have that error in it.
            return calls.pop()()

        with submitted:
            try:
                return self._pool.submit(once)
            except RuntimeError:
                # The main thread has ended, and pools with it; the loops of other threads go on. Or there are too many
                # threads: then the pool has kept what it was given, which is to find no call there.
                call = calls.pop()
        return self._apart(call)

    def _apart(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        try:
            threading.Thread(target=run, name=self._name).start()
        except RuntimeError as error:
            if not self._here:
                raise StoreUnreachable(
                    f"No thread can call the store ({error}). Allow this process more threads, by pids.max, TasksMax "
                    "or ulimit -u."
                ) from error
            run()  # to record what happened is worth holding up the loop
        return future


_beginning = _Threads("celery-idempotent-begin")
_ending = _Threads("celery-idempotent-end", here=True)


async def run_guarded(
    guard: Guard,
    delivery: Delivery,
    body: Callable[[], Awaitable[Any]],
    conclude: Callable[[Decision], T],
    timeout: float | None = None,
) -> T:
    """Run a coroutine in the caller's task under a lease, or answer it without.

    A caller that is cancelled gives back what it would hold; the end of a body is recorded whatever becomes of its
    caller.

    Arguments:
        guard: The guard.
        delivery: The delivery, whose own body is not called.
        body: Makes the coroutine.
        conclude: Makes the caller's result of the guard's decision, or raises; it may be called in any thread.
        timeout: Seconds to wait for the end to be recorded, which goes on after that (default: None, no limit).

    Raises:
        BaseException: what `Guard.run` raises, and ``conclude``.
    """
    held = await acquired(guard, delivery)
    if not isinstance(held, HeldLease):
        return conclude(held)
    if not held.fence:
        with running(held):
            value = await body()
        return conclude(Ran(value))
    value, error = None, None
    try:
        try:
            with running(held):
                value = await body()
        except BaseException as raised:  # noqa: BLE001 - every ending is recorded, and raised again
            error = raised
        return await finished(guard, delivery, held, value, error, conclude, timeout)
    finally:
        error = None  # as in `Guard.finish`


async def finished(
    guard: Guard,
    delivery: Delivery,
    held: HeldLease,
    value: Any,
    error: BaseException | None,
    conclude: Callable[[Decision], T],
    timeout: float | None,
) -> T:
    """Record the end of a body that returned ``value`` or raised ``error``, as `run_guarded` does."""
    finish = functools.partial(guard.finish, delivery, held, value, error)
    ended = _ending.submit(functools.partial(_concluded, conclude, finish))
    try:
        if isinstance(error, GeneratorExit):  # a coroutine that is closed must not wait
            raise error
        await _done(ended, timeout)
        if ended.done():
            return ended.result()
        _warn_of_waiting(held, timeout)
        if error is not None:
            raise error
        return conclude(_ran(held, value))
    finally:
        del ended, error, finish  # as in `Guard.finish`


def _concluded(conclude: Callable[[Decision], T], finish: Callable[[], Decision]) -> T:
    try:
        return conclude(finish())
    finally:
        del finish  # as in `Guard.finish`


def finish_within(
    timeout: float,
    guard: Guard,
    delivery: Delivery,
    held: HeldLease,
    value: object = None,
    error: BaseException | None = None,
) -> Decision:
    """Record the end of a body as `Guard.finish` does, in a thread that goes on after so many seconds.

    Raises:
        BaseException: what `Guard.finish` raises.
    """
    ended = _ending.submit(functools.partial(guard.finish, delivery, held, value, error))
    try:
        with suppress(WaitTimeout):
            ended.exception(timeout)  # which, unlike result, raises nothing of the body
        if ended.done():
            return ended.result()
        _warn_of_waiting(held, timeout)
        if error is not None:
            raise error
        return _ran(held, value)
    finally:
        del ended, error  # as in `Guard.finish`


def _warn_of_waiting(held: HeldLease, timeout: float | None) -> None:
    logger.warning(
        "%s is answered before its end is recorded, which takes longer than %g s. If a transaction is open in the "
        "store's database until the answer is out, commit it before. Else the store is slow.",
        held.key,
        timeout,
    )


def _ran(held: HeldLease, value: object) -> Ran:
    """Return the decision for a body whose end is not known to be recorded: what it settled itself, or returned."""
    return Ran(held.result(value))


async def acquired(guard: Guard, delivery: Delivery) -> HeldLease | Decision:
    """Return the lease for a body, started, or the decision without one; raises what `Guard.run` raises before it."""
    held: HeldLease | None = None
    looks = 0
    call: Callable[[], HeldLease | Decision | float] = functools.partial(
        _step, guard, delivery, guard.acquire(delivery)
    )
    while True:
        future = _beginning.submit(call)
        try:
            await _done(future)
        except (asyncio.CancelledError, GeneratorExit):
            future.cancel()
            # The store may grant, or have granted, what no call waits for any more.
            future.add_done_callback(functools.partial(_give_back, guard, delivery, held))
            raise
        found = future.result()
        if isinstance(found, HeldLease) and found.fence and found.doubtful:
            # This process was stopped, or the store away, before the loop came to it: another may have run by now.
            held, call = found, functools.partial(_look_up, guard, delivery, found, looks)
            looks += 1
            continue
        if not isinstance(found, float):
            return found
        try:
            await asyncio.sleep(found)
        except (asyncio.CancelledError, GeneratorExit) as error:
            _ending.submit(functools.partial(guard.abandon, delivery, error))
            raise


def _step(guard: Guard, delivery: Delivery, steps: Acquiring) -> HeldLease | Decision | float:
    found = guard.step(delivery, steps)
    if isinstance(found, HeldLease) and found.fence:
        return guard.start(delivery, found)  # here: a loop that is busy may come to it when the lease has run out
    return found


def _look_up(guard: Guard, delivery: Delivery, held: HeldLease, looks: int) -> HeldLease | Decision:
    try:
        if looks == LOOKS:
            raise StoreUnreachable(
                f"The event loop came to {held.key!r} {looks} times only when its lease of "
                f"{held.lease.claim.lease_ttl:g} s may have run out. Let nothing hold up the loop for so long."
            )
        held.check()
    except Exception as error:  # noqa: BLE001 - as of a body that has raised it
        return guard.finish(delivery, held, error=error)
    return held


def _give_back(
    guard: Guard, delivery: Delivery, held: HeldLease | None, future: Future[HeldLease | Decision | float]
) -> None:
    """Give back what a thread was granted, or ``held`` where it did not come to look that up."""
    if not future.cancelled() and future.exception():
        return
    found = held if future.cancelled() else future.result()
    if isinstance(found, HeldLease) and found.fence:
        _ending.submit(lambda: guard.finish(delivery, found, error=asyncio.CancelledError()))
    elif isinstance(found, float):
        _ending.submit(lambda: guard.abandon(delivery, asyncio.CancelledError()))


def running_loop() -> asyncio.AbstractEventLoop:
    """Return asyncio's event loop.

    Raises:
        ConfigurationError: another framework runs this coroutine.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "Expected asyncio's event loop, got none: another framework, such as Trio, runs this coroutine. Run it on "
            'asyncio, as asyncio.run() and anyio\'s backend "asyncio" do.'
        ) from None


async def _done(future: Future[Any], timeout: float | None = None) -> None:
    """Wait until a thread is done, or for so many seconds; its work goes on after that, and if this is cancelled."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()  # an event awaited with a time-out would take a task and more turns of the loop

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake_loop(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(wake_loop)
    timer = None if timeout is None else loop.call_later(timeout, wake)
    try:
        await woken
    finally:
        if timer is not None:
            timer.cancel()
