"""What the shop does under any framework: it notes that it runs, and does what a request's query says.

It needs no package, for each application is run in an environment of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["order"]

RUNS = Path(os.environ.get("RUNS", "runs"))


def order(query: Mapping[str, str], path: str) -> tuple[int, dict[str, Any]]:
    """Take an order; return the status and the content of its response."""
    tag = query["tag"]
    with RUNS.open("a") as file:
        file.write(f"{tag}\n")
    run = RUNS.read_text().splitlines().count(tag)
    time.sleep(float(query.get("seconds", "0")))
    match query.get("then") if run == 1 else None:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("the handler failed")
        case "fail":
            return 503, {"run": run}
    return 201, {"run": run, "path": path, "padding": "." * int(query.get("bytes", "0"))}
