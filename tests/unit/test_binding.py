"""The arguments of a call by their names, by the short way that most calls take and by the long one; and its key."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.core import keys
from celery_idempotent.core.binding import Binding, check_returned
from celery_idempotent.core.policy import Policy
from celery_idempotent.errors import MissingKey


def none() -> None: ...
def one(order: object) -> None: ...
def default(order: object, amount: int = 3) -> None: ...
def star(*order: object) -> None: ...
def bare(*, order: object = 1) -> None: ...
def slash(order: object, /, amount: int = 3) -> None: ...
def rest(order: object, **amount: object) -> None: ...


@pytest.mark.parametrize("function", [none, one, default, star, bare, slash, rest])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((), {"order": 1}), ((1,), {"amount": 2}), ([1], {})],
    ids=repr,
)
def test_arguments_are_named_as_the_call_itself_would_bind_them(
    function: Callable[..., None], args: Any, kwargs: dict[str, object]
) -> None:
    signature = inspect.signature(function)
    binding = Binding("task", signature, Policy(), "idem")
    try:
        expected = keys.bind(signature, args, kwargs)
    except TypeError as error:
        message = f"Expected arguments of task{signature}, which these do not fit: {error}"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            binding.arguments(args, kwargs)
    else:
        assert binding.arguments(args, kwargs) == expected


def test_a_default_that_a_body_changes_counts_as_it_was_declared() -> None:
    anything = object()  # it equals no copy

    def charge(order: object, options: Any = {"of": ([anything], {1})}) -> None:  # noqa: B006 - that is the point
        options["of"][0].append(999)
        options["of"][1].add(999)
        options["cents"] = 999

    policy = Policy(key=lambda order, options: f"{order} {sorted(options)} {[*map(len, options['of'])]}")
    binding = Binding("task", inspect.signature(charge), policy, "idem")
    calls: list[tuple[Any, ...]] = [("A",), ("A", {"of": ([anything], {1})})]
    before = [binding.operation(None, "id", args, {}, {}) for args in calls]
    charge("A")
    assert [binding.operation(None, "id", args, {}, {}) for args in calls] == before
    assert len({key for key, _ in before}) == 1


def bound(**options: Any) -> Binding:
    return Binding("task", inspect.signature(default), Policy(**options), "idem")


def test_a_key_from_the_publisher_goes_before_the_tasks_own() -> None:
    assert bound(key="order").operation("req-42", "id", ("A",), {}, {}) == (
        "idem:task::req-42",
        {"order": "A", "amount": 3},
    )
    assert bound(key="order").operation(None, "id", ("A",), {}, {})[0] == "idem:task::A"


@pytest.mark.parametrize("name", ["message_id", "task_id"])
@pytest.mark.parametrize("given", ["\ud800", 7])
def test_an_id_that_no_store_could_hold_is_refused_whichever_it_is(name: str, given: Any) -> None:
    with pytest.raises(MissingKey, match="Expected a task id that is text"):
        bound().claim("key", "owner", **{name: given})


def test_a_scope_is_part_of_the_key_and_of_the_slot_of_a_message() -> None:
    binding = bound(key="order", scope="tenant")
    keys_of, slots = (
        {of(tenant) for tenant in ("acme", "umbrella", 0)}
        for of in (
            lambda tenant: binding.operation(None, "id", ("A",), {}, {"tenant": tenant})[0],
            lambda tenant: binding.slot("order", ("A",), {}, {"tenant": tenant}, ("queue=celery",)),
        )
    )
    assert (len(keys_of), len(slots)) == (3, 3)
    for headers in ({"tenant": ""}, {"tenant": None}, {}, None):
        with pytest.raises(MissingKey, match="Expected a scope for task"):
            binding.operation(None, "id", ("A",), {}, headers)
        with pytest.raises(MissingKey, match="Expected a scope for task"):
            binding.slot("order", ("A",), {}, headers, ("queue=celery",))


@pytest.mark.parametrize(("result_ttl", "compares"), [(0, False), (0.5, True), (1, True)])
def test_calls_that_take_turns_compare_no_arguments(result_ttl: float, compares: bool) -> None:
    assert bound(result_ttl=result_ttl).compares is compares


class Trained:
    """Has what a context manager of `contextlib` has: a generator by this name."""

    def __init__(self) -> None:
        self.gen = iter_of_nothing()


def iter_of_nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize("make", [contextlib.ExitStack, contextlib.nullcontext, Trained])
def test_what_only_looks_like_unfinished_work_is_a_result(make: Callable[[], object]) -> None:
    value = make()
    assert check_returned("task", value, "") is value
