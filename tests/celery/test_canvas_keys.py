"""A key names one operation: what Celery's canvas does with `idempotency_key=`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature, _chain

from celery_idempotent import ConfigurationError
from celery_idempotent.celery.message import KEY_HEADER
from tests.support.servers import open_client


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app("tests.support.celery.shop")


@pytest.fixture
def keys(app: Celery, broker_url: str) -> Callable[[], list[object]]:
    """A function that returns the keys of the messages that were published, and takes them out of their queue."""

    def keys() -> list[object]:
        with open_client(broker_url) as client:
            messages = [json.loads(raw) for raw in client.lrange("celery", 0, -1)][::-1]
            client.delete("celery")
        assert not any(KEY_HEADER in message["properties"] for message in messages)
        return [message["headers"].get(KEY_HEADER) for message in messages]

    return keys


SEVERAL: dict[str, Callable[[Any], Any]] = {
    "group": lambda t: group(t.s("a"), t.s("b")).apply_async(idempotency_key="k"),
    "group of one": lambda t: group([t.s("a")]).apply_async(idempotency_key="k"),
    "group, by set": lambda t: group(t.s("a"), t.s("b")).set(idempotency_key="k"),
    "group, made with it": lambda t: group(t.s("a"), t.s("b"), idempotency_key="k").apply_async(),
    "group, eager": lambda t: group(t.s("a"), t.s("b")).apply(idempotency_key="k"),
    "group behind a step": lambda t: chain(t.s("a"), group(t.si("b"), t.si("c"), idempotency_key="k")).apply_async(),
    "chord behind a step": lambda t: (t.s("a") | chord([t.si("b")], t.si("c"), idempotency_key="k")).apply_async(),
    "group in a chain": lambda t: chain(group(t.s("a"), t.s("b")), t.si("c")).apply_async(idempotency_key="k"),
    "chord": lambda t: chord([t.s("a"), t.s("b")], t.si("c")).apply_async(idempotency_key="k"),
    "chord, by call": lambda t: chord([t.s("a"), t.s("b")])(t.si("c"), idempotency_key="k"),
    "chord, by set": lambda t: chord([t.s("a")], t.si("c")).set(idempotency_key="k"),
    "chord in a chain": lambda t: chain(chord([t.s("a")], t.si("c")), t.si("d")).apply_async(idempotency_key="k"),
    "map": lambda t: t.map(["a", "b"]).apply_async(idempotency_key="k"),
    "starmap": lambda t: t.starmap([("a",), ("b",)]).apply_async(idempotency_key="k"),
    "chunks": lambda t: t.chunks([("a",), ("b",)], 1).apply_async(idempotency_key="k"),
    "chain of groups, by set": lambda t: chain(group(t.s("a"), t.s("b")), group(t.s("a"), t.s("b"))).set(
        idempotency_key="k"
    ),
    "chunks, by set": lambda t: t.chunks([("a",), ("b",)], 1).set(idempotency_key="k"),
}


@pytest.mark.parametrize("what", SEVERAL)
def test_a_key_for_several_tasks_is_refused_before_any_is_published(
    app: Celery, keys: Callable[[], list[object]], what: str
) -> None:
    with pytest.raises(ConfigurationError, match="Give each task a key of its own"):
        SEVERAL[what](app.module.resize)
    assert keys() == []


def test_a_key_of_a_task_of_a_canvas_is_that_tasks_alone(app: Celery, keys: Callable[[], list[object]]) -> None:
    t = app.module.resize
    group(t.s(n).set(idempotency_key=n) for n in "ab").apply_async()
    assert keys() == ["a", "b"]
    chord([t.s("a").set(idempotency_key="a"), t.s("b")], t.si("c").set(idempotency_key="c")).apply_async()
    assert keys() == ["a", None]
    chain(t.s("a").set(idempotency_key="a"), t.si("b").set(idempotency_key="b")).apply_async()
    assert keys() == ["a"]
    t.signature(("a",), idempotency_key="a").apply_async(link=t.si("b"))
    assert keys() == ["a"]


def test_a_key_of_a_chain_is_its_first_steps_as_any_option_but_the_task_id(
    app: Celery, keys: Callable[[], list[object]]
) -> None:
    t = app.module.resize
    chain(t.s("a"), t.si("b")).apply_async(idempotency_key="k")
    chain(t.s("a"), t.si("b")).set(idempotency_key="k").apply_async()
    assert keys() == ["k", "k"]


@pytest.mark.parametrize(
    "keyed",
    [
        lambda t: chain(t.s("a"), t.si("b")).set(idempotency_key="k"),
        lambda t: chain(chain(t.s("a"), t.si("b")).set(idempotency_key="k"), t.si("c")),
        lambda t: _chain(t.s("a"), t.si("b"), idempotency_key="k"),
    ],
    ids=["set", "nested", "made"],
)
def test_a_key_of_a_chain_stays_where_the_chain_is_continued(
    app: Celery, keys: Callable[[], list[object]], keyed: Callable[[Any], Any]
) -> None:
    """Celery drops the options of a chain there."""
    t = app.module.resize
    for continued in (keyed(t) | t.si("d"), keyed(t) | group(t.si("d"), t.si("e")), chain(keyed(t), t.si("d"))):
        continued.apply_async()
        Signature.from_dict(json.loads(json.dumps(continued)), app=app).apply_async()
    assert keys() == ["k"] * 6
    (t.si("d") | keyed(t)).apply_async()
    assert keys() == [None]


def test_a_key_of_a_chain_is_not_that_of_its_first_signature_elsewhere(
    app: Celery, keys: Callable[[], list[object]]
) -> None:
    first = app.module.resize.s("a")
    chain(first, app.module.resize.si("b")).set(idempotency_key="k")
    first.apply_async()
    assert keys() == [None]


def test_a_group_without_a_key_is_celerys_own(app: Celery, keys: Callable[[], list[object]]) -> None:
    t = app.module.resize
    group(t.s("a"), t.s("b")).apply_async(idempotency_key=None)
    chord([t.s("a")], t.si("c")).set(shadow="ghost").apply_async()
    assert keys() == [None, None, None]
