"""Spans and metrics of a real worker's children, by Celery's own instrumentation of OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.support.celery.fixtures import StartWorker
from tests.support.waiting import wait_until

pytest.importorskip("opentelemetry.instrumentation.celery")

MODULE = "tests.support.celery.traced_app"


def lines(folder: Path, kind: str) -> list[Any]:
    """Return what was exported so far; what follows the last end of a line is being written."""
    texts = [path.read_text().rpartition("\n")[0] for path in folder.glob(f"*.{kind}")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def deliveries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return our attributes of the spans of deliveries, by outcome."""
    spans = [span["attributes"] for span in lines(folder, "spans") if span["name"].startswith("run/")]
    return {span["idempotency.outcome"]: span for span in spans}


def names(folder: Path) -> set[str]:
    """Return the metrics that were exported."""
    exported = lines(folder, "metrics")
    scopes = [
        scope for each in exported for resource in each["resource_metrics"] for scope in resource["scope_metrics"]
    ]
    return {metric["name"] for scope in scopes for metric in scope["metrics"]}


def test_children_say_in_their_spans_and_metrics_what_became_of_deliveries(
    client_app: Callable[..., Celery], start_worker: StartWorker, tmp_path: Path
) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    start_worker(MODULE, concurrency=2, env={"TELEMETRY": str(folder)})
    app = client_app(MODULE)
    first = app.module.charge.delay("ORD-1")
    assert first.get(timeout=20) == "charged ORD-1"
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    wait_until(lambda: {"completed", "replayed"} <= deliveries(folder).keys(), message="both spans")
    found = deliveries(folder)
    assert found["completed"]["celery.task_name"] == f"{MODULE}.charge"
    assert found["completed"]["idempotency.fence"] > 0
    assert found["replayed"]["idempotency.original_task_id"] == first.id
    assert found["completed"]["idempotency.key"] == found["replayed"]["idempotency.key"]
    wanted = {f"celery_idempotent.{name}" for name in ("starts", "completed", "replayed", "acquire", "run", "wait")}
    wait_until(lambda: wanted <= names(folder), 20, lambda: f"metrics: {names(folder)}")
