"""Metrics and spans for OpenTelemetry: in an app's module, ``install()``.

Install it with ``pip install "celery-idempotent[opentelemetry]"``. Where they go is the application's choice, by its
MeterProvider and TracerProvider; in workers with a pool of processes each child needs its own, see the guide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError
from ..events import KINDS, Event, add_hook
from .catalogue import CATALOGUE, PREFIX, Kind, Measures, Metric

__all__ = ["OpenTelemetryMetrics", "OpenTelemetrySpans", "hashed", "install"]


#: What may become of a delivery; an event of a store is about none.
_OUTCOMES: dict[type[Event], str] = {kind: kind.name for kind in KINDS if not kind.name.startswith("store_")}
#: The facts of an event beside its outcome: the field, and the attribute.
_FACTS = {"fence": "fence", "original": "original_task_id", "held_for": "original_task_id", "reason": "reason"}


def install(key: Callable[[str], str] | None = None) -> None:
    """Count what happens in this process, and write into the current span what became of its delivery.

    Arguments:
        key: Makes the attribute ``idempotency.key`` of a key: `hashed`, or ``str`` for the key itself. Keys may name
            people; by default spans do not carry them.

    Raises:
        ConfigurationError: opentelemetry-api is not installed.
    """
    add_hook(OpenTelemetryMetrics())
    add_hook(OpenTelemetrySpans(key), frozenset(_OUTCOMES))


class OpenTelemetryMetrics(Measures):
    """A hook that counts in OpenTelemetry's instruments.

    Arguments:
        provider: A MeterProvider; default is the global one, also where it is set later.

    Raises:
        ConfigurationError: opentelemetry-api is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        super().__init__()
        meter = _driver().metrics.get_meter(PREFIX, meter_provider=provider)
        self._writers = {metric.name: _writer(meter, metric) for metric in CATALOGUE}

    def write(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to a counter or a gauge, or put a value into a histogram."""
        self._writers[metric.name](value, dict(zip(metric.labels, labels, strict=True)))


class OpenTelemetrySpans:
    """A hook that writes each event into the span it happens in, as a span event and as attributes.

    Arguments:
        key: See `install`.

    Raises:
        ConfigurationError: opentelemetry-api is not installed.
    """

    def __init__(self, key: Callable[[str], str] | None = None) -> None:
        self._current_span = _driver().trace.get_current_span
        self._key = key

    def __call__(self, event: Event) -> None:
        """Write it into the span, if that is recorded."""
        span, outcome = self._current_span(), _OUTCOMES.get(type(event))
        if outcome is None or not span.is_recording():
            return
        found = [(name, getattr(event, field, None)) for field, name in _FACTS.items()]
        facts = {f"idempotency.{name}": value for name, value in found if value}
        if self._key is not None:
            facts["idempotency.key"] = self._key(event.key)
        span.add_event(f"idempotency.{outcome}", facts)
        span.set_attributes({"idempotency.outcome": outcome, **facts})


def hashed(key: str) -> str:
    """Return 16 hexadecimal digits that stand for a key.

    Spans of one operation can be found by them. They hide a key from the eye, not from a reader who can guess it.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _writer(meter: Any, metric: Metric) -> Callable[[float, dict[str, str]], None]:
    options: dict[str, Any] = {"unit": metric.unit, "description": metric.help}
    write: Callable[[float, dict[str, str]], None]
    if metric.kind is Kind.COUNTER:
        write = meter.create_counter(metric.opentelemetry, **options).add
    elif metric.kind is Kind.GAUGE:
        write = meter.create_up_down_counter(metric.opentelemetry, **options).add
    else:
        options["explicit_bucket_boundaries_advisory"] = metric.buckets
        write = meter.create_histogram(metric.opentelemetry, **options).record
    return write


def _driver() -> Any:
    try:
        import opentelemetry.metrics
        import opentelemetry.trace
    except ImportError as error:
        raise ConfigurationError(
            'Expected opentelemetry-api to be installed. Run: pip install "celery-idempotent[opentelemetry]"'
        ) from error
    return opentelemetry
