"""The arguments of a call by their names, by the short way that most calls take and by the long one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.core import keys
from celery_idempotent.core.binding import Binding
from celery_idempotent.core.policy import Policy


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
