"""What every test of doctor's checks begins with."""

from __future__ import annotations

import pytest

from celery_idempotent.cli.doctor import any_store


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a busy machine answers is tested where a test sets the limit itself."""
    monkeypatch.setattr(any_store, "SLOW", 5.0)
