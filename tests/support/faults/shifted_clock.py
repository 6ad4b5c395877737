"""A wall clock that is wrong by CLOCK_SHIFT seconds, also in children; the monotonic clock ticks as ever."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from freezegun import api

from tests.support.celery.journal import Journal


def shift_clock() -> None:
    """Shift what the wall clock says to every module, as a machine without NTP would have it."""
    shift = timedelta(seconds=float(os.environ["CLOCK_SHIFT"]))
    api.freeze_time(datetime.now(timezone.utc) + shift, tick=True).start()
    # freezegun moves the monotonic clocks too, which no wrong date does.
    names = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
    real = {id(getattr(api, f"fake_{name}")): getattr(api, f"real_{name}") for name in names}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if module is not api else ():
            if id(value) in real:
                setattr(module, name, real[id(value)])


def say_the_time(**_: Any) -> None:
    """Write into the journal what the clocks say."""
    now = datetime.now(timezone.utc).timestamp()
    Journal.from_env().write("clock", wall=time.time(), date=now, monotonic=time.monotonic())
