"""What a task may look like, and what is refused when it is declared."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from fractions import Fraction
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar
from uuid import UUID

import pydantic
import pytest
from celery import Celery, Task, _state, shared_task
from celery.worker.request import Request

from celery_idempotent import (
    ConfigurationError,
    Conflict,
    IdempotencyError,
    IdempotentTask,
    KeyReused,
    MissingKey,
    NoLease,
    Policy,
    StoreUnreachable,
    Unique,
    current_lease,
    idempotent,
)
from celery_idempotent.celery import IdempotentRequest
from celery_idempotent.celery.declarations import check_declarations
from celery_idempotent.core.lease import HeldLease, running
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import Claim, Lease, new_owner


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("declared", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = MemoryStore()
    app.conf.task_eager_propagates = True
    yield app
    app.close()


def declare(app: Celery, fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Declare a task as a module would, and have Celery evaluate it."""

    def charge(order_id: str, cents: int = 5) -> str:
        return f"{order_id} {cents}"

    task = app.task(base=options.pop("base", IdempotentTask), shared=False, **options)(fun or charge)
    app.finalize()
    task.name  # noqa: B018 - evaluates Celery's proxy
    return task


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idempotency": {"lese_ttl": 3}}, "lease_ttl"),
        ({"idempotency": {"lease_ttl": "3 parsecs"}}, "lease_ttl"),
        ({"idempotency": {"key": "oder_id"}}, "order_id"),
        ({"idempotency": {"fingerprint": ["cent"]}}, "cents"),
        ({"idempotency": ["key"]}, "mapping"),
        ({"acks_late": False}, "allow_early_ack"),
        ({"Request": Request}, "IdempotentRequest"),
        ({"Request": "celery.worker.request:Request"}, "IdempotentRequest"),
    ],
)
def test_a_wrong_declaration_is_refused_with_what_to_do(app: Celery, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declare(app, **options)


@pytest.mark.parametrize(
    ("name", "value", "message"), [("acks_late", False, "allow_early_ack"), ("Request", Request, "IdempotentRequest")]
)
def test_what_an_instance_sets_for_itself_is_refused_as_in_its_class(
    app: Celery, name: str, value: object, message: str
) -> None:
    class Charge(IdempotentTask):
        name = "charge"

        def __init__(self) -> None:
            setattr(self, name, value)

        def run(self, order_id: str) -> None:
            raise AssertionError

    with pytest.raises(ConfigurationError, match=message):
        app.register_task(Charge())


def test_early_acks_of_a_task_that_is_declared_are_refused_when_a_worker_starts(app: Celery) -> None:
    declare(app).acks_late = False
    with pytest.raises(ConfigurationError, match="allow_early_ack"):
        check_declarations(app)


@pytest.mark.parametrize(
    ("option", "error"),
    [("on_conflict", Conflict), ("on_conflict", IdempotencyError), ("on_store_error", StoreUnreachable)],
)
def test_retries_for_an_error_that_comes_before_the_body_are_refused(
    app: Celery, option: str, error: type[Exception]
) -> None:
    with pytest.raises(ConfigurationError, match=rf'got {error.__name__} with {option}="raise".* Write {option}='):
        declare(app, autoretry_for=(OSError, error), idempotency={"key": "order_id", option: "raise"})


@pytest.mark.parametrize(
    ("options", "error"),
    [({}, Conflict), ({"on_conflict": "raise"}, Exception), ({"on_conflict": "raise"}, StoreUnreachable)],
)
def test_retries_for_the_errors_of_a_body_and_their_bases_are_allowed(
    app: Celery, options: dict[str, str], error: type[Exception]
) -> None:
    """A body that calls a guarded function raises what that raises."""
    assert declare(app, autoretry_for=(error,), idempotency={"key": "order_id", **options}).apply(("A",)).get() == "A 5"


async def coroutine(order_id: str) -> str:
    runs.get().append(order_id)
    return order_id


def generator(order_id: str) -> Iterator[str]:
    runs.get().append(order_id)
    yield order_id


async def async_generator(order_id: str) -> AsyncIterator[str]:
    runs.get().append(order_id)
    yield order_id


class Callee:
    async def __call__(self, order_id: str) -> str:
        return await coroutine(order_id)


partial = functools.update_wrapper(functools.partial(coroutine), coroutine)
callee = functools.update_wrapper(Callee(), coroutine)
LAZY: list[Any] = [coroutine, generator, async_generator, callee]


@pytest.mark.parametrize("body", LAZY, ids=["coroutine", "generator", "async generator", "callable object"])
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (OSError,)}, {"bind": True}], ids=str)
def test_a_body_that_has_done_nothing_when_it_returns_is_refused(
    app: Celery, body: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)Expected .*declared to do its work before it returns, got .*"):
        declare(app, body, name="declared", **options)


@pytest.mark.parametrize("body", [*LAZY, partial])
def test_a_class_whose_run_has_done_nothing_when_it_returns_is_refused(app: Celery, body: Any) -> None:
    task = type("Charge", (IdempotentTask,), {"name": "class based", "run": staticmethod(body)})()
    with pytest.raises(ConfigurationError, match="to do its work before it returns"):
        app.register_task(task)


def test_an_async_call_of_a_class_is_refused(app: Celery) -> None:
    class Awaits(IdempotentTask):
        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return await self.run(*args, **kwargs)

    with pytest.raises(ConfigurationError, match=r"asyncio\.run"):
        declare(app, coroutine, base=Awaits)


def test_a_class_whose_call_runs_coroutines_to_their_end_has_async_bodies(app: Celery) -> None:
    class Runs(IdempotentTask):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return asyncio.run(self.run(*args, **kwargs))

    task = declare(app, coroutine, base=Runs, idempotency={"key": "order_id"})
    assert [task.apply(("A",)).get(), task.apply(("A",)).get()] == ["A", "A"]
    assert runs.get() == ["A"]


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as most do, with a plain function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def test_a_decorator_that_runs_the_coroutine_to_its_end_is_left_alone(app: Celery) -> None:
    @functools.wraps(coroutine)
    def sync(order_id: str) -> str:
        return asyncio.run(coroutine(order_id))

    assert declare(app, sync, idempotency={"key": "order_id"}).apply(("A",)).get() == "A"


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("remember", [(), (Exception,)], ids=["forgets failures", "remembers every failure"])
@pytest.mark.parametrize("body", LAZY[:3])
def test_work_that_is_not_done_when_the_body_returns_fails_and_may_run_once_mended(
    app: Celery, body: Callable[..., Any], remember: Any
) -> None:
    def plain(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    mended = False

    @hidden
    def charge(order_id: str) -> Any:
        return (plain if mended else body)(order_id)

    task = declare(app, charge, idempotency={"key": lambda args: args[0], "remember_failures": remember})
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"to have done its work when it returns, got .* Write"):
            task.apply(("A",))
    assert [record.reason for record in app.conf.idempotency_store.scan()] == ["failed"]
    assert runs.get() == []
    mended = True
    assert task.apply(("A",)).get() == "A"


def test_celerys_results_and_lists_are_no_work_to_be_done(app: Celery) -> None:
    returned: list[Any] = [app.AsyncResult("1"), app.GroupResult("2", [app.AsyncResult("3")]), ["A"], range(2)]

    def charge(number: int) -> Any:
        return returned[number]

    task = declare(app, charge)
    assert [task.apply((number,)).state for number in range(4)] == ["SUCCESS"] * 4


@pytest.mark.parametrize(
    ("module", "members"),
    [
        ("celery_batches", {}),
        ("shop.batches", {"flush_every": 10, "flush_interval": 30, "Strategy": lambda self, task, app, consumer: None}),
    ],
    ids=["package", "copy"],
)
def test_a_class_whose_body_answers_many_messages_at_once_is_refused(
    app: Celery, module: str, members: dict[str, Any]
) -> None:
    batches = type("Batches", (Task,), {"__module__": module, **members})
    both = type("Both", (batches, IdempotentTask), {"abstract": True, "__module__": __name__})
    with pytest.raises(ConfigurationError, match=r"a class of celery-batches, .* for each item"):
        declare(app, base=both, idempotency={"key": "order_id"})


def test_a_wrong_default_of_the_app_is_refused_when_a_task_is_declared(app: Celery) -> None:
    app.conf.idempotency = {"result_tll": "7d"}
    with pytest.raises(ConfigurationError, match="result_ttl"):
        declare(app)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idempotency": {"lease_ttl": "5min"}}, r"^shop\.charge: lease_ttl: expected a duration"),
        ({"unique": {"until": "end"}}, r"^shop\.charge: until: expected one of"),
    ],
)
def test_the_error_for_a_wrong_option_names_the_task(app: Celery, options: dict[str, Any], message: str) -> None:
    @app.task(base=IdempotentTask, name="shop.charge", **options)  # not evaluated before the app is finalized
    def charge(order_id: str) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match=message):
        app.finalize()


def test_a_call_waits_for_another_thread_that_is_about_to_bind_its_task(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As do the first calls of a server's threads: the task has no annotations yet, nor a stack of requests."""
    begun, go_on = threading.Event(), threading.Event()

    class Annotation:
        def annotate(self, task: Any) -> dict[str, Any]:
            if task.name != "shop.charge":
                return {}
            begun.set()
            assert go_on.wait(20)
            return {"unique": "order_id"}

    @app.task(base=IdempotentTask, name="shop.charge")
    def charge(order_id: str) -> None:
        raise AssertionError

    app.conf.task_annotations = (Annotation(),)
    monkeypatch.setattr("celery_idempotent.celery.task.sleep", lambda seconds: go_on.set())
    first = threading.Thread(target=lambda: charge.delay("o-1"))
    first.start()
    try:
        assert begun.wait(20)
        charge.delay("o-2")
    finally:
        go_on.set()
        first.join()
    assert charge._binding.unique == Unique(key="order_id")


@pytest.mark.parametrize(
    ("setting", "options", "message"),
    [
        ("idempotency", {"lease_tl": 9}, "^the app's setting: idempotency: expected options of Policy, got 'lease_tl'"),
        ("idempotency_unique", {"until": "end"}, "^the app's setting idempotency_unique: until: expected one of"),
    ],
)
def test_the_error_for_a_wrong_option_of_the_app_does_not_blame_a_task(
    app: Celery, setting: str, options: dict[str, Any], message: str
) -> None:
    app.conf[setting] = options

    @app.task(base=IdempotentTask, unique="order_id")
    def charge(order_id: str) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match=message):
        app.finalize()


def test_early_acks_are_allowed_to_those_who_say_so(app: Celery) -> None:
    task = declare(app, acks_late=False, idempotency={"allow_early_ack": True})
    assert task.apply(("A",)).get() == "A 5"


def test_a_request_class_of_ones_own_may_derive_from_ours(app: Celery) -> None:
    class Own(IdempotentRequest):
        pass

    assert declare(app, Request=Own).apply(("A",)).get() == "A 5"


def test_late_acks_and_requeueing_of_lost_children_are_on_by_default(app: Celery) -> None:
    app.conf.task_acks_late = False
    task = declare(app)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_options_layer_from_library_over_app_to_task(app: Celery) -> None:
    app.conf.idempotency = {"lease_ttl": 30, "result_ttl": "1h"}
    task = declare(app, idempotency=Policy(key="order_id", lease_ttl="2m"))
    policy = task._binding.policy
    assert (policy.lease_ttl, policy.result_ttl, policy.failure_ttl, policy.key) == (120, 3600, 86400, "order_id")


class Payment(IdempotentTask):
    """A base class as a shop has one for all of its payments."""

    abstract = True
    idempotency = Policy(key="order_id", result_ttl="30d", fingerprint=False)
    unique = Unique(key="order_id", until="done")


def test_options_of_a_task_are_laid_on_top_of_those_of_its_base_classes(app: Celery) -> None:
    task = declare(app, base=Payment, idempotency={"lease_ttl": "5m", "fingerprint": True}, unique={"for": "2h"})
    assert task._binding.policy._options() == {
        "key": "order_id",
        "lease_ttl": 300,
        "result_ttl": 30 * 86400,
        "fingerprint": True,
    }
    assert task._binding.unique._options() == {"key": "order_id", "until": "done", "for": 7200}
    assert task.apply(("A", 5)).get() == task.apply(("A", 5)).get()
    assert [record.key for record in app.conf.idempotency_store.scan()] == [task.key_for("A")]


@pytest.mark.parametrize(
    ("unique", "options"),
    [
        (None, None),
        (False, None),
        (True, {"key": "order_id", "until": "done"}),
        ("cents", {"key": "cents", "until": "done"}),
        (staticmethod(lambda cents: cents), {"until": "done"}),
    ],
)
def test_a_task_may_do_without_the_uniqueness_of_its_base(
    app: Celery, unique: Any, options: dict[str, Any] | None
) -> None:
    found = declare(app, base=Payment, unique=unique)._binding.unique
    assert (found and {name: value for name, value in found._options().items() if not callable(value)}) == options


def test_an_annotation_is_laid_on_top_of_what_the_task_declares(app: Celery) -> None:
    name = f"{__name__}.annotated"
    app.conf.task_annotations = {
        name: {"idempotency": {"lease_ttl": "5m"}, "unique": {"for": "2h"}},
        "*": {"idempotency": None, "acks_late": True},
    }
    task = declare(app, name=name, base=Payment, idempotency={"on_conflict": "raise"})
    assert task._binding.policy._options() == {
        "key": "order_id",
        "lease_ttl": 300,
        "result_ttl": 30 * 86400,
        "on_conflict": "raise",
        "fingerprint": False,
    }
    assert task._binding.unique._options() == {"key": "order_id", "until": "done", "for": 7200}


def test_an_annotation_of_all_tasks_may_end_their_uniqueness(app: Celery) -> None:
    name = f"{__name__}.unique"
    app.conf.task_annotations = {name: {"unique": {"for": "2h"}}, "*": {"unique": False}}
    assert declare(app, name=name, base=Payment)._binding.unique is None


def test_options_for_all_tasks_are_refused_where_some_are_plain_with_what_is_for_all_idempotent_ones(
    app: Celery,
) -> None:
    app.conf.task_annotations = {"*": {"idempotency": {"lease_ttl": "5m"}}}

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    with pytest.raises(ConfigurationError, match=r'name the tasks instead of "\*"; .* set app\.conf\.idempotency\.'):
        declare(app)


def test_a_property_of_a_class_may_make_the_options(app: Celery) -> None:
    class Tenant(IdempotentTask):
        abstract = True
        idempotency = property(lambda self: {"key": "order_id", "scope": lambda order_id: self.name})

    task = declare(app, base=Tenant, idempotency={"lease_ttl": "5m"})
    assert (task._binding.policy.key, task._binding.policy.lease_ttl) == ("order_id", 300)


def guarded_twice(app: Celery, outer: dict[str, Any], **inner: Any) -> Any:
    def charge(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    function = idempotent(store=app.conf.idempotency_store, key="order_id", **inner)(charge)
    return declare(app, function, name=f"{__name__}.{charge.__qualname__}", **outer)


def test_a_guard_around_a_guard_with_the_same_keys_is_refused(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected one guard of .* Leave @idempotent out"):
        guarded_twice(app, {"idempotency": {"key": "order_id"}})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"base": None}, {}),
        ({}, {}),
        ({"idempotency": {"key": "order_id"}}, {"name": "another"}),
        ({"idempotency": {"key": "order_id"}}, {"namespace": "another"}),
    ],
    ids=["a plain task", "by task id", "another name", "another namespace"],
)
def test_a_task_may_run_a_guarded_function(app: Celery, outer: dict[str, Any], inner: dict[str, Any]) -> None:
    task = guarded_twice(app, outer, **inner)
    assert [task.apply(("A",)).get() for _ in range(3)] == ["A"] * 3
    assert runs.get() == ["A"]


def test_djangos_namespaced_settings_are_read() -> None:
    class Settings:  # as a module of settings is written
        CELERY_BROKER_URL = "memory://"
        CELERY_IDEMPOTENCY_STORE = MemoryStore()
        CELERY_IDEMPOTENCY: ClassVar[dict[str, Any]] = {"result_ttl": "7d"}
        CELERY_IDEMPOTENCY_NAMESPACE = "shop"

    app = Celery("django", set_as_current=False)
    app.config_from_object(Settings, namespace="CELERY")
    task = declare(app, idempotency={"key": "order_id"})
    assert task.apply(("A",)).get() == "A 5"
    assert task._binding.guard.store is Settings.CELERY_IDEMPOTENCY_STORE
    assert task._binding.policy.result_ttl == 7 * 86400
    [record] = Settings.CELERY_IDEMPOTENCY_STORE.scan()
    assert record.key.startswith("shop:")


runs: contextvars.ContextVar[list[str]] = contextvars.ContextVar("runs")


@pytest.fixture(autouse=True)
def fresh_runs() -> None:
    runs.set([])


class CallsRun:
    """Flask's documented pattern: a __call__ that never calls ours."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("context")
        return self.run(*args, **kwargs)  # type: ignore[attr-defined]


class CallsSuper:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("context")
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class MixedBefore(CallsRun, IdempotentTask):
    pass


class MixedSuper(CallsSuper, IdempotentTask):
    pass


class Defined(IdempotentTask):
    __call__ = CallsRun.__call__


class Twice(MixedSuper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("outer")
        return super().__call__(*args, **kwargs)


class Copied(IdempotentTask):
    """As a decorator of methods writes it, which copies attributes too."""

    @functools.wraps(IdempotentTask.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("context")
        return self.run(*args, **kwargs)


class CopiedTwice(Copied):
    @functools.wraps(Copied.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("outer")
        return super().__call__(*args, **kwargs)


def test_the_guard_stays_outermost_around_an_annotation_that_copies_its_attributes(app: Celery) -> None:
    def around(inner: Any) -> Any:
        @functools.wraps(inner)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            runs.get().append("context")
            return self.run(*args, **kwargs)

        return call

    def charge(order_id: str) -> str:
        runs.get().append("run")
        return order_id

    app.conf.task_annotations = {"charge": {"@__call__": around}}
    task = declare(app, charge, name="charge", idempotency={"key": "order_id"})
    assert [task.apply(("A",)).get() for _ in range(3)] == ["A"] * 3
    assert runs.get() == ["context", "run"]


@pytest.mark.parametrize("base", [MixedBefore, MixedSuper, Defined, Twice, Copied, CopiedTwice])
def test_the_guard_stays_outermost_whatever_a_subclass_does_with_call(app: Celery, base: type) -> None:
    def charge(order_id: str) -> str:
        runs.get().append("run")
        return order_id

    task = declare(app, charge, base=base, idempotency={"key": "order_id"})
    assert [task.apply(("A",)).get() for _ in range(3)] == ["A"] * 3
    assert runs.get() in (["context", "run"], ["outer", "context", "run"])


class ContextTask(Task):
    """As Flask's documentation has it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs.get().append("context")
        return self.run(*args, **kwargs)


class ContextBehind(IdempotentTask, ContextTask):
    abstract = True


class ContextCalled(ContextBehind):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ContextTask.__call__(self, *args, **kwargs)


def test_a_call_that_stands_where_nothing_calls_it_is_refused(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match=r"class Base\(ContextTask, IdempotentTask\)"):
        declare(app, base=ContextBehind)


def test_a_class_may_call_what_stands_behind_the_guard(app: Celery) -> None:
    assert declare(app, base=ContextCalled).apply(("A",)).get() == "A 5"
    assert runs.get() == ["context"]


def test_a_direct_call_is_a_plain_call_without_a_lease(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> Any:
        runs.get().append(order_id)
        return getattr(self, "lease", "none")

    task = declare(app, charge, bind=True, idempotency={"key": "order_id"})
    assert [task("A"), task("A")] == ["none", "none"]
    assert not hasattr(task, "lease")
    assert runs.get() == ["A", "A"]


def test_a_direct_call_that_reads_the_lease_is_told_how_to_get_one(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> str:
        return str(self.lease.derived_key("gateway"))

    task = declare(app, charge, name="shop.charge", bind=True, idempotency={"key": "order_id"})
    with pytest.raises(NoLease, match=r"delivery of shop\.charge, got a direct call: .* celery_idempotent\.testing"):
        task("A")
    assert len(task.apply(("A",)).get()) == 32


def test_a_task_called_within_a_guarded_body_does_not_get_the_lease_of_that_body(app: Celery) -> None:
    """Two calls within it would give a gateway one key for two payments."""

    def charge(self: Any, order_id: str) -> str:
        return str(self.lease.derived_key("gateway"))

    def settle(self: Any, day: str) -> Any:
        with pytest.raises(NoLease):
            inner("A")
        return current_lease() is self.lease

    inner = declare(app, charge, name="charge", bind=True, idempotency={"key": "order_id"})
    outer = declare(app, settle, name="settle", bind=True, idempotency={"key": "day"})
    assert outer.apply(("monday",)).get()

    @idempotent(store="memory://", key="day")
    def by_function(day: str) -> None:
        with pytest.raises(NoLease):
            inner("A")

    by_function("monday")


def test_a_direct_call_gets_a_lease_of_no_run_that_was_put_in_its_context(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> str:
        return str(self.lease.key)

    task = declare(app, charge, bind=True, idempotency={"key": "order_id"})
    claim = Claim("the test's", new_owner(), holder="a test", lease_ttl=60, keep_ttl=60)
    with running(HeldLease(MemoryStore(), Lease(claim, 1), monotonic())):
        assert task("A") == "the test's"


def test_a_hook_of_a_task_has_the_lease_after_a_run_and_none_after_a_replay(app: Celery) -> None:
    held: list[Any] = []

    class Hooked(IdempotentTask):
        def on_success(self, *args: Any) -> None:
            held.append(getattr(self, "lease", None))

    def charge(order_id: str) -> str:
        return order_id

    task = declare(app, charge, base=Hooked, idempotency={"key": "order_id"})
    for _ in range(2):
        assert task.apply(("A",)).get() == "A"
    assert [each is not None for each in held] == [True, False]


def test_calls_of_tasks_inside_a_body_are_plain_calls_also_of_the_task_itself(app: Celery) -> None:
    def other(order_id: str) -> str:
        runs.get().append("other")
        return order_id

    other_task = declare(app, other, name="other", idempotency={"key": "order_id"})

    def charge(self: Any, order_id: str, depth: int = 2) -> Any:
        runs.get().append(f"charge {depth}")
        other_task(order_id)
        # A nested call sees its caller's request in one Celery (5.7), and an empty one in another (5.4).
        held = hasattr(self, "lease")
        assert held is not self.request.called_directly
        return depth and [self(order_id, depth - 1), held or depth < 2]

    task = declare(app, charge, name="charge", bind=True, idempotency={"key": "order_id", "fingerprint": False})
    first = task.apply(("A",)).get()
    assert task.apply(("A",)).get() == first
    assert runs.get() == ["charge 2", "other", "charge 1", "other", "charge 0", "other"]


def test_an_eager_call_is_guarded_like_a_delivery(app: Celery) -> None:
    def charge(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    task = declare(app, charge)
    assert [task.apply(("A",), idempotency_key="req-1").get() for _ in range(2)] == ["A", "A"]
    assert runs.get() == ["A"]


def test_an_app_whose_every_task_is_idempotent_leaves_celerys_own_alone() -> None:
    app = Celery("all", broker="memory://", backend="cache+memory://", task_cls=IdempotentTask, set_as_current=False)
    app.conf.idempotency_store = MemoryStore()
    app.finalize()
    assert isinstance(app.tasks["celery.map"], IdempotentTask)
    assert app.tasks["celery.accumulate"].apply((1, 2)).get() == (1, 2)
    assert list(app.conf.idempotency_store.scan()) == []


@pytest.mark.parametrize("name", ["celery.charge", "celery_idempotent.charge"])
@pytest.mark.parametrize("options", [{"idempotency": {"key": "order_id"}}, {"unique": True}], ids=str)
def test_options_of_a_task_whose_name_is_never_guarded_are_refused(
    app: Celery, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=rf"got {name} with {next(iter(options))}=.* Give it another name"):
        declare(app, name=name, **options)


def test_options_of_an_apps_task_class_are_no_options_of_celerys_own_tasks() -> None:
    class Base(IdempotentTask):
        abstract = True
        idempotency: ClassVar[dict[str, Any]] = {"result_ttl": 60}

    app = Celery("all", broker="memory://", task_cls=Base, set_as_current=False)
    app.conf.update(idempotency_store="memory://", task_annotations={"*": {"idempotency": {"result_ttl": 90}}})
    app.finalize()
    assert isinstance(app.tasks["celery.map"], Base)


def test_class_based_and_shared_tasks_are_guarded_too(app: Celery) -> None:
    class Charge(IdempotentTask):
        name = "class based"
        idempotency: ClassVar[dict[str, Any]] = {"key": "order_id"}

        def run(self, order_id: str) -> str:
            runs.get().append(order_id)
            return order_id

    task = app.register_task(Charge())
    assert [task.apply(("A",)).get(), task.apply(("A",)).get()] == ["A", "A"]

    @shared_task(base=IdempotentTask, name="shared", idempotency={"key": "order_id"})
    def shared(order_id: str) -> str:
        runs.get().append("shared")
        return order_id

    app.set_current()
    assert [shared.apply(("A",)).get(), shared.apply(("A",)).get()] == ["A", "A"]
    assert runs.get() == ["A", "shared"]


def test_without_any_redis_and_without_a_store_the_first_use_says_what_to_set() -> None:
    app = Celery("none", broker="memory://", backend="cache+memory://", set_as_current=False)
    task = declare(app)
    with pytest.raises(ConfigurationError, match="idempotency_store"):
        assert task._binding.guard


def test_an_app_without_a_store_that_gets_a_task_of_another_app_is_given_its_name_and_what_keeps_it_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_state, "_on_app_finalizers", {*_state._on_app_finalizers})
    shop, other = (Celery(name, broker="memory://", set_as_current=False) for name in ("shop", "other"))
    shop.conf.idempotency_store = "memory://"

    def charge(order_id: str) -> None: ...

    shop.task(base=IdempotentTask, name="shop.charge", idempotency={"key": "order_id"})(charge)
    other.finalize()
    message = rf"what shop\.charge of {__name__} has done: .* in the app other, .* declare it there with shared=False"
    with pytest.raises(ConfigurationError, match=message):
        assert other.tasks["shop.charge"]._binding.guard


@pytest.mark.parametrize("url", ["reddis://localhost", "localhost:6379", "postgres//x", 17])
def test_a_store_that_cannot_be_is_refused(app: Celery, url: object) -> None:
    app.conf.idempotency_store = url
    with pytest.raises(ConfigurationError, match="Expected"):
        assert declare(app)._binding.guard


def keys_of(app: Celery, key: Any, *calls: tuple[Any, ...]) -> list[str]:
    task = declare(app, idempotency={"key": key, "fingerprint": False})
    for call in calls:
        task.apply(call)
    return sorted(record.key.rpartition("::")[2] for record in app.conf.idempotency_store.scan())


def boom(order_id: str) -> str:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (boom, "boom"),
        (lambda order_id: None, "None"),
        (lambda order_id: "", "key"),
        (lambda order_id: object(), "object"),
    ],
)
def test_a_key_that_cannot_be_told_fails_the_task_before_it_runs(app: Celery, key: Any, text: str) -> None:
    def charge(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    task = declare(app, charge, idempotency={"key": key})
    with pytest.raises(MissingKey, match=text):
        task.apply(("A",))
    assert runs.get() == []


def test_a_parameter_with_a_default_that_a_deploy_adds_changes_nothing_for_duplicates(app: Celery) -> None:
    def before(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    def after(order_id: str, cents: int = 5, *more: int, note: str = "") -> str:
        return before(order_id)

    new = Celery("deployed", broker="memory://", backend="cache+memory://", set_as_current=False)
    new.conf.update(idempotency_store=app.conf.idempotency_store, task_eager_propagates=True)
    old, deployed = (
        declare(of, body, name="shop.charge", idempotency={"key": "order_id"})
        for of, body in ((app, before), (new, after))
    )
    assert [old.apply(("A",)).get(), deployed.apply(("A",)).get(), deployed.apply(("A", 5)).get()] == ["A", "A", "A"]
    assert [deployed.apply(("B",)).get(), old.apply(("B",)).get()] == ["B", "B"]  # and back again
    for other in ({"cents": 6}, {"note": "x"}):
        with pytest.raises(KeyReused):
            deployed.apply(("A",), other)
    assert runs.get() == ["A", "B"]
    new.close()


def test_an_argument_that_json_cannot_carry_is_compared_by_value(app: Celery) -> None:
    def charge(order_id: str, cents: Any) -> str:
        runs.get().append(order_id)
        return order_id

    task = declare(app, charge, idempotency={"key": "order_id"})
    assert [task.apply(("A", Fraction(1, 2))).get(), task.apply(("A", Fraction(2, 4))).get()] == ["A", "A"]
    with pytest.raises(KeyReused):
        task.apply(("A", Fraction(1, 3)))
    with pytest.raises(MissingKey, match="argument 'cents'"):
        task.apply(("A", lambda: 1))
    assert runs.get() == ["A"]


def test_no_arguments_are_compared_where_the_key_is_the_task_id(app: Celery) -> None:
    assert declare(app).apply((len, iter(()))).get().startswith("<built-in function len> <")


@pytest.mark.parametrize("key", [None, "order_id"])
@pytest.mark.parametrize("kind", ["redis", "sqlite"])
def test_a_task_id_that_no_store_could_hold_fails_the_task_before_it_runs(
    app: Celery, redis_url: str, tmp_path: Path, kind: str, key: str | None
) -> None:
    app.conf.idempotency_store = redis_url if kind == "redis" else f"sqlite:///{tmp_path}/store.sqlite3"

    def charge(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    task = declare(app, charge, idempotency={"key": key})
    with pytest.raises(MissingKey, match=r"task id that is text, which UTF-8 can encode, got 'T-\\ud800'"):
        task.apply(("A",), task_id="T-\ud800")
    assert runs.get() == []
    assert task.apply(("A",), task_id="T-\N{SNOWMAN}").get() == "A"


def test_a_task_id_is_text(app: Celery) -> None:
    """Celery takes others where the broker does; a store would refuse each claim, and the slot wait for it for ever."""
    task = declare(app, idempotency={"key": "order_id"})
    assert task.apply_async(("A",), task_id=UUID(int=7)).id == str(UUID(int=7))
    with pytest.raises(MissingKey, match="Expected a task id that is text, which UTF-8 can encode, got 7"):
        task.apply(("A",), task_id=7)


def test_an_empty_key_from_the_producer_fails_the_task_before_it_runs(app: Celery) -> None:
    """As of one that knows the task by its name alone; with the task itself it is refused where it is published."""
    with pytest.raises(MissingKey, match="empty"):
        declare(app).apply(("A",), headers={"idempotency_key": ""}).get()


def test_keys_are_names_several_names_or_a_callable(app: Celery) -> None:
    assert keys_of(app, "order_id", ("A",), ("A", 6), ("B",)) == ["A", "B"]


def test_several_names_make_one_key(app: Celery) -> None:
    assert len(keys_of(app, ["order_id", "cents"], ("A",), ("A", 5), ("A", 6))) == 2


def test_the_scope_tells_tenants_apart(app: Celery) -> None:
    def charge(order_id: str) -> str:
        runs.get().append(order_id)
        return order_id

    task = declare(app, charge, idempotency={"key": "order_id", "scope": "tenant"})
    for tenant in ("a", "b", "a"):
        task.apply(("1",), headers={"tenant": tenant})
    assert runs.get() == ["1", "1"]
    with pytest.raises(MissingKey, match="tenant"):
        task.apply(("1",))


@pytest.mark.parametrize("eager", [True, False])
def test_where_nothing_remembers_the_error_names_what_a_suite_of_eager_tests_uses(eager: bool) -> None:
    app = Celery("nowhere", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=eager, task_eager_propagates=True)

    def charge(order_id: str) -> None: ...

    task = declare(app, charge, idempotency={"key": "order_id"})
    with pytest.raises(ConfigurationError, match="Expected somewhere to remember") as caught:
        task.apply(("A",))
    assert ("the fixture idempotency_store" in str(caught.value)) == eager


# -- decorators within -------------------------------------------------------------------------------------------------


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def bound_with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, "session", *args, **kwargs)

    return wrapper


def test_names_of_arguments_that_a_decorator_hides_are_refused(app: Celery) -> None:
    def charge(session: str, order_id: str, cents: int = 0) -> None: ...

    def bound(self: Any, session: str, order_id: str, cents: int = 0) -> None: ...

    class Charge(IdempotentTask):
        name = "shop.by_class"
        idempotency: ClassVar = {"key": "order_id"}

        @bound_with_session
        def run(self, session: str, order_id: str) -> None: ...

    hidden: list[Callable[[], Any]] = [
        lambda: declare(app, with_session(charge), idempotency={"key": "order_id"}),
        lambda: declare(app, bound_with_session(bound), name="b", bind=True, idempotency={"key": "order_id"}),
        lambda: declare(app, with_session(charge), name="c", typing=False, idempotency={"key": "order_id"}),
        lambda: declare(app, with_session(charge), name="d", autoretry_for=(OSError,), idempotency={"key": "order_id"}),
        lambda: app.register_task(Charge()),
    ]
    for declaration in hidden:
        with pytest.raises(ConfigurationError, match="a decorator hides"):
            declaration()


def test_a_callable_makes_the_key_of_what_a_decorator_hides(app: Celery) -> None:
    def charge(session: str, order_id: str, cents: int = 0) -> str:
        runs.get().append(order_id)
        return order_id

    key = {"key": lambda args=(), order_id=None: order_id or args[0], "fingerprint": False}
    task = declare(app, with_session(charge), idempotency=key)
    calls = [(("ORD-1",), {}), (("ORD-1", 0), {}), (("ORD-2", 0), {}), ((), {"order_id": "ORD-2"})]
    assert [task.apply(*call).get() for call in calls] == ["ORD-1", "ORD-1", "ORD-2", "ORD-2"]
    assert runs.get() == ["ORD-1", "ORD-2"]


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (OSError,)}])
def test_a_decorator_that_says_what_it_takes_hides_nothing(app: Celery, bind: bool, options: dict[str, Any]) -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        wrapper.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return wrapper

    def charge(order_id: str, cents: int = 0) -> str:
        return order_id

    def bound(self: Any, order_id: str, cents: int = 0) -> str:
        return order_id

    body = logged(bound if bind else charge)
    task = declare(app, body, bind=bind, idempotency={"key": "order_id"}, **options)
    assert [task.apply(("A",)).get(), task.apply(kwargs={"order_id": "A"}).get()] == ["A", "A"]
    assert task.key_for("A").endswith(":A")


def test_the_body_of_a_class_may_be_any_callable(app: Celery) -> None:
    class Charging:
        def __call__(self, order_id: str, cents: int = 5) -> str:
            return f"{order_id} {cents}"

    for body in (Charging(), staticmethod(functools.partial(Charging(), cents=6))):
        options = {"name": f"by.{type(body).__name__}", "run": body, "idempotency": {"key": "order_id"}}
        task = app.register_task(type("Charge", (IdempotentTask,), options)())
        assert task.apply(("A",)).get() == task.apply(kwargs={"order_id": "A"}).get()


def test_what_instruments_a_task_afterwards_hides_nothing(app: Celery) -> None:
    """Sentry replaces ``run`` of the tasks of a worker, as Celery does for ``autoretry_for``."""

    def charge(order_id: str, cents: int = 5) -> str:
        runs.get().append(order_id)
        return order_id

    for options in ({}, {"autoretry_for": (OSError,)}):
        task = declare(app, charge, name=f"t{len(options)}", idempotency={"key": "order_id"}, **options)
        instrumented = task.run

        @functools.wraps(instrumented)
        def run(*args: Any, _run: Callable[..., Any] = instrumented, **kwargs: Any) -> Any:
            return _run(*args, **kwargs)

        task.run = run
        assert [task.apply(("A",)).get(), task.apply(kwargs={"order_id": "A", "cents": 5}).get()] == ["A", "A"]
    assert runs.get() == ["A", "A"]


class Cart(pydantic.BaseModel):
    cents: int


if "pydantic" in inspect.signature(Celery._task_from_fun).parameters:  # since Celery 5.5

    @pytest.mark.parametrize("bind", [False, True])
    def test_what_celery_wraps_for_pydantic_keeps_its_names(app: Celery, bind: bool) -> None:
        def charge(order_id: str, cart: Cart) -> str:
            runs.get().append(order_id)
            return f"{order_id} {cart.cents}"

        def bound(self: Any, order_id: str, cart: Cart) -> str:
            return charge(order_id, cart)

        task = declare(app, bound if bind else charge, bind=bind, pydantic=True, idempotency={"key": "order_id"})
        assert [task.apply(("A", {"cents": 1})).get(), task.apply(("A",), {"cart": {"cents": 1}}).get()] == [
            "A 1",
            "A 1",
        ]
        with pytest.raises(KeyReused):
            task.apply(("A", {"cents": 2}))
        assert runs.get() == ["A"]


if hasattr(Task, "_dump_pydantic_arguments"):  # since Celery 5.7

    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    def test_a_model_in_a_call_in_place_or_for_its_key_is_what_its_message_has(app: Celery, serializer: str) -> None:
        def charge(cart: Cart) -> str:
            runs.get().append(cart.cents)
            return f"{cart.cents}"

        def key(cart: Any) -> int:
            cents: int = cart.cents if serializer == "pickle" else cart["cents"]
            return cents

        task = declare(app, charge, pydantic=True, serializer=serializer, idempotency={"key": key})
        calls: list[tuple[Any, ...]] = [((Cart(cents=5),),), ((), {"cart": Cart(cents=5)})]
        if serializer == "json":
            calls.append((({"cents": 5},),))
        assert [task.apply(*call).get() for call in calls] == ["5"] * len(calls)
        assert runs.get() == [5]
        [record] = app.conf.idempotency_store.scan()
        assert task.key_for(Cart(cents=5)) == task.key_for(cart=Cart(cents=5)) == record.key
