"""A task that calls into C code which holds the GIL: no thread of its process runs meanwhile."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.journal import Journal

app = from_env(Celery("holding"))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "0.5"))}
app.conf.idempotency_renew_from_main = os.environ.get("RENEW_FROM_MAIN") == "1"

#: ctypes keeps the GIL during a call through PyDLL, where it gives it up through CDLL.
libc = ctypes.PyDLL(None)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str, seconds: int) -> int:
    journal = Journal.from_env()
    journal.write("started", order_id)
    libc.sleep(seconds)
    self.lease.check()
    journal.write("charged", order_id)
    return int(self.lease.fence)
