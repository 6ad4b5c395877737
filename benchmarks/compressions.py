"""How much smaller each compression makes a result, and what that costs: `python -m benchmarks.compressions`."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent.core import compression

ROWS = {"an order (0.4 KiB)": 2, "a page of orders (9 KiB)": 50, "a report (0.8 MiB)": 5000}
TURNS = 15


def orders(rows: int) -> bytes:
    """Return so many orders as JSON: words from a short list, ids, amounts and times from a random source."""
    source = random.Random(4)
    words = ["blue", "red", "large", "small", "cotton", "linen", "shirt", "coat", "scarf", "boots", "express", "gift"]
    made = [
        {
            "order": f"ORD-{source.randrange(10**8):08}",
            "customer": f"{source.getrandbits(64):016x}",
            "cents": source.randrange(100_000),
            "placed": f"2024-{source.randrange(1, 13):02}-{source.randrange(1, 29):02}T{source.randrange(24):02}:00Z",
            "text": " ".join(source.choices(words, k=6)),
            "shipped": source.random() < 0.9,
        }
        for _ in range(rows)
    ]
    return json.dumps(made).encode()


def milliseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(TURNS):
        since = time.perf_counter()
        call()
        times.append(time.perf_counter() - since)
    return statistics.median(times) * 1000


def main() -> None:
    for title, rows in ROWS.items():
        body = orders(rows)
        print(f"{title}: {len(body)} bytes")
        for name in compression.known():
            if name == compression.NONE:
                continue
            packed = compression.compress(body, name)
            there = milliseconds(partial(compression.compress, body, name))
            back = milliseconds(partial(compression.decompress, packed, name))
            print(f"  {name:<6} {len(packed) / len(body):6.1%}  {there:8.3f} ms  back {back:8.3f} ms")


if __name__ == "__main__":
    main()
