"""A process that publishes what is written to it: ``TASK NUMBER OPTIONS`` in a line, answered with the message's id.

With CLOCK_SHIFT its wall clock is wrong. With STOP_AT ("before" or "after" the broker has the message) each call stops
the whole process there, as a virtual machine that is paused, until somebody has it go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tests.support.faults.changes_app import app
from tests.support.faults.shifted_clock import say_the_time, shift_clock


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_at(step: str) -> None:
    """Stop before or after the broker gets a message; what runs in threads stops too."""
    send = app.amqp.send_task_message

    def stopping(*args: Any, **options: Any) -> Any:
        if step == "before":
            stop()
        sent = send(*args, **options)
        if step == "after":
            stop()
        return sent

    app.amqp.send_task_message = stopping


def main() -> None:
    if "CLOCK_SHIFT" in os.environ:
        shift_clock()
        say_the_time()
    if "STOP_AT" in os.environ:
        stop_at(os.environ["STOP_AT"])
    for line in sys.stdin:
        name, number, options = line.split(maxsplit=2)
        print(app.tasks[name].apply_async((int(number),), **json.loads(options)).id, flush=True)


if __name__ == "__main__":
    main()
