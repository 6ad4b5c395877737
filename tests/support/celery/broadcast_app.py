"""A Celery app with a broadcast queue: each of its workers gets every message."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.common import Broadcast

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("broadcast"))
if app.conf.broker_url.startswith("amqp"):
    app.conf.broker_transport_options = {}
app.conf.task_queues = (Broadcast("everybody"),)
app.conf.task_routes = {f"{__name__}.*": {"queue": "everybody"}}


def work(task: Any, key: str) -> str:
    journal, worker = Journal.from_env(), task.request.hostname.partition("@")[0]
    journal.write("started", key, worker=worker, retries=task.request.retries)
    Gates.from_env().wait(f"{worker} {key}")
    return worker


@app.task(base=IdempotentTask, bind=True, name=f"{__name__}.reload")
def reload(self: Any, name: str) -> str:
    """The key is the task id."""
    return work(self, name)


@app.task(base=IdempotentTask, bind=True, name=f"{__name__}.refresh", idempotency={"key": "name"}, max_retries=3)
def refresh(self: Any, name: str, failing: str = "") -> str:
    """The key is the name; one of the workers retries."""
    worker = work(self, name)
    if worker == failing and not self.request.retries:
        raise self.retry(countdown=0)
    Journal.from_env().write("refreshed", name, worker=worker)
    return worker
