"""Processes that are killed in the middle of a call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_idempotent import Conflict
from celery_idempotent.events import Event, TakenOver
from celery_idempotent.stores import Store
from tests.support import processes
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.docs.pages import ROOT
from tests.support.functions.calls import counted, names
from tests.support.stores.benches import age

KEY = "idem:shop.charge::ORD-1"


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_killed_run_is_taken_over_once_its_lease_has_run_out(
    store: Store, store_url: str, heard: list[Event], tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, gates = Journal(tmp_path / "journal"), Gates(tmp_path / "gates")
    gate = gates.close("charged")
    monkeypatch.setenv("JOURNAL", str(journal.path))
    monkeypatch.setenv("GATES", str(gates.directory))
    command = [sys.executable, "-m", "tests.support.functions.killed", store_url, how]
    process = processes.spawn(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        gate.reached(timeout=60)
    finally:
        processes.end(process)
    charge, runs = counted(store, lambda order: "done by another", fingerprint=False)
    with pytest.raises(Conflict) as caught:
        charge("ORD-1")
    assert 0 < caught.value.remaining <= 60
    age(store, KEY, 61)
    assert charge("ORD-1") == charge("ORD-1") == "done by another"
    assert len(runs) == 1
    assert journal.count("charged") == 1
    assert names(heard) == ["Conflicted", "TakenOver", "Completed", "Replayed"]
    [taken] = [event for event in heard if isinstance(event, TakenOver)]
    assert taken.crashes == 1


@pytest.mark.nightly
def test_a_killed_run_of_seconds_is_taken_over_by_who_waits_for_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_call: Callable[[str], int]
) -> None:
    gates = Gates(tmp_path / "gates")
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("GATES", str(gates.directory))
    gate = gates.close("charged")
    process = processes.spawn([sys.executable, "-c", SHORT.format(url=redis_url)], cwd=ROOT)
    try:
        gate.reached(timeout=60)
    finally:
        processes.end(process)
    assert own_call(redis_url) == 1


SHORT = """
import os
from celery_idempotent import idempotent
from tests.support.celery.gates import Gates

@idempotent(store="{url}", key="order", name="shop.charge", lease_ttl=2)
def charge(order, cents=999):
    Gates.from_env().wait("charged")

charge("ORD-1")
"""


@pytest.fixture
def own_call() -> Callable[[str], int]:
    def call(url: str) -> int:
        charge, _ = counted(url, on_conflict="wait", wait_timeout=60)
        return int(charge("ORD-1"))

    return call
