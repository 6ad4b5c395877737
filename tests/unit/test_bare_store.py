"""What a store has of the contract that it does not write itself, and what a scan says of what cannot be read."""

from __future__ import annotations

import pytest

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import Claim, Lease, Outcome, State
from celery_idempotent.stores.base import Store, Unreadable, pass_by_unreadable, unreadable_reported_to
from celery_idempotent.stores.records import new_owner


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with nothing that the contract does not ask for."""
    monkeypatch.setattr(Store, "__abstractmethods__", frozenset())
    return Store()  # type: ignore[abstract]


def test_it_keeps_no_history_and_has_nothing_to_say_purge_or_upgrade(store: Store) -> None:
    store.append_history([])
    store.apply_schema()
    assert (store.history("idem:k"), store.purge(), store.pending_schema()) == ((), 0, "")
    assert (store.usage(), store.warnings(), store.bounded(1.0)) == ({}, [], None)


def test_it_settles_in_no_transaction_and_takes_no_mark_of_a_shutdown(store: Store) -> None:
    lease = Lease(Claim("idem:k", new_owner(), 60.0, 60.0), 1)
    assert store.mark_shutdown(lease) is False
    with pytest.raises(ConfigurationError, match="got a Store"):
        store.settle_within(lease, Outcome(State.COMPLETED, b""), ttl=60.0, using=object())


def test_a_scan_reports_what_it_passes_by_to_who_asked_and_to_nobody_else() -> None:
    pass_by_unreadable("idem:before")
    found = Unreadable()
    with unreadable_reported_to(found.add):
        pass_by_unreadable("idem:first")
        pass_by_unreadable("idem:second")
    pass_by_unreadable("idem:after")
    assert (found.count, found.first) == (2, "idem:first")
