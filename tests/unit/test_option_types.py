"""What type checkers see of the options is what is checked when the program runs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from celery_idempotent import ConfigurationError, IdempotencyOptions, Policy, Unique, UniqueOptions, functions
from celery_idempotent.celery.message import MessageOptions
from celery_idempotent.core import policy
from celery_idempotent.http import HttpOptions, IdempotencyMiddleware, Options, wsgi
from celery_idempotent.rq import decorator
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.memory import MemoryStore

#: One value of each type that an option may be written as; what text says differs.
SAMPLES: dict[Any, Any] = {
    NoneType: None,
    bool: True,
    int: 120,
    float: 120.5,
    timedelta: timedelta(minutes=2),
    type[Exception]: ValueError,
    Sequence[type[Exception]]: [ValueError],
    Sequence[str]: ["order_id"],
    Collection[str]: ["order_id"],
    Callable[..., object]: str.lower,
    Store: MemoryStore(),
}
TEXTS = {
    "store": "redis://localhost/1",
    "key": "order_id",
    "scope": "tenant",
    "compression": "bzip2",
    "large_results": "backend",
    "compress_above": "64KiB",
    "result_max_bytes": "64KiB",
}
#: Options for which any text will do until it is used.
ANY_TEXT = {"store", "scope"}
#: What fits an option only beside another one.
BESIDE: dict[str, dict[str, Any]] = {"max_wait": {"debounce": 1}}


def members(hint: Any) -> Iterator[Any]:
    """Yield the types that a hint is the union of."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from members(each)
    else:
        yield hint


def fits(value: object, hint: Any) -> bool:
    """Return whether a value that is kept is of the type that the attribute has."""
    for each in members(hint):
        origin = get_origin(each)
        if origin is Literal and value in get_args(each):
            return True
        if origin is not Literal and isinstance(value, origin or each):
            return True
    return False


OPTIONS = [
    pytest.param(cls, name, hint, id=f"{cls.__name__}.{name}")
    for cls, typed in ((Policy, IdempotencyOptions), (Unique, UniqueOptions))
    for name, hint in get_type_hints(typed).items()
]


@pytest.mark.parametrize(("cls", "name", "hint"), OPTIONS)
def test_an_option_may_be_written_as_what_its_type_says_and_as_nothing_else(
    cls: type[Policy | Unique], name: str, hint: Any
) -> None:
    of_text = {Literal: get_args(hint)}.get(get_origin(hint), [TEXTS.get(name, "2m")])
    typed = set(members(hint))
    attribute = "for_" if name == "for" else name
    kept = get_type_hints(cls)[attribute]
    values = [(text, True) for text in of_text if str in typed or get_origin(hint) is Literal]
    values += [("?!", False)] if name not in ANY_TEXT else []
    values += [(value, kind in typed) for kind, value in SAMPLES.items() if not also(kind, typed)]
    for value, fit in values:
        options = {name: value, **BESIDE.get(name, {})}
        if fit:
            assert fits(getattr(cls(**options), attribute), kept), (name, value)
        else:
            with pytest.raises(ConfigurationError):
                cls(**options)


def also(kind: Any, typed: set[Any]) -> bool:
    """Return whether a value of one type is also one of another type that the option has."""
    return (
        (kind is int and bool(typed & {float, int}) and int not in typed)
        or (kind is bool and int in typed)
        or (kind == Sequence[str] and Collection[str] in typed)
        or (kind == Collection[str] and Sequence[str] in typed)
        or (kind == type[Exception] and Callable[..., object] in typed)
    )


def test_the_options_have_the_same_names_everywhere() -> None:
    def kept(cls: Any) -> list[str]:
        return [each.name.removesuffix("_") for each in fields(cls) if each.name != "_given"]

    assert list(IdempotencyOptions.__annotations__) == kept(Policy) == list(policy._CHECKS) == list(policy.OPTIONS)
    assert set(UniqueOptions.__annotations__) == set(kept(Unique)) == set(policy._UNIQUE_CHECKS)
    for taking in (Policy, functions.idempotent, decorator.idempotent):
        assert inspect.signature(taking).parameters["options"].annotation == "Unpack[IdempotencyOptions]"
    assert inspect.signature(Unique).parameters["options"].annotation == "Unpack[UniqueOptions]"
    assert list(HttpOptions.__annotations__) == [each.name for each in fields(Options) if each.init]
    for middleware in (IdempotencyMiddleware, wsgi.IdempotencyMiddleware):
        assert inspect.signature(middleware).parameters["options"].annotation == "Unpack[HttpOptions]"


@pytest.mark.parametrize("typed", [IdempotencyOptions, UniqueOptions, HttpOptions])
def test_an_editor_has_a_sentence_to_show_for_each_option(typed: Any) -> None:
    """It reads them in the source: a string below the name."""
    [node] = [
        each
        for each in ast.parse(inspect.getsource(inspect.getmodule(typed))).body  # type: ignore[arg-type]
        if isinstance(each, ast.ClassDef) and each.name == typed.__name__
    ]
    named = [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    described = {
        each.target.id
        for each, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
    assert named
    assert described == set(named)


def test_a_call_takes_every_option_of_a_message_that_celery_takes() -> None:
    from celery import Celery
    from celery.app.amqp import AMQP
    from kombu import Producer

    named = {
        *MessageOptions.__annotations__,
        "name",
        "args",
        "kwargs",
        "task_id",
        "producer",
        "link",
        "link_error",
        "shadow",
    }
    sending = inspect.signature(AMQP(Celery(set_as_current=False))._create_task_sender())
    for function in (Celery.send_task, Producer.publish):
        taken = {
            name for name, each in inspect.signature(function).parameters.items() if each.kind is not each.VAR_KEYWORD
        }
        assert taken - named <= {"self", "body", "content_type", "content_encoding", "properties"}, function
    assert set(sending.parameters) - named <= {"producer", "message", "event_dispatcher", "kwargs"}
