from __future__ import annotations

import os
import signal
from pathlib import Path

from celery import shared_task
from django.db import connection, transaction

from celery_idempotent import IdempotentTask


def kill_once(marker: str | None) -> None:
    """Kill this process, unless the file is there, which is made."""
    if marker and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@shared_task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, name="orders.charge")
def charge(self, order_id, cents, before=None, after=None):
    """Charge an order; die once before or after the commit, where a marker is given."""
    from .models import Payment

    with transaction.atomic():
        payment = Payment.objects.create(order_id=order_id, cents=cents)
        kill_once(before)
        self.lease.settle(payment.pk, using=connection)
    kill_once(after)
    return payment.pk
