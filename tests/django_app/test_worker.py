"""A real worker of a Django project, whose process is killed on either side of its commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery

from tests.support import processes
from tests.support.django_app.project import Project
from tests.support.waiting import wait_until


def payments(order_id: str) -> list[int]:
    from tests.support.django_app.orders.models import Payment

    return list(Payment.objects.filter(order_id=order_id).values_list("pk", flat=True))


@contextmanager
def worker(project: Project, broker: str, log: Path) -> Iterator[None]:
    """Run `celery worker` in the project."""
    settings = {**project.settings, "CELERY_BROKER_URL": broker}
    environment = {**project.environment(), "SHOP": json.dumps(settings)}
    command = [sys.executable, "-m", "celery", "-A", "tests.support.django_app.shop", "worker", "-c", "1", "-l", "info"]
    with log.open("wb") as output:
        process = processes.spawn(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        processes.end(process, grace=20)


def test_an_order_is_paid_once_though_its_worker_is_killed_before_and_after_the_commit(
    postgres_project: Project, redis_url: str, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    producer, log = Celery("producer", set_as_current=False, broker=redis_url), tmp_path / "log"
    call = {"order_id": "ORD-killed", "cents": 999}
    markers = {"before": str(before), "after": str(after)}
    with worker(postgres_project, redis_url, log):
        for _ in range(2):
            producer.send_task("orders.charge", kwargs={**call, **markers})
        wait_until(lambda: len(answers(log)) == 2, 90.0, log.read_text)
    producer.close()
    assert before.exists()
    assert after.exists()
    assert set(answers(log)) == {str(payment) for payment in postgres_project.run(payments, "ORD-killed")}


def answers(log: Path) -> list[str]:
    """Return what the worker's tasks have returned."""
    return re.findall(r"succeeded in \S+: (\d+)", log.read_text())
