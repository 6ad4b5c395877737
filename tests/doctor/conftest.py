"""What every test of doctor's checks begins with."""

from __future__ import annotations

import pytest

from celery_idempotent.doctor import round_trips


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a busy machine answers is tested where a test sets the limit itself."""
    monkeypatch.setattr(round_trips, "SLOW", 5.0)
