"""Unique tasks and who publishes them: beat, many processes at once, transactions, one producer, plain declarations."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, signals
from celery.contrib.testing.worker import start_worker as start_thread

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import unique
from celery_idempotent.celery.app import store_of
from celery_idempotent.celery.declarations import check_settings, check_unprotected
from celery_idempotent.celery.message import META_HEADER, copy_delay, destination
from celery_idempotent.celery.unique import _confirming, _reuse_client, end_in_background, release_unrun
from celery_idempotent.core import reservations
from celery_idempotent.core.binding import confirmations
from celery_idempotent.errors import AlreadyPublished, ConfigurationError
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.servers import free_port, open_client
from tests.support.stores.django_databases import django_database
from tests.support.waiting import wait_until

UNIQUE = "tests.support.celery.unique_app"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def app(client_app: Callable[..., Celery], patient_publishers: None) -> Celery:
    return client_app(UNIQUE)


@pytest.fixture
def spawn(worker_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A function that starts Python in a process of its own, with the app's environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, **worker_env, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen([sys.executable, *args], cwd=tmp_path, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_of_a_thousand_calls_at_once_two_messages_wait_at_most(
    app: Celery, spawn: Callable[..., subprocess.Popen[bytes]], broker_url: str, tmp_path: Path
) -> None:
    code = (
        "import os, sys, time\n"
        "from celery_idempotent import events\n"
        f"from {UNIQUE} import index\n"
        "doubts = []\n"
        "events.add_hook(doubts.append, {events.PublishRepeated})\n"
        "index.delay(0)\n"
        "open(f'ready{sys.argv[1]}', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.001)\n"
        "for _ in range(125): index.delay(7)\n"
        "open(f'doubts{sys.argv[1]}', 'w').write('x' * len(doubts))\n"
    )
    processes = [spawn("-c", code, str(number)) for number in range(8)]
    wait_until(lambda: all((tmp_path / f"ready{number}").exists() for number in range(8)), 60)
    before = messages(broker_url)
    (tmp_path / "go").touch()
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, messages(broker_url) - before)
        time.sleep(0.01)
    assert [process.returncode for process in processes] == [0] * 8
    # What takes a busy machine longer to confirm than a call waits for it is in doubt, and published.
    doubts = sum(len((tmp_path / f"doubts{number}").read_text()) for number in range(8))
    assert 1 <= max(most, messages(broker_url) - before) <= 2 + doubts
    assert doubts < 50


@pytest.mark.nightly
def test_a_process_that_ends_after_its_call_leaves_a_message_that_stands_for_others(
    app: Celery, spawn: Callable[..., subprocess.Popen[bytes]], broker_url: str
) -> None:
    """Also a forked child, which has nothing to do with what its parent confirms."""
    code = f"import os\nfrom {UNIQUE} import index\nindex.delay(7)\nindex.delay(8 if os.fork() else 9)\n"
    assert spawn("-c", code).wait(60) == 0
    wait_until(lambda: messages(broker_url) == 3, 60)
    time.sleep(0.5)  # for the child, which nobody waits for
    for number in (7, 8, 9):
        app.module.index.delay(number)
    assert messages(broker_url) == 3


def test_a_child_of_a_worker_confirms_before_it_leaves(
    app: Celery, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "GATHER", 60.0)
    app.module.index.delay(7)
    signals.worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)
    [record] = RedisStore.from_url(store_url).scan(prefix="idem:~unique:")
    assert record.remaining > reservations.UNCONFIRMED


@pytest.mark.nightly
def test_a_process_that_gevent_patches_late_publishes(
    app: Celery, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """As a web server does that loads the application before it forks its workers."""
    code = (
        f"from {UNIQUE} import index\n"
        "from gevent import monkey\n"
        "monkey.patch_all()\n"
        "assert index.delay(7).id == index.delay(7).id\n"
    )
    assert spawn("-W", "ignore", "-c", code).wait(60) == 0


@pytest.mark.nightly
def test_beat_does_not_pile_up_runs_of_a_task_that_takes_longer_than_its_interval(
    app: Celery,
    spawn: Callable[..., subprocess.Popen[bytes]],
    start_worker: StartWorker,
    journal: Journal,
    broker_url: str,
    tmp_path: Path,
) -> None:
    code = (
        f"from {UNIQUE} import app, slow\n"
        "app.add_periodic_task(0.2, slow.s(7), name='slow')\n"
        f"app.Beat(schedule={str(tmp_path / 'schedule')!r}, max_interval=0.2).run()\n"
    )
    beat = spawn("-c", code)
    wait_until(lambda: messages(broker_url), 30)
    time.sleep(1)
    assert messages(broker_url) == 1  # no worker takes them
    start_worker(UNIQUE, concurrency=2)
    most, end = 0, time.monotonic() + 8
    while time.monotonic() < end:
        most = max(most, messages(broker_url))
        time.sleep(0.02)
    assert beat.poll() is None
    assert most <= 3  # one waits, and two run
    assert journal.count("begin", 7) >= 4


def test_within_an_open_transaction_a_call_is_published_and_after_its_commit_it_is_skipped(
    app: Celery, tmp_path: Path, broker_url: str
) -> None:
    """What waits may start before the commit, and not see the change."""
    from django.db import transaction

    with django_database("shop", "sqlite3", NAME=str(tmp_path / "shop.sqlite3")):
        index = app.module.index
        first = index.delay(7)
        with transaction.atomic(using="shop"):
            second = index.delay(7)
            transaction.on_commit(lambda: thirds.append(index.delay(7)), using="shop")
            thirds: list[Any] = []
        assert second.id != first.id
        assert [third.id for third in thirds] == [second.id]
        with transaction.atomic(using="shop"):
            transaction.on_commit(lambda: thirds.append(index.delay(8)), using="shop")
            transaction.set_rollback(True, using="shop")
        assert len(thirds) == 1
    assert messages(broker_url) == 2


def test_after_a_commit_a_duplicate_is_logged_and_the_hooks_that_follow_are_called(
    app: Celery, tmp_path: Path, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    from django.db import transaction

    called: list[str] = []
    with django_database("shop", "sqlite3", NAME=str(tmp_path / "shop.sqlite3")):
        index = app.module.strict
        index.delay(7)
        with caplog.at_level("INFO", "celery_idempotent"), transaction.atomic():
            index.delay_on_commit(7)
            index.apply_async_on_commit((7,))
            transaction.on_commit(lambda: called.append("hook"))
        assert called == ["hook"]
        assert caplog.text.count("Nothing was published after the commit: ") == 2
        with pytest.raises(AlreadyPublished):  # no transaction is open: the caller gets it
            index.delay_on_commit(7)
    assert messages(broker_url) == 1


def test_a_class_that_publishes_after_the_commit_is_refused_behind_ours_and_does_so_before_it(
    app: Celery, tmp_path: Path, broker_url: str
) -> None:
    """Behind it, the producer of the call would be another's by then, and calls be skipped for what may never come."""
    from django.db import transaction

    class AfterCommit(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> None:
            transaction.on_commit(lambda: super(AfterCommit, self).apply_async(*args, **options), using="shop")

    class Behind(IdempotentTask, AfterCommit):
        abstract = True

    class Before(AfterCommit, IdempotentTask):
        abstract = True

    @app.task(base=Behind, unique=True, shared=False)
    def behind() -> None: ...

    @app.task(base=Before, unique=True, shared=False)
    def before() -> None: ...

    with django_database("shop", "sqlite3", NAME=str(tmp_path / "shop.sqlite3")):
        advice = r"class Base\(AfterCommit, IdempotentTask\)"
        with pytest.raises(ConfigurationError, match=advice), transaction.atomic(using="shop"):
            behind.delay()
        assert messages(broker_url) == 0
        with transaction.atomic(using="shop"):
            before.delay()
            before.delay()
            assert messages(broker_url) == 0
    assert messages(broker_url) == 1


@pytest.mark.parametrize("name", ["traced_behind", "traced_before"])
def test_a_base_that_puts_other_headers_in_place_of_ours_leaves_nothing_reserved(
    app: Celery, start_worker: StartWorker, journal: Journal, name: str
) -> None:
    """A message without its token frees nothing, and calls would be skipped for an hour."""
    task = app.tasks[name]
    first = task.delay(7)
    assert task.delay(7).id == first.id
    start_worker(UNIQUE)
    wait_until(lambda: journal.count("tried", 7) == 2)
    wait_until(lambda: task.apply_async((7,), countdown=600).id != first.id)
    assert [(each.fields["request"], each.fields["retries"]) for each in journal.entries("tried")] == [
        ("r-1", 0),
        ("r-1", 1),
    ]


def test_a_key_passes_a_base_that_hands_on_only_what_it_knows(app: Celery, broker_url: str) -> None:
    app.tasks["traced_behind"].apply_async((7,), idempotency_key="req-1")
    with open_client(broker_url) as client:
        (written,) = client.lrange("celery", 0, -1)
    assert json.loads(written)["headers"]["idempotency_key"] == "req-1"


def test_no_call_is_skipped_for_a_message_that_goes_out_under_another_id(
    app: Celery, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Unnamed(Task):
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, **_: Any) -> Any:
            return super().apply_async(args, kwargs)

    class Behind(IdempotentTask, Unnamed):
        abstract = True

    @app.task(base=Behind, unique=True, shared=False, name="unnamed")
    def unnamed() -> None: ...

    unnamed.delay()
    unnamed.delay()
    assert messages(broker_url) == 2
    assert "Every call of unnamed is published, since" in caplog.text


def test_without_djangos_autocommit_a_transaction_may_be_open(app: Celery, tmp_path: Path, broker_url: str) -> None:
    from django.db import connections, transaction

    with django_database("shop", "sqlite3", NAME=str(tmp_path / "shop.sqlite3")):
        index = app.module.index
        connections["shop"].ensure_connection()
        first = index.delay(7)
        transaction.set_autocommit(False, using="shop")
        second = index.delay(7)
        transaction.set_autocommit(True, using="shop")
        assert second.id != first.id
        assert index.delay(7).id == second.id
    assert messages(broker_url) == 2


def test_one_producer_serves_many_calls(app: Celery, broker_url: str) -> None:
    index = app.module.index
    with app.producer_or_acquire() as producer:
        first, again, other = (index.apply_async((number,), producer=producer) for number in (7, 7, 8))
    assert (first.id, messages(broker_url)) == (again.id, 2)
    assert other.id != first.id


def test_one_client_sends_what_calls_publish(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    index, made = app.module.index, []
    index.delay(0)  # which connects
    with app.producer_or_acquire() as producer:
        channel = producer.channel
        kind = channel.Client
        monkeypatch.setattr(channel, "Client", lambda **options: made.append(kind(**options)) or made[-1])
    for number in range(1, 4):
        index.delay(number)
    with app.producer_or_acquire() as producer:
        assert producer.channel is channel
        assert len(made) == 1
        channel._disconnect_pools()  # as kombu does where a connection is lost: its pool is another one
    index.delay(4)
    assert [client.connection_pool is channel.pool for client in made] == [False, True]


def test_no_producer_is_held_while_a_base_class_publishes_too(app: Celery, broker_url: str) -> None:
    """As many threads as the pool has producers would wait for each other for ever."""

    class Audited(Task):
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            with app.pool.acquire(block=False) as another:
                app.send_task("audit", args, connection=another)
            return super().apply_async(args, kwargs, **options)

    class Both(IdempotentTask, Audited):
        abstract = True

    @app.task(base=Both, name="audited", unique="document")
    def audited(document: int) -> None: ...

    others = [app.pool.acquire() for _ in range(app.pool.limit - 1)]
    try:
        audited.delay(1)
    finally:
        for other in others:
            other.release()
    assert messages(broker_url) == 2


def test_a_broker_of_another_kind_takes_over(store_url: str) -> None:
    app = Celery("two", broker=f"redis://127.0.0.1:{free_port()}/0;memory://", set_as_current=False)
    app.conf.idempotency_store = store_url

    @app.task(base=IdempotentTask, name="two.work", unique="number")
    def work(number: int) -> None: ...

    assert work.delay(1).id != work.delay(2).id
    app.close()


def test_a_connection_that_another_thread_has_not_opened_is_left_alone() -> None:
    """It may lie where the one did by which a call was published."""
    app = Celery("unopened", broker=f"redis://127.0.0.1:{free_port()}/0", set_as_current=False)
    with app.pool.acquire() as connection:
        assert connection._default_channel is None
    _reuse_client(app)
    app.close()


def test_a_producer_of_rabbitmq_counts_if_its_channel_confirms() -> None:
    """No message is sent; tests/celery/test_rabbitmq.py has those that are."""
    app = Celery("rabbit", broker="amqp://127.0.0.1:1//", set_as_current=False)
    for options, confirms in (({}, False), ({"confirm_publish": True}, True)):
        with app.connection_for_write(transport_options=options) as connection:
            producer = app.amqp.Producer(connection, auto_declare=False)
            with _confirming(app, producer) as (sending, certain):
                assert certain is confirms
                assert sending == {"producer": producer, **({"mandatory": True} if confirms else {})}
    app.conf.broker_transport_options = {"confirm_publish": True}
    with _confirming(app, None) as (sending, certain):
        assert (sending, certain) == ({"producer": None, "mandatory": True}, True)


def test_a_call_by_name_is_published_and_stands_for_none(app: Celery, start_worker: StartWorker) -> None:
    name = app.module.index.name
    ids = {app.send_task(name, (7,)).id for _ in range(2)}
    ids.add(app.module.index.delay(7).id)
    assert len(ids) == 3
    start_worker(UNIQUE)
    assert [app.AsyncResult(each).get(timeout=20) for each in ids] == [7] * 3


def test_the_option_is_warned_of_once_where_nothing_reads_it(
    app: Celery, broker_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_idempotent.celery.task._not_unique", set())
    module = app.module
    for _ in range(2):
        module.plain.apply_async((7,), unique=True)
        module.other.apply_async((7,), unique="document")
        app.send_task(module.index.name, (7,), unique="document")
        app.send_task(module.strict.name, (7,), unique=False)
    warnings = [message for message in caplog.messages if "unique= changes nothing" in message]
    assert [name for each in warnings for name in (module.plain.name, module.index.name) if f"of {name}," in each] == [
        module.plain.name,
        module.index.name,
    ]
    assert (len(warnings), messages(broker_url)) == (2, 7)


def test_calls_that_name_no_key_are_published(app: Celery, broker_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost for want of a key: the worker reports what is wrong with the arguments."""
    ids = {app.module.index.delay(None).id for _ in range(2)}
    assert len(ids) == 2
    assert caplog.text.count("is published whatever waits: Expected the argument 'document'") == 1  # and no more


def test_where_no_worker_could_free_what_a_message_reserves_every_call_is_published(
    caplog: pytest.LogCaptureFixture, result_url: str, broker_url: str
) -> None:
    for broker, store, protocol in (
        ("memory://", result_url, 2),
        (broker_url, "memory://", 2),
        (broker_url, result_url, 1),
    ):
        app = Celery("alone", broker=broker, set_as_current=False)
        app.conf.update(idempotency_store=store, task_protocol=protocol)

        @app.task(base=IdempotentTask, unique="number", name="alone.work")
        def work(number: int) -> None: ...

        caplog.clear()
        assert len({work.delay(7).id for _ in range(3)}) == 3
        assert caplog.text.count("Every call of alone.work and other unique tasks is published") == 1


def test_beside_a_worker_in_its_own_process_a_call_is_skipped(result_url: str, broker_url: str) -> None:
    app = Celery("beside", broker=broker_url, set_as_current=False)
    app.conf.idempotency_store = result_url
    begun, go, ran = threading.Event(), threading.Event(), list[int]()

    @app.task(base=IdempotentTask, unique="number", name="beside.work")
    def work(number: int) -> None:
        begun.set()
        go.wait(30)
        ran.append(number)

    with start_thread(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
        work.delay(0)
        assert begun.wait(30)
        assert work.delay(7).id == work.delay(7).id
        go.set()
        wait_until(lambda: 7 in ran, 30)
    assert ran == [0, 7]
    assert work.delay(7).id == work.delay(7).id


def test_the_thread_in_which_a_worker_consumes_waits_for_no_store(result_url: str, broker_url: str) -> None:
    """A handler of one of Celery's signals publishes there, and would hold up every message of the worker."""
    app = Celery("beside", broker=broker_url, set_as_current=False)
    app.conf.idempotency_store = result_url
    ids = list[str]()

    @app.task(base=IdempotentTask, unique="number", name="beside.work")
    def work(number: int) -> None: ...

    def publish(request: Any, **_: Any) -> None:
        if list(request.args) == [0]:
            ids.extend(work.delay(7).id for _ in range(2))

    signals.task_received.connect(publish)
    try:
        with start_thread(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
            work.delay(0)
            wait_until(lambda: len(ids) == 2, 30)
    finally:
        signals.task_received.disconnect(publish)
    assert len(set(ids)) == 2


def test_calls_that_run_at_once_run_each(app: Celery) -> None:
    app.conf.task_always_eager = True
    assert [app.module.called.delay(7).state for _ in range(2)] == ["SUCCESS"] * 2
    app.conf.task_always_eager = False
    assert app.module.called.delay(7).id == app.module.called.delay(7).id


def test_a_result_that_is_sent_to_its_caller_alone_is_not_shared(client_app: Callable[..., Celery]) -> None:
    index = client_app(UNIQUE, RESULT_URL="rpc://").module.index
    assert index.delay(7).id != index.delay(7).id
    assert index.apply_async((7,), ignore_result=True).id == index.apply_async((7,), ignore_result=True).id


def test_a_model_of_pydantic_counts_as_what_its_message_has(app: Celery, broker_url: str) -> None:
    modelled, document = app.module.modelled, app.module.Document
    first = modelled.delay(document(number=7))
    assert modelled.delay(document(number=7)).id == first.id
    assert modelled.delay(document(number=8)).id != first.id
    assert messages(broker_url) == 2


def test_publishers_share_a_store_that_is_a_file(client_app: Callable[..., Celery], tmp_path: Path) -> None:
    """It has no time limit of its own, so a thread waits for it."""
    index = client_app(UNIQUE, STORE_URL=f"sqlite:///{tmp_path}/store.sqlite3").module.index
    first = index.delay(7)
    assert index.delay(7).id == first.id
    assert index.delay(8).id != first.id


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_a_call_that_is_made_while_the_interpreter_ends_is_published(
    spawn: Callable[..., subprocess.Popen[bytes]],
    worker_env: dict[str, str],
    broker_url: str,
    tmp_path: Path,
    store: str,
) -> None:
    if store == "sqlite":
        worker_env["STORE_URL"] = f"sqlite:///{tmp_path}/store.sqlite3"
    code = f"import atexit\nfrom {UNIQUE} import index\nfor number in (7, 8): atexit.register(index.delay, number)\n"
    assert spawn("-c", code).wait(60) == 0
    assert messages(broker_url) == 2


@pytest.mark.nightly
def test_a_process_ends_though_the_result_backend_does_not_answer(
    spawn: Callable[..., subprocess.Popen[bytes]], worker_env: dict[str, str], broker_url: str, tmp_path: Path
) -> None:
    """What asks the backend for a call waits for it no longer than the call does."""
    worker_env["RESULT_URL"] = tmp_path.as_uri()
    code = f"""import threading
from {UNIQUE} import index
index.delay(7)
type(index.backend).get_task_meta = lambda *args, **options: threading.Event().wait()
index.delay(7)
"""
    assert spawn("-c", code).wait(30) == 0
    assert messages(broker_url) == 2


def test_a_message_that_is_put_back_into_its_queue_keeps_what_it_reserves(
    app: Celery, broker_url: str, store_url: str
) -> None:
    """By its headers, as a tool does that empties a dead-letter queue."""
    task = app.module.rebuild
    first = task.delay(7)
    confirmations.close()  # else it may be confirmed after its successor, for a shorter time
    with open_client(broker_url) as client:
        headers = json.loads(client.lpop("celery"))["headers"]
    task.apply_async((7,), task_id=first.id, headers={META_HEADER: headers[META_HEADER]}, countdown=600)
    assert task.apply_async((7,), countdown=900).id == first.id
    [record] = RedisStore.from_url(store_url).scan(prefix="idem:~unique:")
    assert record.remaining > 600 + 3600


def test_a_message_that_reserves_nothing_is_let_go_without_a_word_to_the_store() -> None:
    before = set(threading.enumerate())
    for headers in (None, {}, {"task": "gone"}, "text"):
        release_unrun(sender=None, message=SimpleNamespace(headers=headers))
    assert set(threading.enumerate()) == before


def test_what_a_message_reserves_where_no_store_is_known_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("bare", broker="memory://", set_as_current=False)
    token = reservations.Token("idem:~unique:bare.work::~7", "owner", hold=60.0)
    caplog.set_level("WARNING")  # a worker in this process may have set another one
    end_in_background(lambda: store_of(app), token)
    wait_until(lambda: "The reservation idem:~unique:bare.work::~7 ends by itself, in 60 s" in caplog.text)


def test_where_no_thread_can_be_started_a_reservation_ends_by_itself(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called here is the main process of a worker, about to answer the broker."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    end_in_background(lambda: store_of(app), reservations.Token("idem:~unique:bare.work::~7", "owner", hold=60.0))
    assert "ends by itself, in 60 s: can't start new thread" in caplog.text


@pytest.mark.parametrize(
    ("unique", "said"),
    [
        ("nubmer", "did you mean 'number'"),
        ({"key": "number", "untill": "done"}, "did you mean 'until'"),
        ({"until": "done", "debounce": 3}, 'until: expected "start" beside debounce'),
        (lambda self, number: number, "a callable over arguments of alone.work"),
        (7, "unique: expected True, False, a key"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused_when_it_is_made(unique: Any, said: str) -> None:
    app = Celery("alone", broker="memory://", set_as_current=False)

    @app.task(base=IdempotentTask, unique=unique, name="alone.work")
    def work(number: int) -> None: ...

    with pytest.raises(ConfigurationError) as error:
        app.finalize()
    assert said in str(error.value)


def test_a_callable_is_a_key_and_no_method_of_the_task(app: Celery, store_url: str, broker_url: str) -> None:
    task = app.module.called
    assert task.delay(7).id == task.delay(17).id
    assert task.delay(8).id != task.delay(7).id


def test_a_key_that_takes_long_to_make_leaves_a_call_its_time_for_the_store(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of arguments of 10 MB, on a busy machine: each call was published, as if the store had not answered."""
    passed = 0.0

    def slow_key(document: int) -> str:
        nonlocal passed
        passed += 60.0
        return str(document)

    for module in (unique, reservations):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + passed)
    task = app.module.index
    first = task.apply_async((7,), unique={"key": slow_key})
    assert task.apply_async((7,), unique={"key": slow_key}).id == first.id


def test_calls_and_copies_leave_no_descriptor_to_the_garbage_collector(app: Celery) -> None:
    """As where a web server has collected and then frozen, or collects rarely: in the end it could open no more."""

    def work() -> None:
        app.module.quiet.delay(7)
        copy_delay(app, 1, 5.0)
        destination(app, {"exchange": "celery", "routing_key": "celery"})

    work()  # opens what stays open
    gc.collect()
    gc.disable()
    try:
        before = os.listdir("/proc/self/fd")
        for _ in range(20):
            work()
        assert len(os.listdir("/proc/self/fd")) <= len(before)
    finally:
        gc.enable()


def test_unique_without_the_base_class_is_refused() -> None:
    app = Celery("alone", broker="memory://", set_as_current=False)

    @app.task(unique="number", name="alone.plain")
    def plain(number: int) -> None: ...

    app.finalize()
    with pytest.raises(ConfigurationError, match="Expected base=IdempotentTask where a task has unique="):
        check_unprotected(app)


def test_an_app_has_defaults_for_all_its_unique_tasks() -> None:
    app = Celery("alone", broker="memory://", set_as_current=False)
    app.conf.idempotency_unique = {"for": "2h", "until": "done"}

    @app.task(base=IdempotentTask, unique={"key": "number", "until": "start"}, name="alone.work")
    def work(number: int) -> None: ...

    @app.task(base=IdempotentTask, name="alone.other")
    def other(number: int) -> None: ...

    assert (work._binding.unique.for_, work._binding.unique.until) == (7200, "start")
    assert other._binding.unique is None
    app.conf.idempotency_uniqe = {}
    with pytest.raises(ConfigurationError, match="Did you mean idempotency_unique"):
        check_settings(app)
