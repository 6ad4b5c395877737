"""What doctor says of reservations of unique tasks, beside the messages that a Redis broker has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.cli.doctor import broker
from celery_idempotent.cli.doctor.app import checkup
from celery_idempotent.cli.doctor.findings import Finding
from celery_idempotent.cli.doctor.stores import sections
from celery_idempotent.core.binding import confirmations
from celery_idempotent.stores.maintenance import forget
from tests.support.celery.apps import close_app

CODE = "reservation-orphaned"


@pytest.fixture(params=["redis", "sqlite"])
def app(
    redis_url: str, fresh_redis: Callable[[], str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Celery]:
    """An app of which only the broker need be Redis."""
    app = Celery("shop", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.idempotency_store = fresh_redis() if request.param == "redis" else f"sqlite:///{tmp_path}/store.sqlite3"

    @app.task(base=IdempotentTask, unique="number", name="shop.index")
    def index(number: int) -> None: ...

    yield app
    close_app(app)


def found(app: Celery) -> Finding:
    confirmations.close()
    _, [target] = checkup(app)
    [section] = sections(target)
    [finding] = [each for each in section.findings if each.code == CODE]
    return finding


@pytest.mark.parametrize("prefix", ["", "shop:"])
def test_what_waits_or_was_handed_out_is_well(app: Celery, redis_client: redis.Redis, prefix: str) -> None:
    app.conf.broker_transport_options = {"global_keyprefix": prefix}
    index = app.tasks["shop.index"]
    for number in range(3):
        index.delay(number)
    index.apply_async((3,), priority=5)
    index.apply_async((4,), queue="other", countdown=600)
    with app.connection_for_read() as connection:
        queue = app.amqp.queues["celery"].bind(connection.default_channel)
        assert queue.get() is not None
        assert redis_client.hlen(f"{prefix}unacked") == 1
        assert str(found(app).severity) == "ok"


def test_what_was_purged_is_named_with_what_frees_it(app: Celery, redis_client: redis.Redis) -> None:
    index = app.tasks["shop.index"]
    index.apply_async((7,), queue="other")
    index.delay(7)
    assert redis_client.delete("celery")
    finding = found(app)
    assert str(finding.severity) == "warning"
    assert finding.found.startswith("1 reservation of unique tasks whose message is in no queue")
    assert "idempotency forget KEY" in finding.remedy
    key = finding.found.rpartition(" of ")[2].removesuffix(".")
    assert "queue=celery" in key
    store = index._binding.guard.store
    assert store.delete(key)
    assert str(found(app).severity) == "ok"
    assert index.delay(7)


def test_of_a_whole_queue_that_was_purged_one_command_frees_all(app: Celery, redis_client: redis.Redis) -> None:
    index = app.tasks["shop.index"]
    ids = [index.delay(number).id for number in range(3)]
    assert redis_client.delete("celery")
    assert "forget --prefix idem:~unique: --force" in found(app).remedy
    store = index._binding.guard.store
    assert list(forget(store, "idem:~unique:", held_too=True)) == [True] * 3
    assert [index.delay(number).id for number in range(3)] != ids


def test_a_broker_with_too_many_messages_is_not_read(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "MOST", 1)
    for number in range(2):
        app.tasks["shop.index"].delay(number)
    assert str(found(app).severity) == "info"


def test_long_queues_are_read_in_parts(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "CHUNK", 2)
    ids = {app.tasks["shop.index"].delay(number).id for number in range(5)}
    assert broker.messages(app, {"celery"}) == ids
    assert broker.messages(app, {"other"}) == set()
