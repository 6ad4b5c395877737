"""Callbacks, chains and chords around an idempotent task, on real workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery, chain, chord, group

from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

CORNERS = "tests.support.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


def test_a_callback_may_have_arguments_named_like_the_parts_of_a_chord(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(CORNERS)
    link = [app.module.mail.s("1", body="hello"), app.module.mail.s("2", tasks=["x", "y"])]
    for _ in range(2):
        assert app.module.charge.apply_async(("ORD-1",), link=link).get(timeout=20) == "charged ORD-1"
    journal.wait_for_count(4, "mailed")
    assert journal.count("charged") == 1


def test_a_task_in_a_chain_may_replace_itself(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(CORNERS)
    result = chain(app.module.again.si("ORD-1"), app.module.mail.s("after")).apply_async()
    result.parent.get(timeout=10, propagate=False)
    [mailed] = journal.wait_for_count(1, "mailed", timeout=10)
    assert mailed.fields["value"] == "done ORD-1"
    assert journal.count("tried") == 2


def test_a_deferred_member_of_a_chord_stays_in_it_with_its_stamps(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS)
    app.module.charge.delay("ORD-1")
    gate.reached()
    members = group(app.module.charge.s("ORD-1"), app.module.stamped.s("ORD-1"))
    sig = chord(members, app.module.mail.s("chord"))
    sig.stamp(tenant="blue")
    sig.apply_async()
    node.wait_for_log("copy=2")
    gate.open()
    [mailed] = journal.wait_for_count(1, "mailed", timeout=30)
    assert mailed.fields["value"] == ["charged ORD-1", "blue"]


def test_groups_and_chains_and_chords_may_be_callbacks(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(CORNERS)
    mail, charge = app.module.mail, app.module.charge
    link = [
        group(mail.s("in a group"), mail.s("in a group too")),
        mail.s("in a chain") | mail.si("chained", "after it"),
        chord([mail.s("in a header"), mail.s("in a header too")], mail.s("in a body")),
    ]
    for _ in range(2):
        assert charge.apply_async(("ORD-1",), link=link).get(timeout=20) == "charged ORD-1"
    journal.wait_for_count(2, "mailed", "in a body", timeout=30)
    journal.wait_for_count(2, "mailed", "after it", timeout=30)
    names = ["in a group", "in a group too", "in a chain", "after it", "in a header", "in a header too", "in a body"]
    assert {name: journal.count("mailed", name) for name in names} == dict.fromkeys(names, 2)
    assert journal.count("charged") == 1
