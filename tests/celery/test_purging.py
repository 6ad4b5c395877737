"""`celery_idempotent.purge`: a task that workers know by themselves, and that beat sends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.schedules import crontab

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import app as purging
from celery_idempotent.celery import schedule_purge
from celery_idempotent.celery.app import store_of, used_stores
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.servers import open_client
from tests.support.waiting import wait_until

PURGE_APP = "tests.support.celery.purge_app"
EXPIRED = "expired"  # as there


def expire(store_url: str, number: int) -> None:
    with open_client(store_url) as client:
        client.sadd(EXPIRED, *range(number))


def expired(store_url: str) -> int:
    with open_client(store_url) as client:
        return int(client.scard(EXPIRED))


def test_a_worker_with_idempotent_tasks_knows_the_task(
    start_worker: StartWorker, client_app: Callable[..., Celery], store_url: str
) -> None:
    expire(store_url, 2500)
    node = start_worker(PURGE_APP, concurrency=1)
    app = client_app(PURGE_APP)
    assert app.send_task(purging.PURGE, kwargs={"limit": 700}).get(timeout=60) == {
        "Expiring": 700,
        "Expiring (2)": None,
    }
    assert app.send_task(purging.PURGE).get(timeout=60)["Expiring"] == 1800
    assert expired(store_url) == 0
    log = node.logs()
    assert "What has expired in Expiring (2) is not removed: The idempotency store redis://***@127.0.0.1:1/0" in log
    assert "secret" not in log
    app.conf.idempotency_store.close()


@pytest.mark.smoke
def test_beat_has_what_expired_removed_batch_after_batch(
    start_worker: StartWorker, store_url: str, tmp_path: Path
) -> None:
    expire(store_url, 50)
    env = {"PURGE_EVERY": "0.5", "PURGE_LIMIT": "20"}
    start_worker(PURGE_APP, env=env, extra_args=["--beat", f"--schedule={tmp_path / 'schedule'}"])
    wait_until(lambda: expired(store_url) == 0, 60, "three runs of at most 20")


# In this process: what is scheduled, and which stores are purged


class Expiring(MemoryStore):
    """Notes how many it was asked for."""

    def __init__(self, removes: int = 0, error: Exception | None = None) -> None:
        super().__init__()
        self.removes, self.error = removes, error

    def purge(self, limit: int | None = None) -> int:
        if self.error:
            raise self.error
        removed, self.removes = min(self.removes, limit or 0), max(0, self.removes - (limit or 0))
        return removed


def seven() -> int:
    """Do what a task does."""
    return 7


def app_with(*stores: object, **settings: Any) -> Celery:
    """Return an app with the first of the stores, and a task for each of the others."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=stores[0], **settings)
    for number, store in enumerate(stores[1:]):
        app.task(seven, name=f"task{number}", base=IdempotentTask, idempotency={"store": store})
    return app


def run(app: Celery, **kwargs: Any) -> dict[str, int | None]:
    purging.register(app)
    removed: dict[str, int | None] = app.tasks[purging.PURGE].apply(kwargs=kwargs, throw=True).get()
    return removed


def test_a_store_that_is_away_is_logged_and_does_not_keep_the_others_from_it(caplog: pytest.LogCaptureFixture) -> None:
    away = Expiring(error=StoreUnreachable("The store cannot serve."))
    with caplog.at_level(logging.WARNING, "celery_idempotent"):
        assert run(app_with(away, Expiring(7), Expiring(9)), limit=8) == {
            "Expiring": None,
            "Expiring (2)": 7,
            "Expiring (3)": 8,
        }
    assert "What has expired in Expiring is not removed: The store cannot serve." in caplog.text


def test_two_tasks_of_one_store_have_it_purged_once() -> None:
    store = Expiring(5)
    assert run(app_with(store, store, store)) == {"Expiring": 5}


def test_the_task_is_a_plain_one_whatever_the_apps_task_class_is() -> None:
    app = Celery("shop", broker="memory://", task_cls=IdempotentTask, set_as_current=False)
    app.conf.idempotency_store = Expiring(3)
    assert run(app) == {"Expiring": 3}
    assert not isinstance(app.tasks[purging.PURGE], IdempotentTask)


class Tenant(Task):
    abstract = True


def test_the_task_is_of_the_apps_task_class_as_celerys_own_are() -> None:
    """Receivers of signals, as those of tenant-schemas-celery, call its methods for every task."""
    app = Celery("shop", broker="memory://", task_cls=Tenant, set_as_current=False)
    app.conf.idempotency_store = Expiring(3)
    assert run(app) == {"Expiring": 3}
    assert isinstance(app.tasks[purging.PURGE], Tenant)


def test_tasks_named_as_ours_are_not_guarded() -> None:
    app = app_with(MemoryStore())
    task = app.task(seven, name="celery_idempotent.other", base=IdempotentTask)
    assert task.apply(throw=True).get() == 7
    assert list(store_of(app).scan()) == []


def entry(app: Celery) -> dict[str, Any]:
    found: dict[str, Any] = app.conf.beat_schedule[purging.PURGE]
    return found


def test_the_schedule_is_there_before_and_after_the_app_reads_its_settings() -> None:
    early = Celery("shop", broker="memory://", set_as_current=False)
    schedule_purge(early)
    early.config_from_object({"idempotency_store": "memory://", "beat_schedule": {"other": {"task": "x"}}})
    assert entry(early)["schedule"] == 3600.0
    assert entry(early)["kwargs"] == {"limit": purging.LIMIT}
    assert "other" in early.conf.beat_schedule
    late = app_with("memory://")
    schedule_purge(late, 60)
    assert entry(late)["options"] == {"expires": 60.0}


def test_runs_do_not_pile_up_where_nobody_takes_them() -> None:
    app = app_with("memory://")
    schedule_purge(app, timedelta(minutes=2), queue="maintenance")
    assert entry(app)["options"] == {"expires": 120.0, "queue": "maintenance"}
    schedule_purge(app, crontab(minute=17), expires=30, limit=5)
    assert entry(app)["options"] == {"expires": 30}
    assert entry(app)["kwargs"] == {"limit": 5}
    schedule_purge(app, crontab(minute=17))
    assert entry(app)["options"] == {}


# Which stores an app has


def test_stores_have_names_without_passwords_and_the_namespaces_of_their_users() -> None:
    app = app_with("redis://:secret;x@127.0.0.1:1/1", "redis://127.0.0.1:1/2", idempotency_namespace="site")
    names = {used.name: used.namespaces for used in used_stores(app)}
    assert names == {"redis://***@127.0.0.1:1/1": ("site",), "redis://127.0.0.1:1/2": ("site",)}


def test_the_store_that_an_app_inherits_is_found_under_its_key_prefix() -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": "site-"}
    (used,) = used_stores(app)
    assert isinstance(used.store, RedisStore)
    assert (used.name, used.namespaces) == ("redis://127.0.0.1:1/0", ("site-idem",))


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://:s3cret@127.0.0.1:1/3", "redis://***@127.0.0.1:1/3"),
        ("redis://shop:s3cret@127.0.0.1:1/3", "redis://***@127.0.0.1:1/3"),
        ("redis+socket:///run/redis.sock?virtual_host=2", "socket:///run/redis.sock"),
        ("sentinel://:s3cret@127.0.0.1:1;sentinel://:s3cret@127.0.0.1:2", "sentinel://***@127.0.0.1:1"),
    ],
)
def test_the_store_that_an_app_inherits_is_named_by_its_url_without_a_password(
    setting: str, url: str, name: str
) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update({"broker_url": "memory://", "result_backend": "cache+memory://", setting: url})
    app.conf.broker_transport_options = app.conf.result_backend_transport_options = {"master_name": "orders"}
    (used,) = used_stores(app)
    assert name in used.name
    assert "s3cret" not in used.name
