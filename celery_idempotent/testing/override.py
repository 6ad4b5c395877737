"""The guards that a test puts in the place of those of this process: on one store, on none, or with crashes.

`core/binding.py` consults the override where a task, function or job needs its guard. There is one for the process, and
not for each thread: a worker that a test starts in a thread of its own uses it too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from ..core import binding as bindings
from ..core.binding import Binding, heartbeat
from ..core.guard import Acquiring, Commit, Decision, Delivery, Guard
from ..core.lease import HeldLease
from ..errors import ConfigurationError, LeaseLost
from ..events import RanUnprotected, emit
from ..stores.base import Store
from ..stores.memory import MemoryStore
from ..stores.records import Claim, Lease, Outcome, Release, State
from ..units import hide_password

if TYPE_CHECKING:
    from unittest import TestCase as _TestCase
    from unittest import TestResult
else:
    _TestCase = object

S = TypeVar("S", bound=Store)
T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("celery_idempotent.testing")

#: Deliveries that can be repeated: the newest so many.
REMEMBERED = 1000


class LocalStore(MemoryStore):
    """A store in memory that also settles within a transaction.

    It cannot see the transaction: where the body returns, that was committed, and where it raises, rolled back.
    """

    def __init__(self) -> None:
        super().__init__()
        #: by owner: what is settled once its transaction is committed
        self._uncommitted: dict[str, tuple[Lease, Outcome, float]] = {}

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        """Settle at the end of the body, whatever ``using`` is."""
        record = self.get(lease.key)
        if record is not None and not (record.state is State.IN_PROGRESS and record.owner == lease.owner):
            raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")
        self._uncommitted[lease.owner] = (lease, outcome, ttl)

    def end_transaction(self, lease: Lease, *, committed: bool) -> None:
        """Settle what was settled within a transaction, or drop it."""
        pending = self._uncommitted.pop(lease.owner, None)
        if pending is not None and committed:
            lease, outcome, ttl = pending
            self.settle(lease, outcome, ttl=ttl)


class NoStore(MemoryStore):
    """A store that grants every lease, with the fence of a run that is unprotected, and remembers nothing.

    Arguments:
        noted: Whether each grant is an event (default: it is).
    """

    keeps_history = False

    def __init__(self, *, noted: bool = True) -> None:
        super().__init__()
        self.noted = noted

    def acquire(self, claim: Claim) -> Lease:
        """Grant the lease, with the fence 0."""
        if self.noted:
            emit(RanUnprotected(claim.key, task_id=claim.task_id, holder=claim.holder, error="set_active(False)"))
        return Lease(claim, 0)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Do nothing."""
        return []

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        """Do nothing."""

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        """Do nothing."""

    def release(self, lease: Lease, release: Release) -> bool:
        """Do nothing."""
        return True


class GuardInTest(Guard):
    """A guard that remembers what was delivered, and passes the points at which a crash may be wanted."""

    def acquire(self, delivery: Delivery) -> Acquiring:
        """Remember the delivery, and acquire its lease."""
        override.remember(delivery)
        return super().acquire(delivery)

    def _begin(self, delivery: Delivery, held: HeldLease) -> None:
        super()._begin(delivery, held)
        self._pass("before_effect", delivery, held)

    def _returned(self, delivery: Delivery, held: HeldLease, value: object) -> Decision:
        self._pass("after_effect", delivery, held)
        decision = super()._returned(delivery, held, value)
        self._pass("after_settle", delivery, held)
        return decision

    def _raised(self, delivery: Delivery, held: HeldLease, error: BaseException) -> Decision | None:
        if isinstance(error, WorkerCrash):  # that of a guarded call within this body
            self._die(held, error)
        return super()._raised(delivery, held, error)

    def _find_commit(self, delivery: Delivery, held: HeldLease, error: BaseException | None = None) -> Commit | None:
        if isinstance(held.store, LocalStore):
            held.store.end_transaction(held.lease, committed=error is None)
        return super()._find_commit(delivery, held, error)

    def _pass(self, point: str, delivery: Delivery, held: HeldLease) -> None:
        for crash in override.crashes:
            if crash.wants(point, delivery, held):
                if held.within is not None and isinstance(held.store, LocalStore):
                    held.store.end_transaction(held.lease, committed=True)
                self._die(held, WorkerCrash(crash))

    def _die(self, held: HeldLease, error: WorkerCrash) -> None:
        """Leave the lease as a process leaves it that is killed: nothing renews, releases or settles it."""
        self.heartbeat.forget(held)
        held.open = False
        error.crash.leases.append(held)
        raise error


class CrashPoint:
    """A point at which the next delivery that reaches it dies; `crash_at` makes them."""

    def __init__(self) -> None:
        #: what the dead process held, the innermost first
        self.leases: list[HeldLease] = []

    def wants(self, point: str, delivery: Delivery, held: HeldLease) -> bool:
        """Return whether this delivery is to die here; it is the only one."""
        raise NotImplementedError


class WorkerCrash(BaseException):
    """Ends a delivery as the death of its process would: no handler of exceptions of a body is to catch it."""

    def __init__(self, crash: CrashPoint) -> None:
        super().__init__(f"the worker died here, as {crash!r} has it")
        self.crash = crash


class Delivered(NamedTuple):
    """A delivery of a message or a job, with what Celery's request of it was when it came."""

    delivery: Any
    request: dict[str, Any]


def fresh(value: Any) -> Any:
    """Return arguments as another delivery has them: lists, mappings and sets of its own, around the same objects."""
    if type(value) in (list, tuple, set):
        return type(value)(map(fresh, value))
    return {name: fresh(member) for name, member in value.items()} if type(value) is dict else value


class _Override:
    """The store that is used instead of all others, and what tests want of deliveries."""

    def __init__(self) -> None:
        self.store: Store | None = None
        #: what `set_active` has switched off
        self.store_when_active: Store | None = None
        self.crashes: tuple[CrashPoint, ...] = ()
        #: by the id of a message or job: its last delivery
        self.deliveries: dict[str, Delivered] = {}
        #: how many blocks want the deliveries to be remembered, whatever the store is
        self.watching = 0
        self._guards: WeakKeyDictionary[Binding, Guard] = WeakKeyDictionary()

    def guard_of(self, binding: Binding) -> Guard:
        """Return the guard that a binding uses meanwhile."""
        guard = self._guards.get(binding)
        if guard is None:
            guard = self._guards[binding] = binding.make_guard(GuardInTest, self.store)
        return guard

    def remember(self, delivery: Delivery) -> None:
        """Keep the delivery of a message or a job, to be repeated."""
        job = getattr(delivery, "job", None)
        request = getattr(delivery, "request", None) if hasattr(delivery, "task") else None
        task_id = getattr(request or job, "id", None)
        if task_id is not None:
            while len(self.deliveries) >= REMEMBERED:
                del self.deliveries[next(iter(self.deliveries))]
            found = dict(vars(request)) if request else {}
            found.update({part: fresh(found[part]) for part in ("args", "kwargs") if part in found})
            self.deliveries[task_id] = Delivered(delivery, found)

    def apply(self) -> None:
        """Put in force what was set."""
        self._guards = WeakKeyDictionary()
        in_force = self.store is not None or self.watching
        bindings.substitute = self.guard_of if in_force else None
        bindings.switched_off = isinstance(self.store, NoStore)

    def use(self, store: Store | None) -> None:
        """Use this store from now on; None: each guard its own."""
        self.store, self.deliveries = store, {}
        self.apply()

    @contextmanager
    def watch(self, *crashes: CrashPoint) -> Iterator[None]:
        """Remember deliveries meanwhile, and have them crash at these points."""
        before = self.crashes
        self.crashes, self.watching = (*before, *crashes), self.watching + 1
        self.apply()
        try:
            yield
        finally:
            self.crashes, self.watching = before, self.watching - 1
            self.apply()


override = _Override()


class Block(Generic[T]):
    """A block of a test: a context manager, and a decorator, also of coroutine functions.

    Arguments:
        make: Makes the context manager, once for each block and for each call of what is decorated.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[T]]()

    def __enter__(self) -> T:
        block = self._make()
        value = block.__enter__()
        self._entered.append(block)
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Return the function with its calls in blocks of their own.

        Raises:
            ConfigurationError: it is a class or yields, so that its work is done after its call has returned.
        """
        if isinstance(function, type):
            raise ConfigurationError(
                f"Expected a function to decorate, got the class {function.__qualname__}: decorate its methods, or put "
                "IdempotencyTestMixin before its unittest.TestCase."
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"Expected a function that returns, and {function.__qualname__} yields, which it does after the block: "
                "write a with statement around its yield."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._make():
                    return await function(*args, **kwargs)

            return cast(F, run_async)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._make():
                return function(*args, **kwargs)

        return cast(F, run)


def _block(make: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(functools.partial(contextmanager(make), *args, **kwargs))

    return made


@overload
def override_store() -> Block[MemoryStore]: ...
@overload
def override_store(store: S) -> Block[S]: ...
@_block
def override_store(store: Any = None) -> Iterator[Any]:
    """Have every task, function, job and application of this process use one store, whatever is configured.

    Works as a decorator too, also of coroutine functions. Of several, the innermost is in force. Other processes, such
    as workers that a test starts by a command, do not see it.

    Arguments:
        store: The store (default: an empty one in memory, which also takes ``settle(using=...)``).

    Yields:
        The store.

    Raises:
        ConfigurationError: it is no store.
    """
    if store is not None and (isinstance(store, type) or not hasattr(store, "acquire")):
        raise ConfigurationError(
            f"Expected a store, got {hide_password(repr(store))}. Leave it out for an empty one in memory, or pass "
            "open_store(url)."
        )
    used, before, deliveries = LocalStore() if store is None else store, override.store, override.deliveries
    when_active = override.store_when_active
    override.use(used)
    try:
        yield used
    finally:
        override.use(before)
        override.deliveries, override.store_when_active = deliveries, when_active
        if store is None:
            heartbeat.end(used)  # else a thread would be left of every test, for seconds


@_block
def inactive() -> Iterator[None]:
    """Have every task, function, job and application of this process run unguarded, each time that it is called.

    Works as a decorator too, also of coroutine functions. Keys are made as ever, and ``self.lease`` is there, with
    fence 0.
    """
    with override_store(NoStore(noted=False)):
        yield


def set_active(active: bool) -> None:
    """Switch the guards of this process off, for tests, or on again.

    It is logged, and each run meanwhile emits the event ``RanUnprotected``. A worker does not start while they are off,
    unless a test starts it in a thread. No setting and no environment variable does the same.

    Arguments:
        active: Whether tasks, functions, jobs and applications are guarded.
    """
    if active and not is_active():
        override.use(override.store_when_active)
    elif not active:
        if is_active():
            override.store_when_active = override.store
        logger.warning("Nothing that this process runs is guarded from now on: set_active(False), which is for tests")
        override.use(NoStore())


def is_active() -> bool:
    """Return whether tasks, functions, jobs and applications are guarded in this process."""
    return not bindings.switched_off


class IdempotencyTestMixin(_TestCase):
    """Give each test of a ``unittest.TestCase``, and so of Django's, a store in memory; put it before that class.

    What is remembered follows the rows of Django's ``TestCase``: what tasks did in ``setUpTestData`` is remembered in
    every test, and what they do in a test is forgotten with its rollback.
    """

    #: the store of the class, and within a test its copy
    idempotency_store: MemoryStore

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class of whose bases ``unittest.TestCase`` comes first, which calls no other's methods."""
        super().__init_subclass__(**options)
        for base in cls.__mro__[: cls.__mro__.index(IdempotencyTestMixin)]:
            if (base.__module__, base.__qualname__) == ("unittest.case", "TestCase"):
                raise ConfigurationError(
                    f"Expected IdempotencyTestMixin before unittest.TestCase among the bases of {cls.__qualname__}, "
                    "got it behind, where nothing calls it: write class "
                    f"{cls.__name__}(IdempotencyTestMixin, TestCase)."
                )

    @classmethod
    def setUpClass(cls) -> None:
        """Have the class use a store of its own."""
        own = override_store()
        cls.idempotency_store = own.__enter__()
        cls.addClassCleanup(own.__exit__, None, None, None)
        super().setUpClass()

    def run(self, result: TestResult | None = None) -> TestResult | None:
        """Run the test, with its setUp and tearDown, on a copy of the store of its class."""
        own = type(self).idempotency_store.copy()
        try:
            with override_store(own):
                self.idempotency_store = own
                return super().run(result)
        finally:
            heartbeat.end(own)
