"""The pytest plugin of both suites: limits how often a test is repeated, and reports tasks that nothing guards."""

from __future__ import annotations

import os
from typing import Any

import pytest
from suite_counts import GUARDS, count

#: Celery's suite marks tests as flaky and repeats them up to five times; a test that hangs would cost the time of six.
MOST_REPEATS = 1


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that the suites' own plugins would, where those are not installed."""
    for marker in ("flaky", "timeout", "amqp"):
        config.addinivalue_line("markers", f"{marker}: of the suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the repeats of each test."""
    for item in items:
        for node in item.listchain():
            for index, marker in enumerate(node.own_markers):
                if marker.name == "flaky":
                    limited = {**marker.kwargs, "reruns": MOST_REPEATS}
                    node.own_markers[index] = pytest.Mark("flaky", marker.args, limited, _ispytest=True)


def pytest_runtest_logreport(report: Any) -> None:
    """Count the repeats, which a JUnit file does not have."""
    if report.outcome == "rerun":
        count("repeated", report.nodeid.replace(" ", "_"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write down each task of a live app that is of another class than the library's."""
    if not GUARDS or os.environ.get("SUITE_PATCH") != "suite_celery":
        return
    from celery import _state
    from suite_celery import is_built_in

    from celery_idempotent import IdempotentTask

    for app in _state._get_active_apps():
        for name, task in app._tasks.items():
            if not is_built_in(name) and not isinstance(task, IdempotentTask):
                count("unguarded", name)
