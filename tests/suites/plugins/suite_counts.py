"""Counts of what ran and of what was guarded, one line each in a file that all processes of a run append to."""

from __future__ import annotations

import os

GUARDS = os.environ.get("SUITE_GUARDS") == "1"


def count(kind: str, name: str) -> None:
    """Append one line; O_APPEND keeps the lines of several processes apart."""
    file = os.open(os.environ["SUITE_COUNTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{kind} {name}\n".encode())
    finally:
        os.close(file)
