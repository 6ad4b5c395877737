"""Reservations, which waiting messages hold: seen where they are asked for, and in no other list."""

from __future__ import annotations

import json
from time import monotonic

import pytest

from celery_idempotent.cli.common import Exit
from celery_idempotent.core import keys, reservations
from celery_idempotent.core.reservations import Token, WaitingMessage
from tests.cli.conftest import Run
from tests.support.cli.shelf import Shelf, hold

SLOT = keys.compose_slot("idem", "shop.index", "document", {"document": 7}, message=("queue=celery",))


def reserve(shelf: Shelf) -> None:
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
