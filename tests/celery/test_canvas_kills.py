"""Children killed between the moment a task has settled and its ack: what follows is set off, and takes effect once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group, states

from tests.celery.test_canvas_as_celery import is_idle
from tests.celery.test_canvas_duplicates import CANVAS, TAG, Held, runs, signatures
from tests.conftest import missing
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.memcached import Memcached
from tests.support.servers import ServerMissing, open_client
from tests.support.waiting import wait_until


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CANVAS)


def callback_and_step(t: Any) -> Any:
    return chain(t("echo", 1, 2, link=[t("tally")]), t("total"))


def step(t: Any) -> Any:
    return chain(t("echo", 1, 2), t("total"))


def chord_as_step(t: Any) -> Any:
    return chain(t("echo", 1, 2), chord([t("tally"), t("total")], t("quiet")))


def last_member(t: Any) -> Any:
    return chord([t("echo", 1)], t("tally"))


def canvases_as_callbacks(t: Any) -> Any:
    return t("echo", 1, link=[chain(group(t("total"), t("echo", 1)), t("tally")), t("total")])


AFTER_IT_SETTLED = {
    "before a callback": (callback_and_step, "publishing tally", {"echo": 1, "tally": 1, "total": 1}),
    "after a callback, before the chain": (callback_and_step, "publishing total", {"echo": 1, "tally": 1, "total": 1}),
    "in the middle of a chord": (chord_as_step, "publishing total", {"echo": 1, "tally": 1, "total": 1, "quiet": 1}),
    "in the middle of a callback's canvas": (
        canvases_as_callbacks,
        "publishing echo",
        {"echo": 2, "tally": 1, "total": 2},
    ),
    "before it said so": (callback_and_step, "dispatched echo", {"echo": 1, "tally": 1, "total": 1}),
    "before it said so of a chord": (chord_as_step, "dispatched echo", {"echo": 1, "tally": 1, "total": 1, "quiet": 1}),
    "after it said so": (step, "ended echo", {"echo": 1, "total": 1}),
    "in its own on_success": (step, "succeeded echo", {"echo": 1, "total": 1}),
    "after its chord went on": (last_member, "succeeded echo", {"echo": 1, "tally": 1}),
    "before its chord went on": (last_member, "publishing tally", {"echo": 1, "tally": 1}),
}


@pytest.mark.parametrize("moment", AFTER_IT_SETTLED)
def test_what_follows_a_task_whose_child_is_killed_after_it_settled_runs_once(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str, moment: str
) -> None:
    build, point, expected = AFTER_IT_SETTLED[moment]
    node, gate = start_worker(CANVAS), gates.close(f"{point} of {TAG}")
    build(signatures(app.module)).apply_async()
    [pid, *_] = gate.reached()
    node.kill_child(pid)
    gate.open()
    journal.wait_for_count(sum(expected.values()), "ran", timeout=60)
    wait_until(lambda: is_idle(broker_url), 60, "all messages to be worked off")
    assert runs(journal) == expected, str(journal)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "moment", ["before it said so", "before it said so of a chord", "in its own on_success", "after it said so"]
)
def test_what_follows_a_task_whose_worker_is_killed_after_it_settled_runs_once(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str, moment: str
) -> None:
    build, point, expected = AFTER_IT_SETTLED[moment]
    gate = gates.close(f"{point} of {TAG}")
    node = start_worker(CANVAS)
    build(signatures(app.module)).apply_async()
    gate.reached()
    journal.wait_for_count(sum(expected.values()), "ran", timeout=30)
    with open_client(broker_url) as client:
        wait_until(lambda: client.hlen("unacked") == 1, 30, "all but the task at the gate to be acked")
        node.kill("SIGKILL")
        gate.open()
        # The next worker looks for what timed out once when it starts, whatever its kombu.
        wait_until(lambda: client.zcount("unacked_index", 0, client.time()[0] - 1.5) == client.zcard("unacked_index"))
    start_worker(CANVAS, visibility_timeout=1)
    # Once the record says that they are out, not even their messages are sent again.
    recorded = moment in ("in its own on_success", "after it said so")
    replays = 1 if recorded else 3
    wait_until(lambda: journal.count("replayed") >= replays, 30, lambda: f"{replays} replays\n{journal}")
    wait_until(lambda: is_idle(broker_url), 60, "all messages to be worked off")
    assert runs(journal) == expected, str(journal)
    if recorded:
        assert journal.count("replayed") == 1, str(journal)


@pytest.mark.nightly
def test_an_errback_runs_once_for_a_message_that_fails_again_after_a_kill_and_again_for_one_that_is_sent_again(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str
) -> None:
    node, gate = start_worker(CANVAS), gates.close(f"dispatched fail of {TAG}")
    t = signatures(app.module)
    result = t("fail").apply_async(link_error=t("failed"))
    [pid] = gate.reached()
    journal.wait_for_count(2, "ran")
    node.kill_child(pid)
    gate.open()
    wait_until(lambda: journal.count("replayed", "failed"), 30, lambda: f"the errback to replay\n{journal}")
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"fail": 2, "failed": 1}
    t("fail").apply_async(link_error=t("failed"), task_id=result.id)
    journal.wait_for_count(5, "ran", timeout=30)
    assert runs(journal) == {"fail": 3, "failed": 2}


@pytest.fixture
def memcached() -> Iterator[Memcached]:
    """A result backend that counts the parts of a chord by number, so that a part which comes twice breaks it."""
    try:
        server = Memcached()
    except ServerMissing as error:
        raise missing(error, optional="memcached") from None
    yield server
    server.stop()


# Only a real backend of this kind, and a child that is really killed, show what Celery makes of a second part.
@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["succeeded echo", "ended echo"])
def test_a_chord_member_that_is_redelivered_returns_its_part_once_where_parts_are_counted(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    journal: Journal,
    gates: Gates,
    broker_url: str,
    memcached: Memcached,
    moment: str,
) -> None:
    app, node = client_app(CANVAS, RESULT_URL=memcached.url()), start_worker(CANVAS, result_url=memcached.url())
    held, first, other = Held(broker_url), gates.close(f"{moment} of {TAG}"), gates.close(f"add of {TAG}")
    t = signatures(app.module)
    result = chord([t("echo", 1, queue="held"), t("add", 1, 1)], t("tally")).apply_async()
    message = held.take()
    held.deliver(message)
    [pid] = first.reached()
    other.reached()
    node.kill_child(pid)
    first.open()
    journal.wait_for_count(1, "replayed", "echo")
    held.deliver(message)  # and once more, by a producer that tries again
    journal.wait_for_count(2, "replayed", "echo")
    with open_client(broker_url) as client:
        wait_until(lambda: client.hlen("unacked") == 1, 30, "all but the member at the gate to be acked")
    other.open()
    wait_until(lambda: is_idle(broker_url) and result.ready(), 30, "all messages to be worked off")
    held.deliver(message)  # after the chord is over
    journal.wait_for_count(3, "replayed", "echo")
    wait_until(lambda: is_idle(broker_url), 30, "all messages to be worked off")
    assert runs(journal) == {"echo": 1, "add": 1, "tally": 1}, str(journal)
    assert (result.state, result.result) == (states.SUCCESS, [2, [1]])


# The child is killed after Celery has counted the failure and before it acks: no other test has Celery itself put a
# failed member back.
@pytest.mark.nightly
@pytest.mark.thorough
def test_a_chord_member_that_fails_and_succeeds_when_it_is_redelivered_returns_its_part_once_where_parts_are_counted(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    journal: Journal,
    gates: Gates,
    broker_url: str,
    memcached: Memcached,
) -> None:
    app, node = client_app(CANVAS, RESULT_URL=memcached.url()), start_worker(CANVAS, result_url=memcached.url())
    failed, other = gates.close(f"dispatched hesitate of {TAG}"), gates.close(f"add of {TAG}")
    t = signatures(app.module)
    result = chord([t("hesitate", 5), t("add", 1, 1)], t("tally")).apply_async()
    [pid] = failed.reached()
    other.reached()
    node.kill_child(pid)
    failed.open()
    with open_client(broker_url) as client:
        wait_until(lambda: journal.count("ran") == 3 and client.hlen("unacked") == 1, 30, "the second run to be acked")
    other.open()
    wait_until(lambda: is_idle(broker_url) and result.ready(), 30, "all messages to be worked off")
    assert (result.state, result.result) == (states.SUCCESS, [2, 5]), str(journal)
    assert runs(journal) == {"hesitate": 2, "add": 1, "tally": 1}, str(journal)
