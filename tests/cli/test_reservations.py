"""Reservations, which waiting messages hold: seen where they are asked for, and in no other list."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from celery_idempotent.cli.common import Exit, waiting
from celery_idempotent.cli.explain import advice, describe_record
from celery_idempotent.core import keys, reservations
from celery_idempotent.core.reservations import Token, WaitingMessage
from celery_idempotent.stores import Record, State, Store
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run
from tests.support.cli.shelf import Shelf, hold

SLOT = keys.compose_slot("idem", "shop.index", "document", {"document": 7}, message=("queue=celery",))


def reserve(shelf: Store) -> None:
    token, message = Token(SLOT, "owner"), WaitingMessage("id-1", eta="2026-01-01T00:00:00+00:00", holder="web:1")
    reservations.reserve(shelf, token, message, lambda *_: "", monotonic() + 5)
    reservations.confirm(shelf, token, 0.0)
    hold(shelf, "idem:shop.charge::ORD-1")


def test_reservations_are_listed_where_they_are_asked_for(on_shelf: Run, shelf: Shelf) -> None:
    reserve(shelf)
    assert [record["key"] for record in json.loads(on_shelf("list", "--json").out)["records"]] == [
        "idem:shop.charge::ORD-1"
    ]
    for options in (["--unique"], ["--unique", "--task", "shop.index"], ["--unique", "--prefix", "idem:~unique:"]):
        (record,) = json.loads(on_shelf("list", "--json", *options).out)["records"]
        assert (record["key"], record["task"], record["task_id"]) == (SLOT, "shop.index", "id-1")
        assert record["holder"] == "web:1"
        assert 3600 < record["remaining"] <= 3610
    assert on_shelf("list", "--unique", "--task", "shop.charge").out.strip() == ""


def test_a_reservation_is_shown_with_its_message(on_shelf: Run, shelf: Shelf) -> None:
    reserve(shelf)
    facts = json.loads(on_shelf("show", SLOT, "--json").out)
    assert (facts["task_id"], facts["holder"], facts["eta"]) == ("id-1", "web:1", "2026-01-01T00:00:00+00:00")


def test_a_reservation_can_be_forgotten_so_that_the_next_call_is_published(on_shelf: Run, shelf: Shelf) -> None:
    reserve(shelf)
    assert on_shelf("forget", SLOT, "--force").status == Exit.OK
    assert shelf.get(SLOT) is None


def test_a_reservation_is_explained_with_its_message(on_redis: Run, redis_store: RedisStore) -> None:
    reserve(redis_store)
    said = " ".join(on_redis("explain", SLOT).out.split())
    now = (
        r"Now: reserved by message id-1 of shop\.index, published by web:1 \S+ s ago, due 2026-01-01T00:00:00\+00:00; "
    )
    assert re.search(now + r"the reservation lasts 60 min", said)
    assert "calls like it are not published" in said
    assert "If that message is gone, as after a purge of its queue, forget KEY" in said
    facts = json.loads(on_redis("explain", SLOT, "--json").out)
    assert facts["advice"] in said


def test_who_forgets_or_releases_a_reservation_is_asked_about_its_message(
    on_redis: Run, redis_store: RedisStore
) -> None:
    reserve(redis_store)
    for verb in ("forget", "release"):
        said = on_redis(verb, SLOT, answer="n\n")
        assert said.status == Exit.NO
        assert "id-1" in said.err
        assert "web:1" in said.err
        assert "the next call is published, and both run" in said.err
        assert "{" not in said.err
        assert "being done" not in said.err
    assert on_redis("release", SLOT, answer="y\n").out == f"{SLOT} is released from web:1\n"
    told = " ".join(on_redis("explain", SLOT).out.split())
    assert re.search(r"released by \S+ \([\w -]+ release\) from web:1, task id-1", told)
    assert "Now: released: by an operator" in told
    assert "What this means: No message holds it. The next call is published." in told
    again = on_redis("release", SLOT)
    assert (again.status, again.err) == (
        Exit.NO,
        f"No message holds {SLOT}: it is released already, and the next call is published.\n",
    )


@pytest.mark.parametrize(
    ("changes", "stands", "means"),
    [
        ({"remaining": 30.0}, "reserved by message id-1 of shop.index, published by web:1; the", "If that message"),
        ({"holder": "odd", "remaining": 30.0}, "reserved by an unknown message of shop.index", "If that message"),
        ({}, "message id-1 of shop.index, published by web:1, ran out", "next call is published"),
        ({"state": State.RELEASED, "reason": "started"}, "released: its message has begun", "next call is published"),
        ({"state": State.RELEASED, "reason": "done"}, "released: its message has ended", "next call is published"),
        ({"state": State.RELEASED, "reason": "pondered"}, "released: pondered", "next call is published"),
        (
            {"key": f"{SLOT}:~throttle", "holder": "w:1", "remaining": 30.0},
            "throttled by the run that began at w:1; the period lasts 30 s",
            "forget KEY",
        ),
        (
            {"key": f"{SLOT}:~throttle", "holder": "w:1"},
            "throttled by the run that began at w:1; the period is over",
            "due",
        ),
    ],
)
def test_each_state_of_a_reservation_is_told_with_its_meaning(changes: dict[str, Any], stands: str, means: str) -> None:
    record = Record(SLOT, State.IN_PROGRESS, 1, holder=WaitingMessage("id-1", holder="web:1").write())
    record = replace(record, **changes)
    assert stands in describe_record(record)
    assert means in advice(record)
    assert (describe_record(waiting(record)), advice(waiting(record))) == (describe_record(record), advice(record))


def test_who_forgets_or_releases_the_period_of_a_throttle_is_asked_about_that(on_shelf: Run, shelf: Shelf) -> None:
    key = f"{SLOT}:~throttle"
    hold(shelf, key)
    for verb in ("forget", "release"):
        said = on_shelf(verb, key, answer="n\n")
        assert "throttled by the run that began at host:1" in said.err
        assert "The next run does not wait for the end of the period then." in said.err


def test_a_reservation_that_ran_out_is_not_released(on_shelf: Run, shelf: Shelf) -> None:
    reserve(shelf)
    shelf.offset += 3615
    said = on_shelf("release", SLOT)
    assert (said.status, said.err) == (
        Exit.NO,
        f"The reservation {SLOT} has run out: there is nothing to release, the next call is published.\n",
    )


def test_reservations_are_counted_apart(on_shelf: Run, shelf: Shelf) -> None:
    reserve(shelf)
    (facts,) = json.loads(on_shelf("stats", "--json").out).values()
    assert (facts["records"], facts["reservations"], facts["held"]) == (1, 1, 1)
    assert "1 messages of unique tasks wait" in on_shelf("stats").out


@pytest.mark.parametrize("namespace", ["idem", "shop:eu"])
def test_a_claim_to_return_a_part_of_a_chord_is_no_operation_and_no_message(
    on_shelf: Run, shelf: Shelf, namespace: str
) -> None:
    """Nobody has to do anything about it, and it lasts for seconds."""
    reserve(shelf)
    hold(shelf, keys.compose_part(namespace, "G:1", "T1"))
    for options in ([], ["--unique"]):
        assert len(json.loads(on_shelf("list", "--json", *options).out)["records"]) == 1
    (facts,) = json.loads(on_shelf("stats", "--json").out).values()
    assert (facts["records"], facts["reservations"], facts["held"]) == (1, 1, 1)
