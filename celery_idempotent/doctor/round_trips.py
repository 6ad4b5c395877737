"""How long a store takes to answer."""

from __future__ import annotations

import statistics
from time import perf_counter

from .finding import Finding, ok, warning
from .patient import Patient

__all__ = ["slow_store"]

#: How often the store is asked, and the seconds above which the median is too long: a first run asks twice.
PINGS, SLOW = 20, 0.05
#: Seconds after which a store that is very slow is asked no more.
PATIENCE = 2.0


def slow_store(patient: Patient) -> Finding:
    """Compare the median time of an answer with what a task can bear."""
    end = perf_counter() + PATIENCE
    took = [_ping(patient)]
    while len(took) < PINGS and perf_counter() < end:
        took.append(_ping(patient))
    median = statistics.median(took)
    measured = f"a round trip takes {median * 1000:.2f} ms (median of {len(took)}, longest {max(took) * 1000:.2f} ms)"
    if median > SLOW:
        return warning(
            f"{measured.capitalize()}: every first run waits for two, and a replay for one.",
            "Put the store into the region and the network of the workers, and look at its load.",
        )
    return ok(measured)


def _ping(patient: Patient) -> float:
    began = perf_counter()
    patient.store.ping()
    return perf_counter() - began
