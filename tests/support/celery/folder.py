"""A Celery app whose broker is a folder, FOLDER."""

from __future__ import annotations

import os

from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import IdempotentRequest
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("folder"))
folder = os.environ["FOLDER"]
app.conf.broker_transport_options = {
    "data_folder_in": f"{folder}/messages",
    "data_folder_out": f"{folder}/messages",
    "control_folder": f"{folder}/control",
}


class NotingRequest(IdempotentRequest):
    """Writes down that its message was acked, which a folder does not show."""

    def acknowledge(self) -> None:
        super().acknowledge()
        Journal.from_env().write("acked")


@app.task(base=IdempotentTask, Request=NotingRequest, idempotency={"key": "order_id"})
def charge(order_id: str) -> str:
    Journal.from_env().write("started", order_id)
    Gates.from_env().wait(f"before {order_id}")
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"
