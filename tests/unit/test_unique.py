"""The options of unique publishing: what they mean, what they are layered on, and what is refused."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent.celery import unique
from celery_idempotent.core import keys, reservations
from celery_idempotent.core.heartbeat import Heartbeat, _Server
from celery_idempotent.core.policy import Unique
from celery_idempotent.core.reservations import Token
from celery_idempotent.errors import ConfigurationError, MissingKey, StoreUnreachable
from celery_idempotent.stores import Lease
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import Reason, State, is_reservation
from tests.support.unit.scripted import ScriptedStore


def test_a_renewal_on_its_way_does_not_shorten_what_a_later_message_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a retry that is due in two hours, of a task which is unique until it is done."""
    monkeypatch.setattr(_Server, "run", lambda self: None)
    heart, store = Heartbeat(), ScriptedStore()
    monkeypatch.setattr(unique, "heartbeat", heart)
    token = Token("idem:~unique:shop.index::~7", "me", until="done", hold=60.0)
    lease = store.inner.acquire(token.claim(70.0))
    assert isinstance(lease, Lease)
    reservation = unique.Reservation(replace(token, fence=lease.fence), store)
    reservation.begin("wait", 0.0, lambda: False)

    def retry() -> None:
        reservation.forget(7200.0)
        assert reservations.confirm(store.inner, reservation.token, 7200.0)

    store.before("renew", retry)
    heart.beat(monotonic())
    record = store.inner.get(token.slot)
    assert record is not None
    assert record.remaining > 7000
    assert not heart.holdings()


@pytest.mark.parametrize("until", ["start", "done"])
def test_a_worker_whose_store_has_no_record_of_a_reservation_says_so_once(
    until: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that has another store than its publishers; to look for every message would cost a request each."""
    elsewhere, right = MemoryStore(), MemoryStore()
    token = Token("idem:~unique:shop.index::~7", "me", until=until)
    right.acquire(token.claim(70.0))
    for store in (right, elsewhere, elsewhere):
        reservation = unique.Reservation(token, store)
        assert reservation.begin("wait", 0.0, lambda: False) is None
        reservation.forget()
    assert [token.slot in text and "idempotency_store" in text for text in caplog.messages] == [True]


def test_a_slot_that_a_late_claim_took_for_a_message_that_has_begun_is_not_kept_for_it() -> None:
    """As of a publisher that had no answer in time: the body has begun meanwhile, and a duplicate is deferred."""
    store, token = MemoryStore(), Token("idem:~unique:shop.index::~7", "me")
    reservations.release(store, token, Reason.STARTED)
    assert isinstance(store.acquire(token.claim(reservations.UNCONFIRMED)), Lease)
    unique.Reservation(token, store).defer(5.0)
    record = store.get(token.slot)
    assert record is not None
    assert not reservations.is_confirmed(record)


@pytest.mark.parametrize("until", ["start", "done"])
def test_a_run_at_the_end_of_a_period_begins_another(until: str) -> None:
    store, token = MemoryStore(), Token("idem:~unique:shop.index::~7", "me", until=until, throttle=60.0)
    reservation = unique.Reservation(token, store)
    reservation.begin("wait", 0.0, lambda: False)
    assert reservations.throttle(store, replace(token, owner="later"), "") > 50
    reservation.end()


def test_a_time_limit_that_rings_while_a_reservation_is_given_back_leaves_it_with_nobody() -> None:
    store, token = ScriptedStore(), Token("idem:~unique:shop.index::~7", "me", until="done")
    lease = store.inner.acquire(token.claim(70.0))
    assert isinstance(lease, Lease)

    def ring() -> None:
        raise SoftTimeLimitExceeded

    store.before("release", ring)
    unique.Reservation(replace(token, fence=lease.fence), store).end()
    record = store.inner.get(token.slot)
    assert record is not None
    assert record.state is State.RELEASED


def test_a_message_that_cannot_be_published_as_its_process_ends_is_logged_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[object] = []

    def publish(token: object) -> None:
        tried.append(token)
        raise OSError("no broker")

    waiting = unique.Reservation(Token("slot", "owner"), MemoryStore())
    monkeypatch.setattr("celery_idempotent.celery.unique._late", {waiting: publish})
    unique.hand_over()
    unique.hand_over()
    waiting._publish_again(None)
    assert tried == [waiting.token]
    assert "What calls of slot were skipped for meanwhile is not published" in caplog.text


def of(value: object, **options: Any) -> Unique:
    found = Unique.of(value, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("value", [None, False])
def test_a_task_is_not_unique_unless_it_says_so(value: object) -> None:
    assert Unique.of(value, base=Unique(until="done")) is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (True, None),
        ("document_id", "document_id"),
        (["shop", "number"], ("shop", "number")),
        ({"key": "document_id"}, "document_id"),
        (Unique(key="document_id"), "document_id"),
    ],
)
def test_a_key_may_be_written_short(value: object, key: object) -> None:
    assert of(value) == Unique(key=key)
    assert of(value).until == "start"


def test_what_a_call_says_goes_before_the_task_and_that_before_the_app() -> None:
    app = Unique(until="done", for_="2h")
    task = of({"key": "a", "for": "3h"}, base=app)
    assert (task.key, task.until, task.for_) == ("a", "done", 10800)
    call = of({"until": "start"}, base=task)
    assert (call.key, call.until, call.for_) == ("a", "start", 10800)
    assert of(True, base=task) == task
    assert repr(task) == "Unique(key='a', until='done', for_=10800.0)"


def test_a_debounced_task_waits_at_most_ten_times_as_long() -> None:
    assert Unique(debounce=30).longest_wait == 300
    assert Unique(debounce=30, max_wait=timedelta(minutes=1)).longest_wait == 60
    assert Unique(debounce=30).newest
    assert Unique(on_duplicate="replace").newest
    assert Unique(debounce=30, max_wait=30).longest_wait == 30
    assert not Unique(throttle="1m").newest
    assert not Unique(on_duplicate="raise", until="done").newest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"debounc": 3}, "expected options of Unique, got 'debounc': did you mean 'debounce'"),
        ({"lease_ttl": 3}, "got 'lease_ttl': write idempotency={'lease_ttl': ...} beside unique"),
        ({"until": "end"}, "until: expected one of 'start', 'done', got 'end'"),
        ({"for": "soon"}, "for: expected a duration"),
        ({"for": "1h", "for_": "2h"}, "for: expected no for_ beside it, got '1h'"),
        ({"on_duplicate": "drop"}, "on_duplicate: expected one of 'skip', 'raise', 'replace'"),
        ({"debounce": 3, "throttle": 3}, "throttle: expected no debounce beside it"),
        ({"until": "done", "debounce": 3}, 'until: expected "start" beside debounce'),
        ({"until": "done", "on_duplicate": "replace"}, 'until: expected "start" beside replace'),
        ({"debounce": 3, "on_duplicate": "raise"}, "on_duplicate: expected no debounce beside it"),
        ({"max_wait": 3}, "max_wait: expected a debounce that is no longer"),
        ({"debounce": 3, "max_wait": 2}, "max_wait: expected a debounce that is no longer"),
        ({"key": 3}, "key: expected None, name"),
    ],
)
def test_what_is_unfit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Unique.of(options)
    assert said in str(error.value)


def test_what_is_no_declaration_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unique: expected True, False, a key"):
        Unique.of(3)


def index(document_id: int, force: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("documnt_id", "did you mean 'document_id'"),
        (lambda self, document_id: document_id, "expected a callable over arguments of index"),
    ],
)
def test_a_key_that_cannot_be_made_when_a_call_is_published_is_refused(key: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Unique(key=key).check_signature(inspect.signature(index), "index")
    assert said in str(error.value)


def test_a_key_over_the_arguments_is_fit() -> None:
    for key in (None, "document_id", ("document_id", "force"), lambda document_id: document_id, lambda **all: 1, dict):
        Unique(key=key).check_signature(inspect.signature(index), "index")


def slot(
    source: Any = "document_id",
    arguments: Any = None,
    scope: object = None,
    message: Any = ("queue=celery",),
) -> str:
    given = {"document_id": 7, "force": False} if arguments is None else arguments
    return keys.compose_slot("idem", "shop.index", source, given, scope=scope, message=message)


def test_a_slot_is_no_key_of_an_operation() -> None:
    assert slot() == 'idem:~unique:shop.index::~7:~["queue=celery"]'
    assert is_reservation(slot())
    assert slot().startswith(keys.slots_of("idem", "shop.index"))
    for key in (keys.compose("idem", "~unique", key="a"), keys.compose("idem", "shop.index", key="~unique:b")):
        assert not is_reservation(key)


def test_calls_that_differ_have_slots_that_differ() -> None:
    slots = [
        slot(),
        slot(arguments={"document_id": "7"}),
        slot(source=None),
        slot(source=None, arguments={"document_id": 7, "force": True}),
        slot(scope="acme"),
        slot(message=("queue=celery", "priority=5")),
        slot(message=("queue=other",)),
    ]
    assert len(set(slots)) == len(slots)


def test_a_task_without_arguments_has_a_slot() -> None:
    assert slot(source=None, arguments={}) == 'idem:~unique:shop.index::~{}:~["queue=celery"]'


def test_long_arguments_are_digested_and_unnameable_ones_refused() -> None:
    assert len(slot(source=None, arguments={"text": "x" * 5000})) < 200
    with pytest.raises(MissingKey, match="unique key"):
        slot(source=None, arguments={"text": object()})


def test_a_django_that_was_imported_and_not_configured_has_no_transaction() -> None:
    """Another library may have imported it, as a test suite's plugin does."""
    probe = "import django.db; from celery_idempotent.celery import unique; print(unique._in_transaction())"
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=env, check=False)
    assert run.stdout.strip() == "False", run.stderr


def test_what_a_call_raises_is_raised_where_it_is_waited_for_and_one_that_nobody_waits_for_is_not_made() -> None:
    made: list[str] = []
    failing, left, done = Future[Any](), Future[Any](), Future[Any]()
    reservations._answer(failing, lambda: made[0])
    assert isinstance(failing.exception(), IndexError)
    assert left.cancel()
    reservations._answer(left, lambda: made.append("left"))
    reservations._answer(done, lambda: made.append("done"))
    assert (done.result(), made) == (None, ["done"])


def test_where_no_thread_can_be_started_a_store_counts_as_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = reservations._Threads()
    monkeypatch.setattr(reservations, "_threads", threads)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):  # the first has used nothing up
        with pytest.raises(StoreUnreachable, match="No thread waits for the store"):
            reservations.within(1.0, lambda: None)
    monkeypatch.undo()
    assert threads.submit(lambda: 7).result(10) == 7
