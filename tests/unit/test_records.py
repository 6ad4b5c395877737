"""The nouns a store speaks in."""

from __future__ import annotations

import dataclasses
import pickle
import re
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from celery_idempotent.stores.records import attempt_number, new_owner

CLAIM = Claim("idem:t:k", "owner-1", 60.0, 3600.0)
NOUNS = [
    CLAIM,
    Lease(CLAIM, 7),
    Outcome(State.COMPLETED, b"json:1"),
    Release(Reason.RETRY, 1.5, 2),
    Record("idem:t:k", State.FAILED),
    Refusal(Verdict.CONFLICT, Record("idem:t:k", State.IN_PROGRESS)),
]


def test_a_claim_without_more_is_the_first_delivery_of_a_message() -> None:
    rest = {name: getattr(CLAIM, name) for name in CLAIM.__slots__[4:]}
    assert rest == {
        "task_id": "",
        "nesting": 0,
        "retries": 0,
        "copy": 0,
        "token": "",
        "redelivered": False,
        "sender": "",
        "fingerprint": "",
        "max_crashes": 5,
        "holder": "",
        "message_id": "",
        "revive": True,
    }
    assert not CLAIM.is_copy
    assert CLAIM.attempt == 0


@pytest.mark.parametrize(
    ("copy", "redelivered", "is_copy"), [(0, False, False), (1, False, True), (0, True, True), (3, True, True)]
)
def test_a_deferred_or_redelivered_message_is_a_copy(copy: int, redelivered: bool, is_copy: bool) -> None:
    assert dataclasses.replace(CLAIM, copy=copy, redelivered=redelivered).is_copy is is_copy


def test_an_attempt_is_one_integer() -> None:
    assert attempt_number(0, 3) == 3
    assert attempt_number(2, 3) == 2_000_003
    assert dataclasses.replace(CLAIM, nesting=2, retries=3).attempt == 2_000_003
    assert (attempt_number(-1, -1), attempt_number(2**63, 2**63)) == (0, 999_999_999_999)  # of a producer's making


RETRIES = st.integers(0, 999_999)


@given(st.tuples(st.integers(0, 1000), RETRIES), st.tuples(st.integers(0, 1000), RETRIES))
def test_attempts_order_as_their_pairs_do(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (attempt_number(*one) < attempt_number(*other)) == (one < other)


def test_an_owner_is_128_random_bits_that_fit_a_url() -> None:
    owners = {new_owner() for _ in range(1000)}
    assert len(owners) == 1000
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", owner) for owner in owners)


def test_a_lease_has_the_key_and_the_owner_of_its_claim() -> None:
    lease = Lease(CLAIM, 7)
    assert (lease.key, lease.owner, lease.fence) == ("idem:t:k", "owner-1", 7)
    assert (lease.taken_over, lease.crashes) == (False, 0)


def test_a_release_without_more_is_free_at_once() -> None:
    assert Release(Reason.FAILED) == Release(Reason.FAILED, retry_in=0.0, next_attempt=0)


def test_a_record_without_more_knows_its_key_and_state_alone() -> None:
    record = Record("k", State.RELEASED)
    rest = [getattr(record, name) for name in record.__slots__[2:]]
    assert set(rest) == {0, "", b"", frozenset()}


@pytest.mark.parametrize("word", [*State, *Verdict, *Reason])
def test_a_word_prints_as_itself(word: Enum) -> None:
    assert str(word) == f"{word}" == word.value
    assert word == word.value


def test_a_settled_state_is_the_verdict_of_the_same_word() -> None:
    assert [Verdict(state.value) for state in (State.COMPLETED, State.FAILED)] == [Verdict.COMPLETED, Verdict.FAILED]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_a_noun_crosses_processes_and_cannot_be_changed(noun: Any) -> None:
    assert pickle.loads(pickle.dumps(noun)) == noun
    assert hash(noun) == hash(pickle.loads(pickle.dumps(noun)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, noun.__slots__[0], "changed")
