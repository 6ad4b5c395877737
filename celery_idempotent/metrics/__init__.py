"""Numbers of what happened, for Prometheus and OpenTelemetry: hooks that make metrics of events."""
