"""What is declared wrongly is told then, and what is declared well keeps its shape."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import math
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import attr
import pydantic
import pytest
from celery import Celery, Task, shared_task

from celery_idempotent import ConfigurationError, KeyReused, Policy, current_lease, idempotent
from celery_idempotent.rq import idempotent as rq_idempotent
from celery_idempotent.stores.memory import MemoryStore
from tests.support.celery.apps import private_shared_tasks

BOTH: dict[str, Any] = {"store": "memory://", "key": "order"}


def plain(order: str, cents: int = 999) -> str:
    """Charge an order."""
    return order


@idempotent(store="memory://", key="order")
def of_a_module(order: str) -> str:
    return order


# -- told when declared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": "order"}, r"Expected store of plain, got none.*store=\"redis://"),
        ({"store": "memory://"}, "Expected key of plain, got none"),
        ({}, "Expected store and key of plain"),
        ({**BOTH, "kee": 1}, r"got 'kee': did you mean 'key'"),
        ({**BOTH, "key": "ordre"}, r"got 'ordre': did you mean 'order'"),
        ({**BOTH, "fingerprint": ["sents"]}, r"got 'sents': did you mean 'cents'"),
        ({**BOTH, "lease_ttl": 0}, "lease_ttl"),
        ({**BOTH, "on_conflict": "wiat"}, "on_conflict"),
        ({**BOTH, "scope": "tenant"}, r"the name of a header, and a call has none\. Write scope=lambda tenant: tenant"),
        ({**BOTH, "large_results": "backend"}, "Celery's result backend"),
        ({**BOTH, "serializer": "jason"}, "serializer='jason'"),
        ({**BOTH, "compression": "zippy"}, "compression"),
        ({**BOTH, "name": ""}, "Expected name of .*plain to be text, got ''"),
        ({**BOTH, "name": 7}, "Expected name of .*plain to be text, got 7"),
        ({**BOTH, "namespace": ""}, "Expected namespace of .*plain to be text"),
        ({**BOTH, "store": ""}, "store"),
        ({**BOTH, "bind": True}, r"got bind=True: .* write @app.task\(base=IdempotentTask"),
        ({**BOTH, "retry": 3}, r"got retry=3: it is an option of RQ: give it to enqueue\(\)"),
    ],
    ids=str,
)
def test_a_wrong_option_is_told_when_the_function_is_declared(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        idempotent(**options)(plain)


@pytest.mark.parametrize("written", [plain, len, lambda order: order], ids=["def", "builtin", "lambda"])
def test_parentheses_that_are_missing_are_told(written: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"write @idempotent\(\.\.\.\), with parentheses"):
        idempotent(written)


def test_that_rq_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutRq:
        @staticmethod
        def find_spec(name: str, *args: object) -> None:
            if name == "rq":
                raise ModuleNotFoundError("No module named 'rq'", name="rq")

    for name in [name for name in sys.modules if name == "rq" or name.startswith(("rq.", "celery_idempotent.rq."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutRq, *sys.meta_path])
    for name in ("idempotent", "IdempotentWorker"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'celery-idempotent\[rq\]'"):
            getattr(import_module("celery_idempotent.rq"), name)
    monkeypatch.setitem(sys.modules, "celery_idempotent.core.lease", None)
    with pytest.raises(ModuleNotFoundError, match=r"celery_idempotent\.core\.lease"):
        getattr(import_module("celery_idempotent.rq"), "current_lease")  # noqa: B009 - as its users import it


def generator(order: str) -> Iterator[str]:
    yield order


async def async_generator(order: str) -> AsyncIterator[str]:
    yield order


@pytest.mark.parametrize("function", [generator, async_generator])
def test_what_yields_is_refused(function: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected {function.__name__} to return, and it yields"):
        idempotent(**BOTH)(function)


class Shop:
    def __call__(self, order: str) -> str:
        return order


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (staticmethod(plain), "decorate the function within"),
        (classmethod(plain), "decorate the function within"),
        (functools.partial(plain, cents=1), "write def"),
        (Shop(), "write def"),
        (Shop, "write def"),
        (property(plain), "write def"),
        (None, "write def"),
        (max, "with a signature"),
    ],
    ids=lambda thing: thing if isinstance(thing, str) else type(thing).__name__,
)
def test_what_is_no_function_is_refused(thing: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        idempotent(**BOTH)(thing)


TASKS: dict[str, Callable[[Celery], Any]] = {
    "lazy": lambda app: app.task(plain),
    "evaluated": lambda app: app.task(plain, lazy=False),
    "shared": lambda app: shared_task(plain),
    "of a class": lambda app: Task(),
    "of an app that may not be finalized": lambda app: Celery(set_as_current=False, autofinalize=False).task(plain),
}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS.keys())
@pytest.mark.parametrize("decorator", [idempotent, rq_idempotent], ids=["of functions", "of RQ"])
def test_a_task_of_celery_is_refused_with_what_to_write(make: Callable[[Celery], Any], decorator: Any) -> None:
    refusal = pytest.raises(ConfigurationError, match=r"got a task of Celery.* write @app\.task\(base=IdempotentTask")
    with private_shared_tasks(), refusal:
        decorator(**BOTH)(make(Celery("functions", set_as_current=False)))


# -- told when called: a decorator within may hide what it yields ------------------------------------------------------


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as most do, with a plain function."""

    @functools.wraps(function)
    def call(order: str) -> Any:
        return function(order)

    return call


async def coroutine(order: str) -> str:
    return order


@contextlib.contextmanager
def managed(order: str) -> Iterator[str]:
    yield order


@contextlib.asynccontextmanager
async def managed_async(order: str) -> AsyncIterator[str]:
    yield order


def handed_to_a_pool(order: str) -> Future[str]:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(plain, order)


UNFINISHED = [coroutine, generator, async_generator, managed, managed_async, handed_to_a_pool]


@pytest.mark.parametrize("remember", [(), (Exception,)], ids=["forgets failures", "remembers every failure"])
@pytest.mark.parametrize("function", UNFINISHED)
def test_work_that_is_not_done_when_its_function_returns_is_no_result(function: Any, remember: Any) -> None:
    store = MemoryStore()
    call = idempotent(store=store, key="order", remember_failures=remember)(hidden(function))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"Expected .* to have done its work when it returns"):
            call("ORD-1")
    assert [record.reason for record in store.scan()] == ["failed"]


# -- shape -------------------------------------------------------------------------------------------------------------


def test_a_function_keeps_its_name_its_words_and_its_signature() -> None:
    call = idempotent(**BOTH)(plain)
    assert (call.__name__, call.__qualname__, call.__module__) == ("plain", "plain", __name__)
    assert call.__doc__ == "Charge an order."
    assert inspect.signature(call) == inspect.signature(plain)
    assert call.__wrapped__ is plain  # type: ignore[attr-defined]
    assert call.__wrapped__("ORD-1") == "ORD-1"  # type: ignore[attr-defined]
    assert not inspect.iscoroutinefunction(call)


def test_a_coroutine_function_stays_one() -> None:
    call = idempotent(**BOTH)(coroutine)
    assert inspect.iscoroutinefunction(call)
    assert asyncio.run(call("ORD-1")) == "ORD-1"
    assert asyncio.run(call.__wrapped__("ORD-1")) == "ORD-1"  # type: ignore[attr-defined]


def test_a_function_of_a_module_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(of_a_module)) is of_a_module


def test_options_may_be_shared_and_overruled() -> None:
    shared = Policy(store=MemoryStore(), key="order", on_duplicate="raise")
    call = idempotent(shared, on_duplicate="replay")(plain)
    assert [call("ORD-1"), call("ORD-1")] == ["ORD-1", "ORD-1"]
    assert idempotent({"store": MemoryStore(), "key": "order"})(plain)("ORD-1") == "ORD-1"


def test_keys_are_called_as_the_function_is_unless_it_is_said_otherwise() -> None:
    def key(order: str) -> str:
        lease = current_lease()
        assert lease is not None
        return lease.key

    where = f"{__name__}.{key.__qualname__}"
    assert idempotent(**BOTH)(key)("1") == f"idem:{where}::1"
    assert idempotent(**BOTH, name="charge", namespace="shop")(key)("1") == "shop:charge::1"


# -- decorators within -------------------------------------------------------------------------------------------------


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def test_names_of_arguments_that_a_decorator_hides_are_refused() -> None:
    @with_session
    def charge(session: str, order: str, cents: int = 0) -> str:
        return order

    for options in ({}, {"fingerprint": False}, {"key": lambda args: args[0], "fingerprint": ["cents"]}):
        with pytest.raises(ConfigurationError, match="a decorator hides"):
            idempotent(**{**BOTH, **options})(charge)


def test_a_callable_makes_the_key_of_what_a_decorator_hides() -> None:
    @idempotent(store=MemoryStore(), key=lambda args: args[0])
    @with_session
    def charge(session: str, order: str, cents: int = 0) -> list[Any]:
        return [session, order, cents]

    assert [charge("ORD-1"), charge("ORD-1"), charge("ORD-2", 5)] == [
        *(["session", "ORD-1", 0], ["session", "ORD-1", 0], ["session", "ORD-2", 5])
    ]
    with pytest.raises(KeyReused):
        charge("ORD-1", 5)


def test_a_guarded_function_says_what_it_takes_to_what_guards_it_again() -> None:
    inner = idempotent(store=MemoryStore(), key="order")(plain)
    outer = idempotent(store=MemoryStore(), key="order", name="outer")(inner)
    assert [outer("ORD-1"), outer(order="ORD-1", cents=999)] == ["ORD-1", "ORD-1"]


# -- methods -----------------------------------------------------------------------------------------------------------


class Till:
    runs: list[tuple[Any, ...]] = []  # noqa: RUF012 - of all tills

    def __init__(self, number: int) -> None:
        self.number = number

    @idempotent(store=MemoryStore(), key="order")
    def charge(self, order: str) -> int:
        self.runs.append((self.number, order))
        return self.number

    @idempotent(store=MemoryStore(), key=lambda self, order: (self.number, order))
    def count(self, order: str) -> int:
        return self.number

    @classmethod
    @idempotent(store=MemoryStore(), key="order")
    def of_class(cls, order: str) -> str:
        return f"{cls.__name__} {order}"

    @staticmethod
    @idempotent(store=MemoryStore(), key="order")
    def static(order: str) -> str:
        return order

    @idempotent(store=MemoryStore(), key="order")
    async def later(self, order: str) -> int:
        return self.number


def test_the_object_of_a_method_is_no_part_of_its_key() -> None:
    assert [Till(1).charge("ORD-1"), Till(2).charge("ORD-1"), Till.charge(Till(3), order="ORD-1")] == [1, 1, 1]
    assert Till.runs == [(1, "ORD-1")]


def test_the_object_of_a_method_may_be_a_part_of_its_key() -> None:
    assert [Till(1).count("ORD-1"), Till(2).count("ORD-1"), Till(1).count("ORD-1")] == [1, 2, 1]


class Job:
    @classmethod
    @idempotent(store="memory://", key="order")
    def handle(cls, order: str) -> str:
        return f"{cls.__name__} {order}"

    @idempotent(store="memory://", key="order")
    def work(self, order: str) -> str:
        return f"{type(self).__name__} {order}"

    @idempotent(store="memory://", key="order", fingerprint=["self"])
    def whoever(self, order: str) -> str:
        return f"{type(self).__name__} {order}"


class Ship(Job): ...


class Charge(Job): ...


def test_a_class_is_not_answered_with_what_another_one_did_that_inherits_the_method() -> None:
    for handle in (lambda cls, order: cls.handle(order), lambda cls, order: cls().work(order)):
        done = [handle(cls, order) for cls, order in ((Ship, "1"), (Ship, "1"), (Job, "2"), (Job, "2"))]
        assert done == ["Ship 1", "Ship 1", "Job 2", "Job 2"]
        for cls, order in ((Charge, "1"), (Job, "1"), (Charge, "2")):
            with pytest.raises(KeyReused):
                handle(cls, order)


def test_the_class_of_the_object_of_a_method_may_be_left_out() -> None:
    assert [cls().whoever("1") for cls in (Ship, Charge, Job)] == ["Ship 1"] * 3


def test_an_object_that_is_data_is_compared_as_an_argument_is() -> None:
    @dataclass
    class Order:
        number: str
        cents: int

        @idempotent(store=MemoryStore(), key=lambda self: self.number)
        def charge(self) -> int:
            return self.cents

        @staticmethod
        @idempotent(store=MemoryStore(), key="self")
        def nested(self: str, cents: int = 1) -> str:
            return self

    assert [Order("A", 1).charge(), Order("A", 1).charge()] == [1, 1]
    with pytest.raises(KeyReused):
        Order("A", 99999).charge()
    assert Order.nested("A") == "A"


@dataclass
class CashDesk:
    number: int

    @idempotent(store="memory://", key="receipt")
    def book(self, receipt: str) -> int:
        return self.number


@attr.define
class CardDesk:
    number: int

    @idempotent(store="memory://", key="receipt")
    def book(self, receipt: str) -> int:
        return self.number


class Model(pydantic.BaseModel):
    number: int

    @idempotent(store="memory://", key="receipt")
    def book(self, receipt: str) -> int:
        return self.number


@pytest.mark.parametrize("parent", [CashDesk, CardDesk, Model])
def test_an_object_of_a_class_derived_from_one_that_is_data_is_compared_too(parent: Any) -> None:
    child = type("Child", (parent,), {"__module__": __name__})
    assert [child(number=1).book("R1"), child(number=1).book("R1")] == [1, 1]
    for other in (child(number=2), parent(number=1)):
        with pytest.raises(KeyReused):
            other.book("R1")


def test_what_a_derived_class_has_beside_the_fields_is_compared_too() -> None:
    for place in ("left", "right"):
        for parent in (CashDesk, CardDesk):
            child = type("Placed", (parent,), {})
            desk = child(number=1)
            desk.place = place
            if place == "left":
                assert [desk.book(parent.__name__), desk.book(parent.__name__)] == [1, 1]
                continue
            with pytest.raises(KeyReused):
                desk.book(parent.__name__)


def test_methods_of_classes_are_guarded_within_their_decorators() -> None:
    assert [Till.of_class("1"), Till(1).of_class("1"), Till.static("1"), Till(1).static("1")] == [
        *("Till 1", "Till 1", "1", "1")
    ]


def test_a_coroutine_may_be_a_method() -> None:
    async def main() -> list[int]:
        return [await Till(1).later("ORD-1"), await Till(2).later("ORD-1")]

    assert asyncio.run(main()) == [1, 1]


def test_a_bound_method_may_be_decorated() -> None:
    class Bank:
        def charge(self, order: str) -> str:
            return order

    assert idempotent(**BOTH)(Bank().charge)("ORD-1") == "ORD-1"


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_the_same_however_they_are_given() -> None:
    runs = []

    @idempotent(store=MemoryStore(), key=("order", "line"))
    def charge(order: str, /, line: int = 1, *rest: int, currency: str = "EUR", **more: Any) -> int:
        runs.append(order)
        return len(runs)

    assert [charge("1"), charge("1", 1), charge("1", line=1), charge("1", currency="EUR")] == [1, 1, 1, 1]
    assert [charge("1", 2), charge("1", 2, currency="EUR")] == [2, 2]
    for call in (lambda: charge("1", currency="USD"), lambda: charge("1", 1, 2), lambda: charge("1", note="x")):
        with pytest.raises(KeyReused):
            call()
    assert runs == ["1", "1"]


def test_a_key_may_be_among_the_keywords_that_a_function_collects() -> None:
    @idempotent(store=MemoryStore(), key="order")
    def charge(**options: Any) -> list[str]:
        return sorted(options)

    assert charge(order="1", cents=1) == charge(order="1", cents=1) == ["cents", "order"]


def test_a_key_may_be_computed() -> None:
    @idempotent(store=MemoryStore(), key=lambda message: message["id"], fingerprint=False)
    def consume(message: dict[str, Any]) -> int:
        return int(message["attempt"])

    assert [consume({"id": "a", "attempt": 1}), consume({"id": "a", "attempt": 2})] == [1, 1]


def test_arguments_named_as_the_decorators_own_are_the_functions() -> None:
    @idempotent(store=MemoryStore(), key="function")
    def call(self: int, args: int, kwargs: int, function: str) -> list[object]:
        return [self, args, kwargs, function]

    assert call(self=1, args=2, kwargs=3, function="f") == [1, 2, 3, "f"]
    with pytest.raises(KeyReused):
        call(self=2, args=2, kwargs=3, function="f")


@pytest.mark.parametrize("named", [False, True])
def test_functions_that_differ_in_what_is_around_them_alone_are_warned_of(
    caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    """Their keys are the same: one answers for the other."""

    def fee_of(rate: float) -> Callable[[str], float]:
        @idempotent(store=MemoryStore(), key="order_id", **({"name": f"fee.{rate}"} if named else {}))
        def fee(order_id: str) -> float:
            return rate if order_id else float(fee("none"))

        return fee

    fees = [fee_of(float(rate)) for rate in ("1.5", "1.5", "1.5")]  # equal, and not one object
    assert caplog.messages == []
    fees.append(fee_of(2))
    said = [message for message in caplog.messages if "is declared again around other values of fee, rate" in message]
    assert len(said) == (0 if named else 1)
    assert fees[3]("ORD-1") == 2


def test_functions_that_differ_in_a_default_alone_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A default counts neither as key nor as fingerprint."""
    made = []
    for bank, branch in [("anna", 1), ("anna", 1), ("bert", 1), ("bert", 2)]:

        @idempotent(**BOTH)
        def pay(order: str, bank: str = bank, *, branch: int = branch) -> str:
            return bank

        made.append(pay)
        said = [message for message in caplog.messages if "is declared again around other values of" in message]
        assert len(said) == [0, 0, 1, 2][len(made) - 1]
    assert "around other values of bank, branch. To the store it is one function" in said[0]


def for_bank(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(order: str) -> Any:
            return function(order, name)

        return call

    return decorate


def test_functions_that_differ_in_what_a_decorator_within_has_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def pay(order: str, bank: str) -> str:
        return bank

    made = [idempotent(**BOTH)(for_bank(bank)(pay)) for bank in ("anna", "anna")]
    assert caplog.messages == []
    made.append(idempotent(**BOTH)(for_bank("bert")(pay)))
    assert ["is declared again around other values of" in message for message in caplog.messages] == [True]


def test_other_functions_of_one_name_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    handlers = {}
    for named in (True, False):

        @idempotent(**BOTH, **({"name": "created"} if named else {}))
        def handler(order: str) -> str:
            return "created"

        handlers["created"] = handler
        assert caplog.messages == []

    @idempotent(**BOTH)  # type: ignore[no-redef]
    def handler(order: str) -> str:
        return "deleted"

    handlers["deleted"] = handler
    (said,) = caplog.messages
    assert f"{handler.__module__}.{handler.__qualname__} is the name of two functions, at " in said
    assert said.count("test_declaration.py:") == 2
    assert "one call is answered with the result of another. Give each a name=" in said


def test_a_module_that_is_loaded_again_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def load(text: str, file: str = "shop.py") -> Any:
        module = {"__name__": "shop", "idempotent": idempotent}
        exec(compile(text, file, "exec"), module)
        return module["charge"]

    text = '@idempotent(store="memory://", key="order")\ndef charge(order, cents=[]): return ' + "{}"
    made = [load(text.format(1)), load(text.format(1)), load("\n\n" + text.format(1))]
    assert caplog.messages == []
    made.append(load(text.format(2)))
    assert ["is the name of two functions" in message for message in caplog.messages] == [True]
    made.append(load(text.format(2), "other.py"))
    assert len(caplog.messages) == 2


def test_a_function_that_is_gone_or_guarded_twice_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def declare(result: int) -> Any:
        if result == 1:

            @idempotent(**BOTH)
            def run(order: str) -> int:
                return 1

            return run

        @idempotent(**BOTH)
        def run(order: str) -> int:
            return 2

        return run

    declare(1)
    gc.collect()
    declare(2)
    made = [idempotent(**BOTH)(plain), idempotent(**BOTH)(hidden(plain))]
    made += [idempotent(store="memory://", key=lambda x: x)(math.floor) for _ in range(2)]
    assert caplog.messages == []


@functools.singledispatch
def handle(event: object) -> str:
    raise TypeError(event)


@handle.register
def _(event: str) -> str:
    return event


@pytest.mark.parametrize("decorator", [idempotent, rq_idempotent], ids=["of functions", "of RQ"])
@pytest.mark.parametrize("function", [lambda event: event, handle.dispatch(str)], ids=["lambda", "underscore"])
def test_a_function_without_a_name_of_its_own_is_refused(function: Any, decorator: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"to have a name of its own, got '.*(<lambda>|_)'.* Give it a name="):
        decorator(store="memory://", key="event")(function)
    assert decorator(store="memory://", key="event", name="handle.paid")(function)("ORD-1") == "ORD-1"
