"""How soon another takes over from a holder whose process was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

from celery_idempotent.stores import Lease, open_store
from celery_idempotent.stores.records import new_owner

from .figure import Figure
from .subject import StoreSubject

__all__ = ["measure"]

LEASE = 2.0
#: Seconds between two deliveries of the waiting message.
PAUSE = 0.05

_HOLDER = """
import sys
from celery_idempotent.stores import Claim
from celery_idempotent.stores import open_store
store = open_store(sys.argv[1])
store.acquire(Claim(sys.argv[2], "holder", float(sys.argv[3]), 3600.0, task_id="a"))
print("held", flush=True)
sys.stdin.read()
"""


def measure(kind: str, url: str, *, rounds: int) -> list[Figure]:
    """Kill a holder with SIGKILL, and time from there to the take-over by a message that is delivered all the while.

    Arguments:
        kind: Which kind of store.
        url: Of an empty place of this kind.
        rounds: How many holders to kill.
    """
    with StoreSubject(open_store(url)) as subject:
        seconds = sorted(_round(subject, url) for _ in range(rounds))
    note = f"lease {LEASE:g} s, a delivery every {PAUSE * 1e3:.0f} ms; worst {seconds[-1]:.2f} s of {rounds}"
    return [Figure("recovery", f"{kind}, take-over after SIGKILL", seconds[len(seconds) // 2], "s", note=note)]


def _round(subject: StoreSubject, url: str) -> float:
    claim = replace(subject.claim(), lease_ttl=LEASE, task_id="b", redelivered=True)
    command = [sys.executable, "-c", _HOLDER, url, claim.key, str(LEASE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        since = time.monotonic()  # not when the process is gone, which on a busy machine is a part of its lease later
        holder.kill()
    while True:
        answer = subject.store.acquire(replace(claim, owner=new_owner()))
        if isinstance(answer, Lease):
            assert answer.taken_over
            return time.monotonic() - since
        time.sleep(PAUSE)
