"""The file of a Redis broker tells a message that vanished with its client from one that was given back or acked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.faults.broker_file import BrokerFile, Message
from tests.support.servers import RedisServer


@pytest.mark.nightly
def test_what_a_client_took_and_did_not_note_has_vanished(
    broker: RedisServer, client_app: Callable[..., Celery], start_worker: StartWorker
) -> None:
    app = client_app()
    lost = app.module.charge.delay("lost")
    with broker.client() as dying:
        assert dying.brpop("celery", timeout=5)
    kept = app.module.charge.delay("kept")
    assert BrokerFile(broker.directory).of(kept.id) == [Message(kept.id, queued=1)]
    worker = start_worker()
    kept.get(timeout=20)
    worker.stop()
    assert messages(broker.url()) == 0
    file = BrokerFile(broker.directory)
    assert file.vanished() == {lost.id}
    assert file.of(lost.id) == [Message(lost.id, queued=1, taken=1)]
    assert file.of(kept.id) == [Message(kept.id, queued=1, taken=1, noted=1, acked=1)]


@pytest.mark.nightly
def test_what_a_killed_worker_had_noted_is_given_back(
    broker: RedisServer, client_app: Callable[..., Celery], start_worker: StartWorker, gates: Gates, journal: Journal
) -> None:
    result = client_app().module.charge.delay("order")
    gates.close("before")
    doomed = start_worker(visibility_timeout=1)
    journal.wait_for_count(1, "started")
    doomed.kill("SIGKILL")
    gates.open_all()
    worker = start_worker(visibility_timeout=1)
    result.get(timeout=30)
    worker.stop()
    file = BrokerFile(broker.directory)
    assert file.vanished() == set()
    assert file.of(result.id) == [Message(result.id, queued=2, taken=2, noted=2, given_back=1, acked=1)]
