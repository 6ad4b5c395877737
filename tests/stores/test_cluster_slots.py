"""What nodes of a cluster reply, and what it means."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from celery_idempotent.stores.redis.cluster import Redirect, is_down, owners, redirect, slot_of

ASKED = ("10.0.0.9", 7009)


@pytest.mark.parametrize(
    ("command", "slot"),
    [
        (("DEL", "foo"), 12182),  # as CLUSTER KEYSLOT says
        (("DEL", b"foo"), 12182),
        (("EVALSHA", "digest", 1, "foo", "bar"), 12182),
        (("EVAL", "return 1", 1, b"foo"), 12182),
        (("DEL", "{foo}:1"), 12182),  # what stands in braces keeps keys together
        (("DEL", "idem:{}foo"), 6743),
        (("DEL", "schl\u00fcssel"), 7677),
    ],
)
def test_a_command_goes_where_its_key_is(command: tuple[Any, ...], slot: int) -> None:
    assert slot_of(command) == slot


def test_every_slot_has_the_primary_of_its_range() -> None:
    reply = [[0, 99, [b"a", 1, b"id"], [b"replica", 2, b"id"]], [100, 16382, [b"b", 3]], [16383, 16383, [b"a", 1]]]
    found = owners(reply, ASKED)
    assert (found[0], found[99], found[100], found[16383]) == (("a", 1), ("a", 1), ("b", 3), ("a", 1))
    assert len(found) == 16384


def test_slots_that_nobody_serves_have_no_owner() -> None:
    assert owners([], ASKED) == [None] * 16384
    assert owners([[1, 2, [b"a", 1]]], ASKED)[:4] == [None, ("a", 1), ("a", 1), None]


@pytest.mark.parametrize("nameless", [b"", None])
def test_a_node_without_a_name_is_where_it_was_asked(nameless: bytes | None) -> None:
    assert owners([[0, 16383, [nameless, 7000]]], ASKED)[5] == ("10.0.0.9", 7000)


def test_a_node_that_is_told_to_say_its_name_and_has_none_cannot_be_reached() -> None:
    assert owners([[0, 16383, [b"?", 7000]]], ASKED)[5] is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MovedError("3999 127.0.0.1:6381"), Redirect(("127.0.0.1", 6381), moved=True)),
        (AskError("3999 127.0.0.1:6381"), Redirect(("127.0.0.1", 6381), moved=False)),
        (ResponseError("MOVED 3999 127.0.0.1:6381"), Redirect(("127.0.0.1", 6381), moved=True)),
        (ResponseError("ASK 3999 ::1:6381"), Redirect(("::1", 6381), moved=False)),
        (ResponseError("MOVED 3999 :6381"), Redirect(("10.0.0.9", 6381), moved=True)),
        (ResponseError("MOVED on"), None),
        (ResponseError("WRONGTYPE Operation against"), None),
    ],
)
def test_a_redirection_is_told_from_other_errors(error: ResponseError, expected: Redirect | None) -> None:
    assert redirect(error, ASKED) == expected


def test_a_cluster_that_is_down_says_so() -> None:
    assert is_down(ClusterDownError("The cluster is down"))
    assert is_down(ResponseError("CLUSTERDOWN Hash slot not served"))
    assert not is_down(ResponseError("WRONGTYPE"))
