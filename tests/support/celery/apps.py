"""Celery apps for worker tests: configured by the environment, loaded anew for each test."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import redis
from celery import Celery, _state, signals

from celery_idempotent.celery import app as celery_app
from celery_idempotent.celery import unique
from tests.support.celery import measuring
from tests.support.servers import open_client
from tests.support.waiting import wait_until

#: Seconds after which a message that a worker has popped is noted as unacked, on a busy machine too.
BETWEEN_POP_AND_NOTE = 0.1


def from_env(app: Celery) -> Celery:
    """Configure an app with BROKER_URL, RESULT_URL, VISIBILITY_TIMEOUT and, if they are set, STORE_URL,
    BROKER_WRITE_URL, VISIBILITY_REFRESH ("0": off), TRANSPORT_OPTIONS and SETTINGS, which are Celery's own (JSON)."""
    measuring.answer_saves()
    env = os.environ
    app.conf.update(
        broker_url=env.get("BROKER_URL"),
        result_backend=env.get("RESULT_URL"),
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "visibility_timeout": float(env.get("VISIBILITY_TIMEOUT", "3600")),
            # Look for what timed out every second; kombu before 5.7 looks every 100 s, whatever it is told.
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            **json.loads(env.get("TRANSPORT_OPTIONS", "{}")),
        },
        # A client that waits for a result should see a worker's death as it is, not as a slow poll.
        result_expires=600,
        worker_hijack_root_logger=True,
        task_publish_retry=False,
    )
    app.conf.update(json.loads(env.get("SETTINGS", "{}")))
    if "BROKER_WRITE_URL" in env:
        app.conf.broker_write_url = env["BROKER_WRITE_URL"]
    if "STORE_URL" in env:
        app.conf.idempotency_store = env["STORE_URL"] or None
    # Some tests are about what happens when a broker hands out again what is still held.
    app.conf.idempotency_visibility_refresh = env.get("VISIBILITY_REFRESH", "1") == "1"
    return app


def messages(broker_url: str) -> int:
    """Return how many messages a Redis broker holds, waiting or handed out; none means that all work is done.

    One that is just handed out is nowhere for a moment: kombu pops it, and notes it as unacked in a second round trip.
    """
    with open_client(broker_url) as client:
        found = _messages(client)
        if not found:
            time.sleep(BETWEEN_POP_AND_NOTE)
            found = _messages(client)
        return found


def _messages(client: redis.Redis) -> int:
    with client.pipeline() as both:  # at once, else one may go from one to the other between
        both.llen("celery")
        both.hlen("unacked")
        return sum(both.execute())


def wait_for_no_reader(broker_url: str) -> None:
    """Wait until no client waits for a message of a Redis broker, as a worker that was just paused may for a second.

    It would be handed the next message, and keep it in its socket.
    """
    with open_client(broker_url) as client:
        database = str(client.connection_pool.connection_kwargs["db"])
        wait_until(
            lambda: not [each for each in client.client_list() if each["db"] == database and "b" in each["flags"]],
            message="the paused worker's request for a message to end",
        )


def wait_for_commands(app: Celery) -> None:
    """Wait until a worker hears commands: what comes before is lost, and it says that it is ready sooner.

    With gevent and eventlet it may even work before it hears any.
    """
    wait_until(lambda: app.control.ping(timeout=1, limit=1), 20, "a worker to hear commands")


def close_backend(app: Celery) -> None:
    """Close what this thread's result backend has opened; Celery makes one for each thread that publishes or waits."""
    if hasattr(app.backend, "result_consumer"):
        # A result that outlives its test would, when it is collected, ask a server that is gone.
        app.backend.result_consumer.cancel_for = lambda task_id: None
        if getattr(app.backend.result_consumer, "_consumer", True) is not None:
            app.backend.result_consumer.stop()
    if hasattr(app.backend, "client"):
        app.backend.client.close()
        if hasattr(app.backend.client, "connection_pool"):  # Redis: it is not the client's own, which leaves it open
            app.backend.client.connection_pool.disconnect()


def close_app(app: Celery) -> None:
    """Close what an app opened to publish and, in this thread, to wait for results: nothing is left to the collector.

    A thread that a test starts to publish ends with `close_backend`.
    """
    close_backend(app)
    for store in celery_app._stores.get(app, {}).values():  # publishers of unique tasks use it
        store.close()
    _, confirming = unique._confirming_pools.pop(app, (0, None))
    if confirming is not None:
        confirming.force_close_all()
        confirming.connections.force_close_all()
    app.close()


@contextmanager
def private_shared_tasks() -> Iterator[None]:
    """Forget, at the end, which tasks were declared meanwhile, and what is to be done when a worker starts.

    Celery registers the tasks of every app in all apps that are made later: a second load of a module would get the
    first one's task objects, with their options. A worker that another test starts in this process is not this app's.
    """
    # Both are changed in place by Celery, so a copy stands in for each.
    with (
        mock.patch.object(_state, "_on_app_finalizers", set(_state._on_app_finalizers)),
        mock.patch.object(signals.worker_init, "receivers", list(signals.worker_init.receivers)),
    ):
        yield


def load_app(module: str, env: Mapping[str, str]) -> Celery:
    """Return the `app` of a module, loaded afresh under this environment, for publishing from a test.

    The module is not put into sys.modules: each test has its own app and task objects, under the names that the workers
    know. `app.tasks["tests.support.celery.plain_app.charge"]`, or the module's own names on `app.module`.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.loader is not None, f"{module} has no loader"
    loaded = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, env), private_shared_tasks():
        spec.loader.exec_module(loaded)
        app: Celery = loaded.app
        app.module = loaded
        app.finalize()
    return app
