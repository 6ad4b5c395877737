"""A crowd of tasks that wait for one key: its record stays as small as it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.records import Claim, Lease, Refusal, Verdict, new_owner
from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.rules import MOST_WAITING

KEY = "idem:shop.charge:ORD-1"


def claim(task_id: str, copy: int = 0) -> Claim:
    return Claim(KEY, new_owner(), lease_ttl=600.0, keep_ttl=3600.0, task_id=task_id, copy=copy, token="x")


@pytest.fixture(params=["memory_url", "sqlite_url", pytest.param("postgres_url", marks=pytest.mark.thorough)])
def crowded(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = open_store(request.getfixturevalue(request.param))
    yield store
    store.close()


def test_of_a_crowd_that_waits_a_thousand_are_told_apart(crowded: Store) -> None:
    def waits(task_id: str, copy: int) -> Verdict:
        answer = crowded.acquire(claim(task_id, copy))
        assert isinstance(answer, Refusal)
        return answer.verdict

    assert isinstance(crowded.acquire(claim("first")), Lease)
    for number in range(MOST_WAITING + 3):
        assert waits(str(number), 5) is Verdict.CONFLICT
    record = crowded.get(KEY)
    assert record is not None
    assert record.waiting == MOST_WAITING
    assert waits("0", 4) is Verdict.SUPERSEDED
    assert waits(str(MOST_WAITING), 4) is Verdict.CONFLICT  # nothing is known of it, and it waits all the same
    assert waits("0", 6) is Verdict.CONFLICT
    assert waits("0", 5) is Verdict.SUPERSEDED
