"""Unique tasks that HTTP requests publish, which may be carried out again: the ids are the same, and the law holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from kombu import Producer

from celery_idempotent.core.lease import HeldLease, TaskIds, running
from celery_idempotent.core.reservations import is_confirmed
from celery_idempotent.errors import AlreadyPublished
from celery_idempotent.stores import Claim, Lease, Store, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import is_reservation
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

UNIQUE = "tests.support.celery.unique_app"


@pytest.fixture
def app(client_app: Callable[..., Celery], patient_publishers: None) -> Celery:
    return client_app(UNIQUE)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    store = open_store(store_url)
    yield store
    store.close()


@contextmanager
def request(key: str = "POST /documents 1") -> Iterator[None]:
    """One run of a guarded request."""
    lease = Lease(Claim(key, "owner", lease_ttl=30, keep_ttl=30), 1)
    with running(HeldLease(MemoryStore(), lease, monotonic(), task_ids=TaskIds(key, 86400, lambda *_: None))):
        yield


def lapse(store: Store) -> None:
    """Have reservations end as where their publisher is killed before it has confirmed them."""
    for record in store.scan():
        if is_reservation(record.key):
            store.delete(record.key)


def test_a_call_is_skipped_for_the_message_that_an_earlier_run_has_published(app: Celery, broker_url: str) -> None:
    index = app.module.index
    with request():
        first, second, other = index.delay(7), index.delay(7), index.apply_async((7,), unique=False)
    assert second.id == first.id
    with request():
        # The second call was skipped in the first run, and is here; the third has its number all the same.
        again = [index.delay(7), index.delay(7), index.apply_async((7,), unique=False)]
    assert [result.id for result in again] == [first.id, first.id, other.id]
    assert messages(broker_url) == 3  # one message that waits, and those that were to be published whatever waits
    with request("POST /documents 2"):
        assert index.delay(7).id == first.id
    assert index.delay(7).id == first.id
    assert messages(broker_url) == 3


def test_no_call_is_skipped_for_what_an_earlier_run_could_not_publish(
    app: Celery, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = app.module.index
    with monkeypatch.context() as patched, request():
        patched.setattr(Producer, "publish", Mock(side_effect=ValueError("no message")))
        with pytest.raises(ValueError, match="no message"):
            index.delay(7)
    with request():
        index.delay(7)
    assert messages(broker_url) == 1


def test_no_call_is_skipped_for_what_an_earlier_run_has_published_and_somebody_revoked(
    app: Celery, broker_url: str
) -> None:
    index = app.module.index
    with request():
        first = index.delay(7)
    app.backend.store_result(first.id, None, "REVOKED")
    with request():
        index.delay(7)
    assert messages(broker_url) == 2


def test_no_call_is_skipped_for_anothers_message_that_is_due_later(app: Celery, store: Store) -> None:
    index = app.module.index
    late = index.apply_async((7,), countdown=600)
    wait_until(lambda: any(map(is_confirmed, store.scan())), 20)
    with request():
        assert index.delay(7).id != late.id


def test_a_message_of_its_own_is_no_reason_to_refuse_a_call(app: Celery) -> None:
    strict = app.module.strict
    with request():
        first = strict.delay(7)
        with pytest.raises(AlreadyPublished):
            strict.delay(7)
    with request():
        assert strict.delay(7).id == first.id
    with request("POST /documents 2"), pytest.raises(AlreadyPublished):
        strict.delay(7)


def test_where_the_newest_counts_each_run_publishes_another_message(app: Celery, broker_url: str) -> None:
    ids = set()
    for _ in range(2):
        with request():
            ids.add(app.module.quiet.delay(7).id)
    assert len(ids) == messages(broker_url) == 2


def test_no_call_is_skipped_for_a_message_whose_work_has_begun_before(
    app: Celery, store: Store, broker_url: str
) -> None:
    index = app.module.index
    with request():
        first = index.apply_async((7,), ignore_result=True)
    lapse(store)
    store.acquire(Claim(index._binding.default_key(first.id), "a worker", lease_ttl=30, keep_ttl=30))
    with request():
        assert index.apply_async((7,), ignore_result=True).id == first.id
    assert messages(broker_url) == 2
    assert index.apply_async((7,), ignore_result=True).id != first.id
    assert messages(broker_url) == 3


def test_no_call_is_skipped_for_a_message_beside_the_one_that_runs(
    app: Celery, store: Store, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str
) -> None:
    index: Any = app.module.index
    with request():
        first = index.delay(7)
    lapse(store)
    with request():
        assert index.delay(7, version=0).id == first.id
    assert messages(broker_url) == 2
    gate = gates.close("in 7")
    start_worker(UNIQUE, concurrency=1)
    gate.reached()
    change = index.delay(7, version=1)
    gate.open()
    assert change.get(timeout=20) == 7
    wait_until(lambda: messages(broker_url) == 0, 20)
    assert [entry.fields["version"] for entry in journal.entries("begin", 7)] == [0, 1]
