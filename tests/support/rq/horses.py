"""Jobs for the tests of workers: a shop that charges its orders at a gateway.

The gateway honours idempotency keys as real ones do: of all charges with one key, one takes effect. A job without the
decorator has none to show. `taken` counts the effects.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from pathlib import Path
from typing import Any

from rq import Queue, get_current_job

from celery_idempotent.rq import current_lease, idempotent
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

LEASE_TTL = float(os.environ.get("LEASE_TTL", "60"))

#: Longest time for which a test holds a body up: longer than RQ takes to believe that its worker is gone.
HELD_SECONDS = 300.0

#: ctypes keeps the GIL during a call through PyDLL, where it gives it up through CDLL.
libc = ctypes.PyDLL(None)


def plain(order_id: str) -> str:
    """Charge an order, as a job of RQ's alone."""
    return _charge(order_id)


@idempotent(key="order_id", lease_ttl=LEASE_TTL)
def charge(order_id: str) -> str:
    """Charge an order once."""
    return _charge(order_id)


def _charge(order_id: str) -> str:
    journal, gates, lease = Journal.from_env(), Gates.from_env(), current_lease()
    journal.write("ran", order_id)
    gates.wait("ran", HELD_SECONDS)
    if lease is not None:
        lease.check()
    journal.write("charged", order_id, intent=lease.derived_key("gateway") if lease else uuid.uuid4().hex)
    gates.wait("charged", HELD_SECONDS)
    return f"{order_id} is charged"


def taken(journal: Journal, order_id: str) -> int:
    """Return how often the card of an order was charged."""
    return len({entry.fields["intent"] for entry in journal.entries("charged", order_id)})


def told(job: Any, connection: Any, result: Any) -> None:
    """Tell the customer: a success callback, which a test may hold up, or have fail the first time."""
    journal = Journal.from_env()
    journal.write("told", job.args[0])
    Gates.from_env().wait("told")
    if os.environ.get("TELLING_FAILS") and journal.count("told", job.args[0]) == 1:
        raise ConnectionError("the mail server is away")


@idempotent(key="order_id", lease_ttl=LEASE_TTL, fingerprint=["seconds"])
def hold_gil(order_id: str, seconds: int) -> int:
    """Call into C code which holds the GIL: no thread of this process runs meanwhile."""
    journal, lease = Journal.from_env(), current_lease()
    assert lease is not None
    journal.write("started", order_id)
    libc.sleep(seconds)
    lease.check()
    journal.write("charged", order_id)
    return lease.fence


@idempotent(key="order_id", lease_ttl=2.0, max_lease=2.0)
def hold_gil_beyond(order_id: str, seconds: int) -> None:
    """Do so for longer than the policy lets anybody renew."""
    Journal.from_env().write("started", order_id)
    libc.sleep(seconds)


@idempotent(key="order_id", lease_ttl=LEASE_TTL, max_crashes=2)
def die(order_id: str) -> None:
    """End as a process that was killed."""
    Journal.from_env().write("ran", order_id)
    os.kill(os.getpid(), 9)


@idempotent(key="order_id", lease_ttl=1.5)
def brief(order_id: str) -> None:
    """Have a lease that no worker renews in time which looks at its horse once a second."""
    Journal.from_env().write("ran", order_id)


@idempotent(key="order_id", store=os.environ.get("STORE_URL"), lease_ttl=LEASE_TTL)
def by_url(order_id: str) -> str:
    """Have the policy name the store's URL."""
    return _charge(order_id)


@idempotent(key="order_id", store=RedisStore.from_url(os.environ.get("STORE_URL", "redis://")), lease_ttl=LEASE_TTL)
def by_object(order_id: str) -> str:
    """Have the policy name the store itself."""
    return _charge(order_id)


def outer(order_id: str) -> list[Any]:
    """Run two orders within this job, which is none itself that anything guards."""
    job = get_current_job()
    assert job is not None
    queue = Queue("within", is_async=False, connection=job.connection)
    return [queue.enqueue(charge, f"{order_id}-{number}").return_value() for number in (1, 2)]


def orphaned(order_id: str) -> list[Any]:
    """Do the same once a test lets it."""
    Gates.from_env().wait("asked")
    return outer(order_id)


@idempotent(key="order_id", lease_ttl=LEASE_TTL)
def outer_guarded(order_id: str) -> list[Any]:
    """Do the same within a job that is."""
    return outer(order_id)


def environment(order_id: str) -> list[str]:
    """Return what a program would know of the worker's offer that a job starts, and does not take."""
    import subprocess
    import sys

    code = "from celery_idempotent.rq.horse import HorseEnd; print(HorseEnd.take())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()


def leave_mark(path: str) -> None:
    """Leave the name of the process that imported this module; called where it is imported."""
    Path(path).touch()


if "IMPORTS" in os.environ:
    leave_mark(f"{os.environ['IMPORTS']}/{os.getpid()}")
