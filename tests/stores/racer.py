"""A process that races for leases: `python -m tests.stores.racer <url> <name>`, then one line per round on stdin.

A round is `<key> <time>`: ask for the key at that time, by the clock that all processes of a machine share. The answer
is `<fence> <took over>`, or the verdict.
"""

from __future__ import annotations

import sys
import time

from celery_idempotent.records import Lease
from celery_idempotent.stores import open_store
from tests.stores.benches import claim


def main(url: str, name: str) -> None:
    store = open_store(url)
    store.ping()
    print("ready", flush=True)
    for line in sys.stdin:
        key, at = line.split()
        asked = claim(key, task_id=name, max_crashes=1000)
        while time.time() < float(at):
            pass  # closer together than any sleep would bring them
        answer = store.acquire(asked)
        said = f"{answer.fence} {answer.taken_over}" if isinstance(answer, Lease) else str(answer.verdict)
        print(said, flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
