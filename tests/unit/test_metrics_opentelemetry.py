"""OpenTelemetry: its instruments, and what a span of Celery's own instrumentation says of its delivery."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, events
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.metrics.catalogue import CATALOGUE

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_idempotent.metrics import opentelemetry as ours
from celery_idempotent.metrics.opentelemetry import OpenTelemetryMetrics, OpenTelemetrySpans, hashed


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    yield reader
    reader.shutdown()


def points(reader: InMemoryMetricReader) -> dict[tuple[str, ...], Any]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {
        (metric.name, *map(str, (point.attributes or {}).values())): getattr(
            point, "value", getattr(point, "sum", None)
        )
        for metric in metrics
        for point in metric.data.data_points
    }


def test_a_run_is_measured_by_instruments_of_the_catalogue(reader: InMemoryMetricReader) -> None:
    metrics = OpenTelemetryMetrics(MeterProvider([reader]))
    metrics(events.Acquired("k", "t", fence=1, asked=0.5, waited=0.75))
    assert points(reader)[("celery_idempotent.live_leases", "t")] == 1
    metrics(events.Completed("k", "t", fence=1, ran=2.0, took=0.25))
    metrics(events.Replayed("k", "t", state="completed", waited=0.25))
    found = {place: value for place, value in points(reader).items() if value or "live" in place[0]}
    assert found == {
        ("celery_idempotent.starts", "t"): 1,
        ("celery_idempotent.completed", "t"): 1,
        ("celery_idempotent.replayed", "t", "completed"): 1,
        ("celery_idempotent.live_leases", "t"): 0,
        ("celery_idempotent.acquire", "t"): 0.5,
        ("celery_idempotent.settle", "t"): 0.25,
        ("celery_idempotent.wait", "t"): 1.0,
        ("celery_idempotent.run", "t"): 2.0,
        ("celery_idempotent.saved_run", "t"): 2.0,
    }


def test_histograms_have_the_buckets_of_the_catalogue(reader: InMemoryMetricReader) -> None:
    metrics = OpenTelemetryMetrics(MeterProvider([reader]))
    for metric in CATALOGUE:
        metrics.write(metric, 1.0, *["x"] * len(metric.labels))
    data = reader.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert set(found) == {metric.opentelemetry for metric in CATALOGUE}
    for metric in CATALOGUE:
        point: Any = next(iter(found[metric.opentelemetry].data.data_points))
        assert tuple(getattr(point, "explicit_bounds", ())) == metric.buckets
        assert (found[metric.opentelemetry].unit, found[metric.opentelemetry].description) == (metric.unit, metric.help)


# -- spans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Where the spans go that Celery's instrumentation makes meanwhile."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter
    instrumentor.uninstrument()
    provider.shutdown()


@pytest.fixture
def hooked() -> Iterator[Callable[..., None]]:
    added: list[Any] = []

    def add(**options: Any) -> None:
        added.append(OpenTelemetrySpans(**options))
        events.add_hook(added[-1])

    yield add
    for hook in added:
        events.remove_hook(hook)


@pytest.fixture
def charge() -> Any:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    app.conf.idempotency_store = "memory://"

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"}, name="shop.charge")
    def charge(order_id: str, fails: bool = False) -> str:
        if fails:
            raise ValueError("no funds")
        return f"charged {order_id}"

    return charge


def attributes(exporter: InMemorySpanExporter) -> list[dict[str, Any]]:
    return [_ours(span) for span in exporter.get_finished_spans() if span.name == "run/shop.charge"]


def _ours(span: ReadableSpan) -> dict[str, Any]:
    found = dict(span.attributes or {}).items()
    return {name.removeprefix("idempotency."): value for name, value in found if name.startswith("idempotency.")}


def test_the_span_of_a_task_says_what_became_of_its_delivery(
    exporter: InMemorySpanExporter, hooked: Callable[..., None], charge: Any
) -> None:
    hooked()
    charge.apply(("ORD-1",), task_id="first")
    charge.apply(("ORD-1",), task_id="second")
    ran, replayed = attributes(exporter)
    assert ran.pop("fence") > 0
    assert ran == {"outcome": "completed"}
    assert replayed == {"outcome": "replayed", "original_task_id": "first"}


def test_a_span_tells_the_events_of_its_delivery_in_their_order(
    exporter: InMemorySpanExporter, hooked: Callable[..., None], charge: Any
) -> None:
    hooked()
    charge.apply(("ORD-2", True))
    [span] = exporter.get_finished_spans()
    assert [event.name for event in span.events if event.name.startswith("idem")] == [
        "idempotency.acquired",
        "idempotency.released",
    ]
    assert attributes(exporter)[0]["reason"] == "failed"


def test_a_span_carries_the_key_only_if_it_is_asked_to(
    exporter: InMemorySpanExporter, hooked: Callable[..., None], charge: Any
) -> None:
    keys: list[str] = []
    hooked(key=lambda key: keys.append(key) or hashed(key))  # type: ignore[func-returns-value]
    charge.apply(("ORD-3",))
    [found] = attributes(exporter)
    assert found["key"] == hashed(keys[0])
    assert "ORD-3" in keys[0]
    assert len(found["key"]) == 16
    assert "ORD-3" not in str(found)


def test_outside_a_span_nothing_is_written() -> None:
    OpenTelemetrySpans()(events.Acquired("k", "t", fence=1))
    OpenTelemetrySpans()(events.StoreFailed("", store="RedisStore"))


def test_installing_adds_both_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    monkeypatch.setattr(ours, "add_hook", lambda hook, kinds=None: added.append((type(hook), kinds)))
    ours.install()
    assert [kind for kind, _ in added] == [OpenTelemetryMetrics, OpenTelemetrySpans]
    assert events.StoreFailed not in added[1][1]


def test_without_the_driver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigurationError, match=r'pip install "celery-idempotent\[opentelemetry\]"'):
        OpenTelemetryMetrics()
