"""Every call that runs is told to begin and to end, once: whatever the store, the body and the caller do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_idempotent import events, idempotent
from celery_idempotent.core.binding import heartbeat
from celery_idempotent.errors import StoreRefused, StoreUnreachable
from celery_idempotent.events import Event
from tests.support.functions.calls import ENDINGS, STARTS, told_in_pairs
from tests.support.stores.benches import age, take
from tests.support.unit.scripted import ScriptedStore

KEY = "idem:shop.charge::ORD-1"
VERBS = ["acquire", "settle", "release", "get"]
ERRORS = [StoreRefused("password"), TypeError("a bug"), SystemExit(2)]
RAISED = [ValueError("no"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()]

faults = st.lists(
    st.tuples(st.sampled_from(VERBS), st.sampled_from(["fail", "after"]), st.sampled_from(ERRORS)), max_size=2
)
calls = st.lists(
    st.tuples(faults, st.booleans(), st.sampled_from([None, *RAISED])),
    min_size=1,
    max_size=3,
)


def disturb(store: ScriptedStore, verb: str, how: str, error: BaseException) -> None:
    if how == "fail":
        store.fail(verb, error)
    else:
        store.lose_reply(verb, error)


@pytest.mark.parametrize("how", ["sync", "async"])
@settings(deadline=None, max_examples=60)
@given(script=calls)
def test_every_run_that_began_is_told_to_have_ended_once(how: str, script: Any) -> None:
    store, heard = ScriptedStore(), []

    def body(overtaken: bool, raised: BaseException | None) -> int:
        runs.append(1)
        if overtaken:
            age(store.inner, KEY, 61)
            take(store.inner, KEY, task_id="another")
        if raised is not None:
            raise raised
        return 42

    @idempotent(store=store, key=lambda: "ORD-1", name="shop.charge", on_store_error="raise", fingerprint=False)
    def charge(overtaken: bool, raised: BaseException | None) -> int:
        return body(overtaken, raised)

    @idempotent(store=store, key=lambda: "ORD-1", name="shop.charge", on_store_error="raise", fingerprint=False)
    async def charge_later(overtaken: bool, raised: BaseException | None) -> int:
        await asyncio.sleep(0)
        return body(overtaken, raised)

    def run(overtaken: bool, raised: BaseException | None) -> None:
        if how == "sync":
            charge(overtaken, raised)
        else:
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(charge_later(overtaken, raised))
            finally:
                loop.close()

    runs: list[int] = []
    hook = heard.append
    events.add_hook(hook)
    try:
        for faulty, overtaken, raised in script:
            store.calm()
            for fault in faulty:
                disturb(store, *fault)
            with suppress(BaseException):
                run(overtaken, raised)
            told: list[Event] = [event for event in heard if isinstance(event, (*STARTS, *ENDINGS))]
            assert told_in_pairs(told), told
            assert len(told) == 2 * len(runs)
            assert heartbeat.holdings() == []
    finally:
        events.remove_hook(hook)


def test_an_unreachable_store_is_told_of_once_by_all_its_calls() -> None:
    store, heard = ScriptedStore(), []
    store.down("acquire", error=StoreUnreachable("down"))

    @idempotent(store=store, key="order", on_store_error="raise")
    def charge(order: str) -> None: ...

    hook = heard.append
    events.add_hook(hook)
    try:
        for _ in range(3):
            with suppress(StoreUnreachable):
                charge("ORD-1")
    finally:
        events.remove_hook(hook)
    assert [type(event).__name__ for event in heard] == ["StoreFailed"]
