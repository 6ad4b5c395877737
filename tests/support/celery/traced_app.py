"""Tasks of a worker whose children send spans and metrics, each on its own, into a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery, signals

from celery_idempotent import IdempotentTask
from celery_idempotent.metrics import opentelemetry
from tests.support.celery.apps import from_env

app = from_env(Celery("traced"))

if "TELEMETRY" in os.environ:  # in workers, and never in the test's own process
    opentelemetry.install(key=opentelemetry.hashed)


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id: str) -> str:
    return f"charged {order_id}"


@signals.worker_process_init.connect(weak=False)
def provide(**_: Any) -> None:
    """Set up what an application sets up, in a child."""
    from opentelemetry import metrics, trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    folder = Path(os.environ["TELEMETRY"])
    spans = (folder / f"{os.getpid()}.spans").open("a")
    points = (folder / f"{os.getpid()}.metrics").open("a")
    provider = TracerProvider()
    formatter = ConsoleSpanExporter(out=spans, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider.add_span_processor(SimpleSpanProcessor(formatter))
    trace.set_tracer_provider(provider)
    exporter = ConsoleMetricExporter(out=points, formatter=lambda data: data.to_json(indent=None) + "\n")
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=100)]))
    CeleryInstrumentor().instrument()
