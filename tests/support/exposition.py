"""What a `/metrics` says, read by prometheus_client's own parser."""

from __future__ import annotations

import urllib.request

__all__ = ["samples", "scrape"]


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of an exposition by name and label values in their order; without the ages of series."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Return what a worker on this machine exposes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return samples(reply.read().decode())
