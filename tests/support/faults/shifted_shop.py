"""The shop in a worker whose wall clock is wrong."""

from __future__ import annotations

from celery import signals

from tests.support.celery.shop import app
from tests.support.faults.shifted_clock import say_the_time, shift_clock

__all__ = ["app"]

shift_clock()
signals.worker_process_init.connect(say_the_time, weak=False)
