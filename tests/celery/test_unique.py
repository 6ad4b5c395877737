"""Unique tasks on real workers: a call is skipped while a message waits that will do its work, and only then."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery._state import _task_stack
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from celery.signals import before_task_publish
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_idempotent import events, open_store
from celery_idempotent.core import reservations
from celery_idempotent.errors import AlreadyPublished, ConfigurationError
from celery_idempotent.events import Event, PublishRepeated, PublishReplaced, PublishSkipped
from celery_idempotent.stores import Claim, Reason
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.servers import free_port
from tests.support.waiting import wait_until

UNIQUE = "tests.support.celery.unique_app"


@pytest.fixture
def app(client_app: Callable[..., Celery], patient_publishers: None) -> Celery:
    return client_app(UNIQUE)


@pytest.fixture
def heard() -> Any:
    """The events of the publisher."""
    seen: list[Event] = []
    kinds = {PublishSkipped, PublishReplaced, PublishRepeated}
    events.add_hook(seen.append, kinds)
    yield seen
    events.remove_hook(seen.append)


def names(heard: list[Event]) -> list[str]:
    return [event.reason if isinstance(event, PublishRepeated) else type(event).__name__ for event in heard]


# -- until its start ---------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_call_is_skipped_while_a_message_waits_and_gets_its_result(
    app: Celery, start_worker: StartWorker, journal: Journal, broker_url: str, heard: list[Event]
) -> None:
    index = app.module.index
    first, second, other = index.delay(7), index.delay(document=7, version=3), index.delay(8)
    assert (second.id, messages(broker_url)) == (first.id, 2)
    assert other.id != first.id
    assert names(heard) == ["PublishSkipped"]
    assert (heard[0].task, heard[0].task_id) == (index.name, first.id)
    start_worker(UNIQUE)
    assert (second.get(timeout=20), first.get(timeout=20), other.get(timeout=20)) == (7, 7, 8)
    assert journal.count("begin") == 2
    assert index.delay(7).id != first.id


def test_a_change_that_is_made_while_the_body_runs_is_not_missed(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, broker_url: str
) -> None:
    gate = gates["in 7"].close()
    start_worker(UNIQUE, concurrency=2)
    first = app.module.one_running.delay(7)
    gate.reached()
    second = app.module.one_running.delay(7)
    third = app.module.one_running.delay(7)
    assert second.id not in (first.id, None)
    assert third.id == second.id
    gate.open()
    assert [result.get(timeout=30) for result in (first, second, third)] == [7, 7, 7]
    assert journal.count("begin", 7) == 2


@pytest.mark.nightly
def test_one_runs_and_one_waits_where_celery_stores_that_a_deferred_message_has_started(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates["in 7"].close()
    start_worker(UNIQUE, concurrency=2, env={"TRACK_STARTED": "1"})
    index = app.module.one_running
    first = index.delay(7)
    gate.reached()
    waiting = index.delay(7)
    wait_until(lambda: waiting.state == "STARTED", 20)
    assert index.delay(7).id == waiting.id != first.id
    gate.open()
    assert [result.get(timeout=20) for result in (first, waiting)] == [7, 7]
    assert journal.count("begin", 7) == 2


def test_a_call_may_be_published_whatever_waits(app: Celery, broker_url: str) -> None:
    index = app.module.index
    first, again = index.delay(7), index.apply_async((7,), unique=False)
    assert (again.id != first.id, messages(broker_url)) == (True, 2)
    assert index.apply_async((7,), unique=True).id == first.id
    assert index.s(7).set(unique=False).apply_async().id not in (first.id, again.id)
    assert (
        app.module.other.apply_async((7,), unique="document").id
        == app.module.other.apply_async((7,), unique="document").id
    )


def test_a_call_that_cannot_wait_to_know_what_waits_is_published(
    app: Celery, broker_url: str, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = app.module.index.delay(7)
    monkeypatch.setattr("celery_idempotent.core.reservations.monotonic", lambda: float("inf"))
    again = app.module.index.delay(7)
    assert (again.id != first.id, messages(broker_url), names(heard)) == (True, 2, ["late"])


def test_of_more_slots_than_a_process_remembers_calls_are_skipped_all_the_same(
    app: Celery, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_idempotent.celery.unique.REMEMBERED", 2)
    first = [app.module.index.delay(document).id for document in range(4)]
    for _ in range(2):
        assert [app.module.index.delay(document).id for document in range(4)] == first
    assert messages(broker_url) == 4


def test_a_call_may_be_refused_instead(app: Celery, broker_url: str) -> None:
    first = app.module.strict.delay(7)
    with pytest.raises(AlreadyPublished, match=f"waits as task {first.id}") as raised:
        app.module.strict.delay(7)
    assert raised.value.task_id == first.id
    assert 0 <= raised.value.age < 60
    assert messages(broker_url) == 1


def test_what_differs_in_more_than_its_arguments_is_unique_by_itself(app: Celery, broker_url: str) -> None:
    index, elsewhere = app.module.index, app.module.elsewhere
    ids = {
        index.delay(7).id,
        index.apply_async((7,), queue="other").id,
        index.apply_async((7,), priority=5).id,
        index.apply_async((7,), ignore_result=True).id,
        index.apply_async((7,), idempotency_key="a").id,
        index.apply_async((7,), idempotency_key="b").id,
        elsewhere.delay(7).id,
        elsewhere.delay(7, flag=True).id,
    }
    assert len(ids) == 8
    assert {elsewhere.delay(7).id, elsewhere.delay(7, flag=False).id, index.delay(7).id} <= ids


def test_members_of_canvases_are_published_each(app: Celery, broker_url: str) -> None:
    index = app.module.index
    index.delay(7)
    for canvas in (
        group(index.si(7), index.si(7)),
        chain(index.si(7), index.si(7)),
        chord([index.si(7), index.si(7)], index.si(7)),
    ):
        before = messages(broker_url)
        canvas.apply_async()
        assert messages(broker_url) > before
    for options in (
        {"task_id": "mine"},
        {"link": index.si(8)},
        {"link_error": index.si(8)},
        {"chain": [index.si(8)]},
    ):
        before = messages(broker_url)
        index.apply_async((7,), **options)
        assert messages(broker_url) == before + 1


def test_a_canvas_of_unique_tasks_ends(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(UNIQUE)
    index = app.module.index
    index.apply_async((7,), countdown=600)
    assert group(index.si(7), index.si(7)).apply_async().get(timeout=20) == [7, 7]
    assert chord([index.si(7), index.si(7)], index.si(7)).apply_async().get(timeout=20) == 7
    assert chain(index.si(7), index.si(7)).apply_async().get(timeout=20) == 7


def test_a_skipped_call_joins_the_trail_of_its_parent(app: Celery, start_worker: StartWorker) -> None:
    start_worker(UNIQUE, concurrency=1)
    children = app.module.parent.delay(7).get(timeout=20)
    assert len(children) == 2
    assert len(set(children)) == 1


# -- a message at least as good ----------------------------------------------------------------------------------------


def test_a_message_that_is_due_later_does_not_do_and_one_that_is_due_sooner_does(
    app: Celery, broker_url: str, heard: list[Event]
) -> None:
    index = app.module.index
    late = index.apply_async((7,), countdown=600)
    assert index.apply_async((7,), countdown=900).id == late.id
    now = index.delay(7)
    assert now.id != late.id
    assert index.delay(7).id == index.apply_async((7,), countdown=5).id == now.id
    assert names(heard) == ["PublishSkipped", "due later", "PublishSkipped", "PublishSkipped"]
    assert heard[1].waiting == late.id  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["countdown", "eta"])
def test_a_message_that_is_due_later_stands_for_calls_until_then_and_for_as_long_after_that_as_any(
    app: Celery, option: str
) -> None:
    wait = 7200.0
    due = {"countdown": wait, "eta": datetime.now(timezone.utc) + timedelta(seconds=wait)}
    app.module.index.apply_async((7,), **{option: due[option]}, unique={"for": 600})
    with closing(open_store(app.conf.idempotency_store)) as store:
        wait_until(lambda: any(map(reservations.is_confirmed, store.scan())), 20)
        [record] = store.scan()
    assert wait + 600 - 25 < record.remaining <= wait + 600 + reservations.UNCONFIRMED


@pytest.mark.parametrize("option", ["expires", "expiration"])
def test_a_message_that_expires_sooner_does_not_do(app: Celery, heard: list[Event], option: str) -> None:
    """In a worker, or in the broker alone."""
    index = app.module.index
    brief = index.apply_async((7,), **{option: 60})
    assert index.apply_async((7,), **{option: 30}).id == brief.id
    lasting = index.delay(7)
    assert lasting.id != brief.id
    assert index.apply_async((7,), **{option: 60}).id == lasting.id
    assert names(heard) == ["PublishSkipped", "expires sooner", "PublishSkipped"]


@pytest.mark.parametrize("ignored", [False, True])
def test_what_the_result_backend_has_as_ended_does_not_do(app: Celery, heard: list[Event], ignored: bool) -> None:
    """Revoked by id, also if results are ignored; unknown to its worker, or released in a store that forgot it."""
    index = app.module.index
    first = index.apply_async((7,), ignore_result=ignored)
    for state, expected in (("STARTED", True), ("SUCCESS", True), ("REVOKED", True), ("RETRY", False)):
        app.backend.store_result(first.id, None, state)
        again = index.apply_async((7,), ignore_result=ignored)
        assert (again.id != first.id) == expected, state
        first = again
    assert names(heard) == ["STARTED", "SUCCESS", "REVOKED", "PublishSkipped"]


@pytest.mark.parametrize("holder", ["itself", "another"])
def test_a_message_that_celery_has_as_started_does_only_while_another_holds_its_operation(
    app: Celery, store_url: str, holder: str
) -> None:
    task = app.module.one_running
    first = task.delay(7)
    app.backend.store_result(first.id, None, "STARTED")
    key, _ = task._binding.operation(None, "", (7,), {}, None)
    task_id = first.id if holder == "itself" else "another"
    with closing(open_store(store_url)) as store:
        store.acquire(Claim(key, "a worker", lease_ttl=30, keep_ttl=30, task_id=task_id))
    assert (task.delay(7).id == first.id) == (holder == "another")


@pytest.mark.parametrize("backend", ["redis", "file"])
def test_what_the_result_backend_cannot_read_does_not_do(
    client_app: Callable[..., Celery], tmp_path: Path, result_url: str, heard: list[Event], backend: str
) -> None:
    app = client_app(UNIQUE, RESULT_URL=result_url if backend == "redis" else tmp_path.as_uri())
    index = app.module.index
    first = index.delay(7)
    assert index.delay(7).id == first.id
    app.backend.set(app.backend.get_key_for_task(first.id), b"{")
    assert index.delay(7).id != first.id
    assert names(heard) == ["PublishSkipped", "result backend"]


def test_a_result_backend_that_does_not_answer_is_named_in_the_log(
    client_app: Callable[..., Celery], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = client_app(UNIQUE, RESULT_URL=tmp_path.as_uri()).module.index
    first, asked = index.delay(7), threading.Event()
    monkeypatch.setattr(type(index.backend), "get_task_meta", lambda *_, **__: asked.wait(10))
    try:
        assert index.delay(7).id != first.id
    finally:
        asked.set()
    assert "The result backend did not answer a publisher within 0.5 s." in caplog.text


def test_a_soft_time_limit_that_rings_while_the_result_backend_is_asked_ends_the_body_that_publishes(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = app.module.index
    first = index.delay(7)

    def ring(*_: object, **__: object) -> None:
        raise SoftTimeLimitExceeded(1)

    with monkeypatch.context() as patched:
        patched.setattr(index.backend, "get_task_meta", ring)
        with pytest.raises(SoftTimeLimitExceeded):
            index.delay(7)
    assert index.delay(7).id == first.id


def test_a_message_that_is_revoked_while_it_waits_stands_for_none(
    app: Celery, start_worker: StartWorker, gates: Gates
) -> None:
    """The result backend has nothing of it, so that only the worker can free what the message holds."""
    gate = gates["in 9"].close()
    start_worker(UNIQUE, concurrency=1)
    app.module.other.delay(9)
    gate.reached()
    index = app.module.index
    first = index.apply_async((7,), ignore_result=True)
    assert app.control.revoke(first.id, reply=True, timeout=15, limit=1)
    app.backend.forget(first.id)
    gate.open()
    wait_until(lambda: index.apply_async((7,), countdown=600, ignore_result=True).id != first.id)


def test_a_message_that_expires_while_it_waits_stands_for_none(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    index = app.module.index
    first = index.apply_async((7,), expires=0.1, ignore_result=True)
    time.sleep(0.2)
    start_worker(UNIQUE, concurrency=1)
    wait_until(lambda: index.apply_async((7,), expires=0.05, countdown=600, ignore_result=True).id != first.id)
    assert journal.count("begin", 7) == 0


def test_a_message_of_a_task_that_its_worker_does_not_know_stands_for_none(
    app: Celery, start_worker: StartWorker
) -> None:
    index = app.module.index
    first = index.apply_async((7,), ignore_result=True)
    start_worker("tests.support.celery.turns_app")
    wait_until(lambda: index.apply_async((7,), countdown=600, ignore_result=True).id != first.id)


def test_a_message_that_its_worker_cannot_decode_stands_for_none(
    app: Celery, start_worker: StartWorker, broker_url: str
) -> None:
    index = app.module.index
    first = index.apply_async((7,), ignore_result=True)
    with Connection(broker_url) as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(timeout=10)
        broken = {"content_type": "application/json", "content_encoding": "utf-8", "headers": message.headers}
        queue.producer.publish(b"{", **broken)
        message.ack()
    assert index.apply_async((7,), countdown=600, ignore_result=True).id == first.id
    start_worker(UNIQUE, concurrency=1)
    wait_until(lambda: index.apply_async((7,), countdown=600, ignore_result=True).id != first.id)


@pytest.fixture
def nowhere(client_app: Callable[..., Celery]) -> Celery:
    """The same app in a process whose broker is down."""
    return client_app(UNIQUE, BROKER_URL=f"redis://127.0.0.1:{free_port()}/0")


@pytest.mark.nightly
def test_a_publisher_that_fails_leaves_nothing_that_others_are_skipped_for(
    nowhere: Celery, app: Celery, heard: list[Event]
) -> None:
    with pytest.raises(OperationalError):
        nowhere.module.index.apply_async((7,), retry=False)
    index = app.module.index
    first = index.delay(7)
    assert names(heard) == ["unconfirmed"]
    assert index.delay(7).id == first.id


def test_a_call_to_another_broker_is_published_there(
    app: Celery, fresh_redis: Callable[[], str], broker_url: str
) -> None:
    index, url = app.module.index, fresh_redis()
    first = index.delay(7)
    with Connection(url) as connection, connection.Producer() as producer:
        ways: list[dict[str, Any]] = [{"connection": connection}, {"producer": producer}, {"publisher": producer}]
        ids = {index.apply_async((7,), **way).id for way in ways}
    assert len({first.id, *ids}) == 4
    assert (messages(broker_url), messages(url)) == (1, 3)
    with app.producer_pool.acquire() as own:
        assert index.apply_async((7,), producer=own).id == first.id


def test_a_producer_that_has_changed_to_the_apps_other_broker_is_the_apps_own(
    client_app: Callable[..., Celery], broker_url: str
) -> None:
    """As that of beat, where it cannot reach the first of several sentinels."""
    app = client_app(UNIQUE, BROKER_URL=f"redis://127.0.0.1:{free_port()}/0;{broker_url}")
    index = app.module.index
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=3, interval_start=0)
        with app.amqp.Producer(connection, auto_declare=False) as producer:
            first, again = (index.apply_async((7,), producer=producer) for _ in range(2))
    assert (again.id, messages(broker_url)) == (first.id, 1)


def test_calls_that_are_unique_by_different_options_do_not_stand_for_each_other(app: Celery) -> None:
    index = app.module.index
    own = index.apply_async((7, 3)).id
    by_version = index.apply_async((3, 7), unique="version").id
    done = index.apply_async((7, 3), unique={"until": "done"}).id
    assert len({own, by_version, done}) == 3
    assert index.apply_async((7, 4)).id == own
    assert index.apply_async((4, 7), unique="version").id == by_version


def test_a_key_in_the_headers_is_that_of_the_operation(app: Celery) -> None:
    index = app.module.index
    ids = [index.apply_async((7,), headers={"idempotency_key": key}).id for key in ("A", "B", "A")]
    assert ids[0] == ids[2] != ids[1]
    assert index.apply_async((7,), idempotency_key="A").id == ids[0]


@pytest.mark.parametrize("options", [{"eta": "tomorrow"}, {"countdown": "3"}, {"expires": [3]}])
def test_a_wrong_option_has_the_outcome_that_celery_gives_it(
    app: Celery, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def outcome(**more: object) -> object:
        try:
            return type(app.module.index.apply_async((7,), **options, **more))
        except Exception as error:  # noqa: BLE001 - whatever Celery makes of it
            return type(error), str(error)

    assert outcome() == outcome(unique=False)
    assert "index is published whatever waits" in caplog.text


def test_the_callback_of_a_task_of_celerys_is_published_whatever_waits(
    app: Celery, start_worker: StartWorker, journal: Journal, heard: list[Event]
) -> None:
    """An error there would make a failure of the task's success."""
    module = app.module
    module.strict.delay(7)
    parents = [
        module.plain.apply_async((1,), link=module.strict.si(7)),
        module.plain.apply_async((2,), link=module.quiet.si(7, 1).set(countdown=1)),
    ]
    start_worker(UNIQUE, concurrency=1)
    assert [parent.get(timeout=20) for parent in parents] == [1, 2]
    journal.wait_for_count(3, "begin", 7)


@pytest.mark.parametrize(("task", "how"), [("lost", "kill"), ("lost_early", "kill"), ("lost_early", "exit")])
def test_a_child_that_is_lost_with_its_message_holds_up_no_call(
    app: Celery, start_worker: StartWorker, journal: Journal, task: str, how: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    lost = getattr(app.module, task)
    first = lost.apply_async((7, how), ignore_result=True)
    journal.wait_for_count(1, "dies", 7)
    wait_until(lambda: lost.apply_async((7, how), countdown=600, ignore_result=True).id != first.id)


@pytest.mark.nightly
def test_a_retry_that_celery_publishes_for_a_lost_child_keeps_what_it_reserves(
    app: Celery, start_worker: StartWorker, broker_url: str, store_url: str
) -> None:
    node = start_worker(UNIQUE, concurrency=1)
    task = app.module.lost_and_retried
    first = task.apply_async((7, "kill"), ignore_result=True)
    node.wait_for_log("retry: Retry in 600s", timeout=20)
    assert task.apply_async((7, "kill"), ignore_result=True).id == first.id


# -- until its end -----------------------------------------------------------------------------------------------------


def test_until_it_is_done_a_call_is_skipped_while_the_body_runs(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates["in 7"].close()
    start_worker(UNIQUE, concurrency=2)
    first = app.module.rebuild.delay(7)
    gate.reached()
    assert app.module.rebuild.delay(7).id == first.id
    gate.open()
    assert first.get(timeout=20) == 7
    again = app.module.rebuild.delay(7)
    assert again.id != first.id
    assert again.get(timeout=20) == 7
    assert journal.count("begin", 7) == 2


@pytest.mark.parametrize("how", ["return", "raise", "ignore", "reject", "replace"])
def test_however_an_operation_ends_the_next_call_is_published(
    app: Celery, start_worker: StartWorker, journal: Journal, how: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    first = app.module.ending.delay(7, how)
    journal.wait_for_count(1, "ends", 7)
    app.module.other.delay(9).get(timeout=20)  # behind it
    wait_until(lambda: app.module.ending.apply_async((7, how), countdown=600).id != first.id)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["checked", "checked_until_done"])
@pytest.mark.parametrize("how", ["raise", "ignore", "reject", "retry"])
def test_a_message_whose_delivery_ends_before_its_task_is_called_stands_for_none(
    app: Celery, start_worker: StartWorker, journal: Journal, name: str, how: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    task = getattr(app.module, name)
    first = task.apply_async((7, how), ignore_result=True)
    journal.wait_for_count(1, "end" if how == "retry" else "checks", 7)
    wait_until(lambda: task.apply_async((7, how), countdown=600, ignore_result=True).id != first.id)


# -- retries, and tasks that publish themselves ------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["retried", "retried_until_done"])
def test_a_retry_stands_for_calls_as_its_first_attempt_did(
    app: Celery, start_worker: StartWorker, journal: Journal, name: str
) -> None:
    start_worker(UNIQUE)
    task = getattr(app.module, name)
    first = task.delay(7, delay=3)
    journal.wait_for_count(1, "tried", 7)
    wait_until(lambda: first.state == "RETRY")
    assert task.apply_async((7,), {"delay": 3}, countdown=60).id == first.id
    assert first.get(timeout=20) == 7
    assert task.apply_async((7,), countdown=600).id != first.id


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["moved", "moved_until_done"])
@pytest.mark.parametrize("how", ["retry", "replace", "same"])
def test_what_goes_on_with_another_key_stands_for_no_call_of_the_first(
    app: Celery, start_worker: StartWorker, journal: Journal, broker_url: str, name: str, how: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    task = getattr(app.module, name)
    first = task.delay(7, how)
    journal.wait_for_count(1, "moves", 7)
    app.module.other.delay(9).get(timeout=20)  # behind it
    later = task.apply_async((7, how), countdown=900)
    assert (later.id == first.id) == (how == "same")


def test_a_retry_beside_a_message_that_waits_already_is_published_all_the_same(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    """No retry is lost, and what came meanwhile keeps its reservation."""
    gate = gates["retry 7"].close()
    start_worker(UNIQUE, concurrency=1)
    first = app.module.retried.delay(7)
    gate.reached()
    waiting = app.module.retried.apply_async((7,), countdown=600)
    gate.open()
    assert first.get(timeout=20) == 7
    assert app.module.retried.apply_async((7,), countdown=900).id == waiting.id != first.id


@pytest.mark.nightly
@pytest.mark.parametrize("queue", ["elsewhere", "celery"])
def test_a_retry_that_goes_to_another_queue_stands_for_no_call_of_the_first(
    app: Celery, start_worker: StartWorker, queue: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    first = app.module.retried.delay(7, 600.0, queue)
    wait_until(lambda: first.state == "RETRY", 20)
    again = app.module.retried.apply_async((7,), countdown=900)
    assert (again.id == first.id) is (queue == "celery")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"priority": 0}, {"priority": 9}, {"ignore_result": True}])
def test_a_retry_that_differs_in_its_priority_or_result_stands_for_no_call_of_the_first(
    app: Celery, start_worker: StartWorker, journal: Journal, options: dict[str, Any]
) -> None:
    start_worker(UNIQUE, concurrency=1)
    task = app.module.retried_until_done
    first = task.apply_async((7, 600.0), options)
    journal.wait_for_count(1, "tried", 7)
    app.module.other.delay(9).get(timeout=20)  # behind it
    again = task.apply_async((7,), countdown=900)
    assert (again.id == first.id) is (options in ({}, {"priority": 0}))


def test_a_call_that_inherits_a_priority_stands_for_calls_of_that_priority(
    app: Celery, start_worker: StartWorker
) -> None:
    start_worker(UNIQUE, concurrency=1, env={"INHERIT_PRIORITY": "1"})
    waiting = app.module.scheduling.apply_async((7,), priority=9).get(timeout=20)
    index = app.module.index
    assert index.apply_async((7,), countdown=3600).id != waiting
    assert index.apply_async((7,), countdown=3600, priority=9).id == waiting


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["chained", "chained_until_done"])
def test_a_task_that_schedules_itself_goes_on(
    app: Celery, start_worker: StartWorker, journal: Journal, name: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    getattr(app.module, name).delay("a", 100)
    journal.wait_for_count(100, "round", "a", timeout=60)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["apply", "thread"])
def test_a_task_that_has_itself_scheduled_by_what_it_calls_goes_on(
    app: Celery, start_worker: StartWorker, journal: Journal, how: str
) -> None:
    start_worker(UNIQUE, concurrency=1)
    app.module.chained_apart.delay("a", 5, how)
    journal.wait_for_count(5, "round", "a")


def test_a_body_is_not_skipped_for_another_message_of_its_id(app: Celery) -> None:
    """As for the retry of another delivery, which is dropped once a later attempt has run."""
    index = app.module.index
    waiting = index.delay(7)
    assert index.delay(7).id == waiting.id
    _task_stack.push(index)
    index.push_request(id=waiting.id, called_directly=False)
    try:
        assert index.delay(7).id != waiting.id
    finally:
        index.pop_request()
        _task_stack.pop()


# -- replace, debounce, throttle ---------------------------------------------------------------------------------------


def test_the_newest_arguments_run_and_the_older_messages_are_revoked(
    app: Celery, start_worker: StartWorker, journal: Journal, heard: list[Event]
) -> None:
    results = [app.module.newest.delay(7, version) for version in range(3)]
    assert names(heard) == ["PublishReplaced"] * 2
    start_worker(UNIQUE, concurrency=1)
    assert results[2].get(timeout=20) == 2
    wait_until(lambda: [result.state for result in results[:2]] == ["REVOKED"] * 2)
    assert [entry.fields["version"] for entry in journal.entries("begin", 7)] == [2]
    assert str(results[0].result) == f"replaced by {results[2].id}" or "later message" in str(results[0].result)
    assert app.module.newest.delay(7, 4).get(timeout=20) == 4


@pytest.mark.parametrize("how", ["retry", "replace"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_an_older_message_that_goes_on_does_not_run_after_the_newer_one(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, how: str, has_begun: bool
) -> None:
    gate = gates["retry 7"].close()
    start_worker(UNIQUE, concurrency=2 if has_begun else 1)
    older = app.module.newest_again.delay(7, 1, how)
    gate.reached()
    newer = app.module.newest_again.delay(7, 2)
    if has_begun:
        assert newer.get(timeout=20) == 7
    gate.open()
    with pytest.raises(TaskRevokedError, match="replaced by a later message"):
        older.get(timeout=30)
    assert newer.get(timeout=20) == 7
    assert [entry.fields["version"] for entry in journal.entries("begin", 7)] == [2]


@pytest.mark.nightly
def test_a_message_that_goes_on_where_no_newer_one_has_begun_runs(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates["retry 7"].close()
    start_worker(UNIQUE, concurrency=1)
    older = app.module.newest_again.delay(7, 1, "retry")
    gate.reached()
    app.module.newest_again.apply_async((7, 2), countdown=600)
    gate.open()
    assert older.get(timeout=30) == 7
    assert app.module.newest_again.delay(7, 3, "retry").get(timeout=30) == 7


@pytest.mark.nightly
def test_a_message_whose_replacement_was_never_published_runs(
    app: Celery, nowhere: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    first = app.module.newest.delay(7, 1)
    with pytest.raises(OperationalError):
        nowhere.module.newest.apply_async((7, 2), retry=False)
    start_worker(UNIQUE)
    assert first.get(timeout=20) == 1


def test_a_debounced_task_runs_once_it_is_quiet_with_the_newest_arguments(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(UNIQUE, concurrency=1)
    calls = [time.monotonic()]
    for version in range(20):
        last = app.module.quiet.delay(7, version)
        calls.append(time.monotonic())
    assert last.get(timeout=20) == 19
    *earlier, newest = [entry.fields["version"] for entry in journal.entries("begin", 7)]
    assert newest == 19
    # Where the machine paused it was quiet; what has waited for max_wait runs as well.
    pauses = [later for before, later in itertools.pairwise(calls) if later - before > 0.5]
    assert len(earlier) <= len(pauses) + (calls[-1] - calls[0]) // 3
    for when in ({"countdown": 3}, {"eta": datetime.now(timezone.utc)}):
        with pytest.raises(ConfigurationError, match="Expected no countdown or eta"):
            app.module.quiet.apply_async((7,), **when)


@pytest.mark.nightly
def test_a_stream_of_calls_does_not_put_a_debounced_task_off_for_ever(
    app: Celery, start_worker: StartWorker, journal: Journal, heard: list[Event]
) -> None:
    start_worker(UNIQUE, concurrency=1)
    begun = time.monotonic()
    calls, published = [begun], {}
    while calls[-1] < begun + 7:
        published[len(calls)] = app.module.quiet.delay(7, len(calls)).id
        time.sleep(0.1)
        calls.append(time.monotonic())
    runs = [published[entry.fields["version"]] for entry in journal.wait_for_count(2, "begin", 7)]
    # What is due while the next message is on its way to the broker is in doubt, and runs.
    replaced = {event.replaced for event in heard if isinstance(event, PublishReplaced)}
    # A call of which the store did not answer in time runs by itself, and where the machine paused it was quiet.
    doubts = [event for event in heard if isinstance(event, PublishRepeated)]
    pauses = [later for earlier, later in itertools.pairwise(calls) if later - earlier > 0.5]
    assert len([run for run in runs if run not in replaced]) <= 4 + len(doubts) + len(pauses)


@pytest.mark.nightly
def test_a_backlog_does_not_put_a_debounced_task_off_for_ever(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    """What has waited for max_wait runs, however many calls come before a worker gets to it."""
    unique, begun, version = {"debounce": 0.3, "max_wait": 0.6}, time.monotonic(), 0
    while time.monotonic() < begun + 2:
        version += 1
        last = app.module.quiet.apply_async((7, version), unique=unique)
        time.sleep(0.05)
    start_worker(UNIQUE, concurrency=1)
    assert last.get(timeout=20) == version
    runs = [entry.fields["version"] for entry in journal.entries("begin", 7)]
    assert 2 <= len(runs) <= 5  # of few calls, on a busy machine, fewer have waited for so long
    assert runs == sorted(runs)


@pytest.mark.nightly
def test_a_message_that_expires_first_does_not_replace_one_that_does_not(
    app: Celery, start_worker: StartWorker, journal: Journal, heard: list[Event]
) -> None:
    newest = app.module.newest
    newest.delay(7, 0)
    first = newest.delay(7, 1)
    newest.apply_async((7, 2), expires=0.3)
    last = newest.apply_async((7, 3), expires=0.5)
    assert names(heard) == ["PublishReplaced", "expires sooner", "PublishReplaced"]
    time.sleep(0.6)
    start_worker(UNIQUE)
    assert first.get(timeout=20) == 1
    wait_until(lambda: last.state == "REVOKED")
    assert [entry.fields["version"] for entry in journal.entries("begin", 7)] == [1]


def test_a_call_that_is_due_sooner_is_not_skipped_for_what_a_debounce_or_throttle_holds_back(
    app: Celery, start_worker: StartWorker
) -> None:
    quiet, gathered = app.module.quiet, app.module.gathered
    held = quiet.apply_async((7,), unique={"debounce": 600, "max_wait": 6000})
    assert quiet.apply_async((7,), unique={"debounce": None, "max_wait": None}).id != held.id
    start_worker(UNIQUE, concurrency=1)
    gathered.apply_async((7,), unique={"throttle": 600}).get(timeout=20)
    held = gathered.apply_async((7,), unique={"throttle": 600})
    assert gathered.apply_async((7,), unique={"throttle": 600}).id == held.id
    assert gathered.apply_async((7,), countdown=3).id != held.id


@pytest.mark.nightly
def test_a_message_that_is_due_after_the_newer_one_has_run_does_not_run(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(UNIQUE, concurrency=1)
    first = app.module.newest.apply_async((7, 1), countdown=4)
    assert app.module.newest.delay(7, 2).get(timeout=20) == 2
    app.module.newest.apply_async((7, 3), countdown=600)
    wait_until(lambda: first.state == "REVOKED", 20)
    assert [entry.fields["version"] for entry in journal.entries("begin", 7)] == [2]


@pytest.fixture
def sent(app: Celery) -> Iterator[list[Any]]:
    """The headers of what is published."""
    seen: list[Any] = []

    def note(headers: Any, **_: Any) -> None:
        seen.append(dict(headers))

    before_task_publish.connect(note)
    yield seen
    before_task_publish.disconnect(note)


def until(header: str, start: datetime | None = None) -> float:
    """Return the seconds from a start, now by default, until a time that a message has."""
    return (datetime.fromisoformat(header) - (start or datetime.now(timezone.utc))).total_seconds()


def token(sent: list[Any]) -> reservations.Token:
    """Return that of the last message."""
    found = reservations.Token.read(sent[-1]["idempotency"]["unique"])
    assert found is not None
    return found


def test_the_record_of_a_message_is_kept_until_the_last_of_those_that_it_replaced_has_come(
    app: Celery, sent: list[Any]
) -> None:
    """Else that one would run, with its older arguments."""
    app.module.newest.apply_async((7,), countdown=86400)
    for countdown in (60, 10):
        app.module.newest.apply_async((7,), countdown=countdown)
        assert 90000 - 10 < token(sent).claim(10).keep_ttl <= 90000


def test_the_record_is_kept_as_long_by_a_message_that_comes_after_one_which_has_begun(
    app: Celery, sent: list[Any]
) -> None:
    newest, store = app.module.newest, open_store(app.conf.idempotency_store)

    newest.apply_async((7,), countdown=86400)
    newest.delay(7)
    reservations.release(store, token(sent), Reason.STARTED)
    newest.delay(7)
    assert 90000 - 10 < token(sent).claim(10).keep_ttl <= 90000
    reservations.release(store, token(sent), Reason.STARTED)
    newest.apply_async((7,), headers={"idempotency": {"unique": token(sent).header()}})  # as its retry
    assert 90000 - 10 < token(sent).claim(10).keep_ttl <= 90000
    newest.delay(7)
    assert 90000 - 10 < token(sent).claim(10).keep_ttl <= 90000


def test_what_is_held_back_expires_so_long_after_it_is_due(app: Celery, sent: list[Any]) -> None:
    start = datetime.now(timezone.utc)
    app.module.quiet.apply_async((7,), expires=30)
    published = datetime.now(timezone.utc)
    app.module.gathered.delay(7)
    assert [call.id for call in [app.module.gathered.apply_async((8,), expires=600) for _ in range(2)]]
    assert until(sent[0]["expires"], published) <= 31 <= until(sent[0]["expires"], start)
    assert until(sent[2]["expires"]) <= 600


@pytest.mark.nightly
def test_a_throttled_call_with_an_expiry_is_skipped_for_what_waits_for_the_end_of_the_period(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(UNIQUE, concurrency=1)
    assert app.module.gathered.apply_async((7, 0), expires=0.5).get(timeout=20) == 0
    waiting = [app.module.gathered.apply_async((7, version), expires=0.5) for version in (1, 2, 3)]
    assert len({result.id for result in waiting}) == 1
    assert waiting[0].get(timeout=20) == 1


def test_a_throttled_call_is_not_skipped_for_what_is_due_long_after_the_period(app: Celery, broker_url: str) -> None:
    gathered, store = app.module.gathered, open_store(app.conf.idempotency_store)
    later = gathered.apply_async((7,), countdown=3600)
    [record] = store.scan(prefix="idem:~unique")
    token = reservations.Token(record.key, "of a run", throttle=60.0)
    assert reservations.throttle(store, token, "host:1") == 0
    at_its_end = gathered.delay(7)
    assert at_its_end.id != later.id
    assert gathered.delay(7).id == at_its_end.id


def test_a_throttled_call_is_skipped_for_what_was_due_at_the_end_of_the_period_and_waits_for_a_worker(
    app: Celery, sent: list[Any]
) -> None:
    """Else both run, one right after the other."""
    gathered, store = app.module.gathered, open_store(app.conf.idempotency_store)
    gathered.apply_async((7,), unique={"throttle": 1})
    reservations.release(store, token(sent), Reason.STARTED)
    waiting = gathered.apply_async((7,), unique={"throttle": 1})
    wait_until(lambda: until(sent[-1]["eta"]) < 0)
    assert gathered.apply_async((7,), unique={"throttle": 1}).id == waiting.id


def test_a_call_that_begins_a_period_leaves_the_message_that_gathers_its_calls_in_its_place(
    app: Celery, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else calls of two processes at once had one message run at the end of the period, and later calls another."""
    gathered, begin, meanwhile = app.module.gathered, reservations.throttle, []

    def begin_and_pause(*args: Any, **options: Any) -> float:
        left = begin(*args, **options)
        if not meanwhile:
            meanwhile.append(None)
            with ThreadPoolExecutor(1) as pool:
                meanwhile[0] = pool.submit(gathered.apply_async, (7,), unique={"throttle": 600}).result()
        return left

    monkeypatch.setattr(reservations, "throttle", begin_and_pause)
    first = gathered.apply_async((7,), unique={"throttle": 600})
    assert [event.reason for event in heard] == ["gathers calls"]
    assert first.id != meanwhile[0].id
    assert gathered.apply_async((7,), unique={"throttle": 600}).id == meanwhile[0].id


def test_what_a_throttle_has_replaced_for_its_period_runs_and_is_not_replaced_again(
    app: Celery, heard: list[Event]
) -> None:
    """Else a worker that is slower than the calls would never run it."""
    gathered = app.module.newest_gathered
    gathered.delay(7, 0)
    wait_until(lambda: gathered.delay(7, 1) and "period is over" in names(heard))
    assert set(names(heard)[:-1]) <= {"PublishReplaced"}
    gathered.delay(7, 2)
    assert names(heard)[-1] == "PublishReplaced"


def test_calls_that_a_throttle_gathers_replace_one_another_though_they_expire(
    app: Celery, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the clock of the publisher of each is a little behind that of the last."""
    now = app.now
    for version in range(4):
        monkeypatch.setattr(app, "now", lambda behind=version: now() - timedelta(seconds=0.2 * behind))
        app.module.newest_gathered.apply_async((7, version), expires=60, unique={"throttle": 600})
    assert names(heard) == ["PublishReplaced"] * 3


def test_a_throttled_call_is_not_skipped_for_the_first_of_its_period_which_expires_before_its_end(
    app: Celery, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the clock of its publisher is a little behind."""
    first = app.module.gathered.apply_async((7,), expires=1, unique={"throttle": 4})
    now = app.now
    monkeypatch.setattr(app, "now", lambda: now() - timedelta(seconds=0.3))
    assert app.module.gathered.apply_async((7,), expires=1, unique={"throttle": 4}).id != first.id


def test_a_call_cannot_replace_messages_that_do_not_look_whether_they_were(app: Celery, sent: list[Any]) -> None:
    for unique in ({"on_duplicate": "replace"}, {"debounce": 1}):
        with pytest.raises(ConfigurationError, match=r"for one call of .*index, got .* Declare it in the task's own"):
            app.module.index.apply_async((7,), unique=unique)
    app.module.newest.apply_async((7,), unique={"on_duplicate": "skip"})
    assert sent[-1]["idempotency"]["unique"]["newest"]  # so that a later call replaces it


def test_a_call_that_does_not_expire_is_not_skipped_for_a_retry_that_does(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(UNIQUE, concurrency=1)
    first = app.module.retried.apply_async((7, 600.0), expires=300)
    journal.wait_for_count(1, "tried", 7)
    wait_until(lambda: first.state == "RETRY")
    assert app.module.retried.apply_async((7, 600.0), countdown=900).id != first.id


def test_a_throttled_task_runs_now_and_once_at_the_end_of_the_period(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(UNIQUE, concurrency=1)
    first = app.module.gathered.delay(7, 0)
    assert first.get(timeout=20) == 0
    others = [app.module.gathered.delay(7, version) for version in range(1, 10)]
    assert len({result.id for result in others}) == 1
    assert others[0].get(timeout=20) == 1
    begins = journal.entries("begin", 7)
    assert [entry.fields["version"] for entry in begins] == [0, 1]
    assert begins[1].at - begins[0].at > 1
    last = app.module.gathered.delay(7, 11)  # the run at the end has begun a period of its own
    assert last.get(timeout=20) == 11
    assert journal.entries("begin", 7)[2].at - begins[1].at > 1
