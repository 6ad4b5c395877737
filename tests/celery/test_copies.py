"""Copies of a deferred message: when they are tried, when they have expired."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from freezegun import freeze_time

from celery_idempotent.celery.copies import FIRST_DELAY, LONGEST_DELAY, delay_before, is_expired
from celery_idempotent.celery.endings import seconds_until
from celery_idempotent.celery.identity import Identity

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


def app_on(broker: str, **options: object) -> Celery:
    app = Celery("copies", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = options
    return app


def test_delays_grow_from_copy_to_copy_up_to_a_minute() -> None:
    app = app_on("memory://")
    delays = [delay_before(app, copy, remaining=3600) for copy in range(12)]
    assert FIRST_DELAY * 0.75 <= delays[0] <= FIRST_DELAY * 1.25
    assert delays[:6] == sorted(delays[:6])
    assert delays[-1] == LONGEST_DELAY


def test_a_copy_is_tried_as_soon_as_the_lease_in_its_way_can_have_run_out() -> None:
    assert delay_before(app_on("memory://"), 9, remaining=2.5) == 2.5
    assert delay_before(app_on("memory://"), 9, remaining=0.0) > 0


@pytest.mark.parametrize(("timeout", "longest"), [(10, 5), (3600, 60)])
def test_a_delay_stays_below_half_of_the_visibility_timeout(timeout: float, longest: float) -> None:
    delay = delay_before(app_on("redis://localhost", visibility_timeout=timeout), 10, remaining=3600)
    assert longest / 2 < delay <= longest


@pytest.mark.parametrize("expires", [NOON.isoformat(), "2026-11-21T12:00:00Z", "2026-11-21T12:00:00"])
def test_an_expiry_that_a_copy_carries_is_told_by_the_wall_clock(expires: str) -> None:
    identity = Identity("owner", expires=expires)
    with freeze_time(NOON - timedelta(seconds=1)):
        assert not is_expired(identity)
    with freeze_time(NOON + timedelta(seconds=1)):
        assert is_expired(identity)


def test_a_copy_without_an_expiry_never_expires() -> None:
    assert not is_expired(Identity("owner"))


@pytest.mark.parametrize(
    "when", [90, 90.0, NOON + timedelta(seconds=90), (NOON + timedelta(seconds=90)).replace(tzinfo=None)]
)
def test_a_retry_is_due_at_a_time_or_after_a_while(when: float | datetime) -> None:
    with freeze_time(NOON):
        assert seconds_until(when) == 90


@pytest.mark.parametrize("when", [None, NOON - timedelta(hours=1)])
def test_a_retry_that_is_due_already_is_due_now(when: datetime | None) -> None:
    with freeze_time(NOON):
        assert seconds_until(when) == 0
