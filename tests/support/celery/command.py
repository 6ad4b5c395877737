"""`celery`, without what only other commands of it need: `python -m tests.support.celery.command -A app worker ...`.

That is the prompt of `celery amqp`, and the command that Flower adds where it is installed. Loading them takes a
quarter of a worker's start, and the tests start hundreds of workers.
"""

from __future__ import annotations

import sys
from types import ModuleType

from celery.__main__ import main


def leave_out_what_no_worker_needs() -> None:
    prompt = ModuleType("click_repl")
    prompt.register_repl = lambda group: None  # type: ignore[attr-defined]
    # An entry point whose module lacks what it names is a command that does not work, and no error.
    sys.modules.update({"click_repl": prompt, "flower.command": ModuleType("flower.command")})


leave_out_what_no_worker_needs()

if __name__ == "__main__":
    main()
