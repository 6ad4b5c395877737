"""The pytest plugin of both suites: reports tasks that are declared so that nothing guards them."""

from __future__ import annotations

import os

import pytest
from suite_counts import GUARDS, count


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of plugins that are not there.

    One of them repeats tests that are marked as flaky, up to five times, and has no time limit for the repeats.
    """
    for marker in ("flaky", "timeout", "amqp"):
        config.addinivalue_line("markers", f"{marker}: of the suite")


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
