"""The shop in a worker whose wall clock is wrong by CLOCK_SHIFT seconds; its monotonic clock ticks as ever."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import signals
from freezegun import api

from tests.support.celery.journal import Journal
from tests.support.celery.shop import app

__all__ = ["app"]

SHIFT = timedelta(seconds=float(os.environ["CLOCK_SHIFT"]))


def shift_clock() -> None:
    """Shift what the wall clock says to every module, as a machine without NTP would have it."""
    api.freeze_time(datetime.now(timezone.utc) + SHIFT, tick=True).start()
    # freezegun moves the monotonic clocks too, which no wrong date does.
    names = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
    real = {id(getattr(api, f"fake_{name}")): getattr(api, f"real_{name}") for name in names}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if module is not api else ():
            if id(value) in real:
                setattr(module, name, real[id(value)])


def say_the_time(**_: Any) -> None:
    now = datetime.now(timezone.utc).timestamp()
    Journal.from_env().write("clock", wall=time.time(), date=now, monotonic=time.monotonic())


shift_clock()
signals.worker_process_init.connect(say_the_time, weak=False)
