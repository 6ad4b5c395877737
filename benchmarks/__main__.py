"""`python -m benchmarks`: every figure beside the one to reach."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version

from .figure import Figure, as_dicts, as_table
from .parts import PARTS, chosen


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 if a figure was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What celery_idempotent costs on this machine."
    )
    parser.add_argument("--quick", action="store_true", help="fewer calls; without the million records")
    parser.add_argument("--json", action="store_true", help="print the figures for a script")
    parser.add_argument("--only", metavar="PART,PART", help=f"some of {', '.join(PARTS)}")
    options = parser.parse_args(arguments)
    try:
        names = chosen(options.only, quick=options.quick)
    except ValueError as error:
        parser.error(str(error))
    figures: list[Figure] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
        figures += PARTS[name](options.quick)
    if options.json:
        print(json.dumps({"machine": _machine(), "figures": as_dicts(figures)}, indent=2))
    else:
        print(f"{_machine()}\n\n{as_table(figures)}")
    return int(any(figure.reached is False for figure in figures))


def _machine() -> str:
    packages = " ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis", "hiredis"))
    return f"Python {platform.python_version()}, {packages}, {os.cpu_count()} cores"


if __name__ == "__main__":
    raise SystemExit(main())
