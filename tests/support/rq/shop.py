"""Jobs of a shop: each has an effect, which is written down, and then ends as it is told."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rq import Queue, Retry, get_current_job
from rq.timeouts import JobTimeoutException
from rq.worker import HerokuWorker

from celery_idempotent.events import Conflicted, add_hook
from celery_idempotent.rq import IdempotentWorker, current_lease, idempotent
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.faults.run_account import TOLD, write_down

#: Where horses are to be kept from their leases for good; others give theirs back.
LEASE = float(os.environ.get("LEASE_TTL", "60"))

#: Longest time for which a test holds a body up: longer than RQ takes to believe that its worker is gone.
HELD_SECONDS = 300.0

#: ctypes keeps the GIL during a call through PyDLL, where it gives it up through CDLL.
libc = ctypes.PyDLL(None)

if "IMPORTS" in os.environ:  # leave the name of the process that imported this module
    Path(os.environ["IMPORTS"], str(os.getpid())).touch()

if "TELL" in os.environ:  # in workers; tests listen to what happens in their own process
    add_hook(write_down, TOLD)
    add_hook(lambda event: Journal.from_env().write("conflicted", event.key), {Conflicted})


class HastyWorker(HerokuWorker):
    """Has no time to lose once it is to stop."""

    imminent_shutdown_delay = 0


class TellingWorker(IdempotentWorker):
    """Is here, so that what the worker itself tells is written down too."""


class Declined(Exception):
    """A failure that is final."""


def effect(order: object, **fields: object) -> int:
    """Write the effect down, and return how many there were of this order, between two gates.

    Its `intent` is the key that a payment gateway would get: of all charges with one key, one takes effect. A body
    without a lease has none to show.
    """
    journal, gates, lease = Journal.from_env(), Gates.from_env(), current_lease()
    job = get_current_job()
    gates.wait(f"before {order}", HELD_SECONDS)
    if lease is not None:
        lease.check()
    intent = lease.derived_key("gateway") if lease is not None else uuid.uuid4().hex
    journal.write("charged", order, job=job.id if job else "", intent=intent, **fields)
    effects = journal.count("charged", order)
    gates.wait(f"after {order}", HELD_SECONDS)
    return effects


def fence() -> int:
    lease = current_lease()
    return lease.fence if lease else 0


def spin() -> None:
    """Take for ever, with no call to be interrupted in."""
    while True:
        pass


#: Endings without return.
LAST: dict[str, Callable[[], object]] = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(3),
    "sleep": lambda: time.sleep(60),
    "spin": spin,
}


def end(order: str, ending: str, effects: int) -> Any:
    """Raise, or return, what an ending says; one "... at first" is that of the first run alone."""
    if ending.endswith(" at first"):
        ending = ending.removesuffix(" at first") if effects == 1 else "return"
    match ending.split():
        case ["raise"]:
            raise ValueError(f"no {order}")
        case ["decline"]:
            raise Declined(f"no {order}")
        case ["retry", most, *intervals]:
            return Retry(max=int(most), interval=[int(interval) for interval in intervals] or 0)
        case [last] if last in LAST:
            LAST[last]()
    return f"{order} charged {effects}"


@idempotent(key="order", lease_ttl=LEASE, remember_failures=(Declined,), fingerprint=("cents", "ending"))
def charge(order: str, cents: int = 999, ending: str = "return") -> Any:
    return end(order, ending, effect(order, fence=fence()))


def dropping(function: Callable[..., object]) -> Callable[..., None]:
    """As a decorator is written that only times or logs what it calls."""

    @functools.wraps(function)
    def dropped(*args: object) -> None:
        function(*args)

    return dropped


@dropping
@idempotent(key="order", lease_ttl=LEASE)
def timed_charge(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(lease_ttl=LEASE)
def report(day: str, ending: str = "return") -> Any:
    """Has no key but the job's own."""
    return end(day, ending, effect(day))


@idempotent(key="order", lease_ttl=LEASE, fingerprint=False)
async def charge_slowly(order: str, ending: str = "return") -> Any:
    effects = effect(order, fence=fence())
    await asyncio.sleep(60 if ending == "sleep" else 0)
    return end(order, ending, effects)


@idempotent(key="order", scope="tenant")
def charge_tenant(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key=lambda order, item: f"{order}-{item}")
def ship(order: str, item: int, note: str = "") -> str:
    return f"{order}-{item} shipped {effect(f'{order}-{item}')}"


@idempotent(key=("order", "item"), fingerprint=False)
def pack(order: str, item: int, note: str = "") -> str:
    return f"{order}-{item} packed {effect(f'{order}-{item}')}"


@idempotent(key="order", store_result=False)
def forget(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key="order", on_conflict="raise")
def charge_or_raise(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key="order", on_conflict="wait", wait_timeout=0.2)
def charge_or_wait(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key="order", store="memory://")
def charge_forgetfully(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key="order", lease_ttl=LEASE, max_crashes=1)
def charge_once(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key="order")
def answer(order: str, value: Any = None) -> Any:
    """Return what it was given."""
    effect(order)
    return value


@idempotent(key="order", serializer="json")
def answer_json(order: str, value: Any = None) -> Any:
    """Return what it was given, as JSON has it."""
    effect(order)
    return value


@idempotent(key="order")
def lease_left(order: str) -> float:
    """Return the seconds for which the lease is renewed."""
    lease = current_lease()
    assert lease is not None
    return lease.until - time.monotonic()


@idempotent(key="order")
def nested(order: str) -> Any:
    """Run a job of this very function where it is enqueued, within the body."""
    effect(order)
    job = get_current_job()
    assert job is not None
    if " " in order:
        return order
    inner = [Queue(is_async=False, connection=job.connection).enqueue(nested, f"{order} inner") for _ in range(2)]
    return [one.return_value() for one in inner]


@idempotent(key="order")
def within(order: str) -> list[Any]:
    """Call a guarded function, and itself, within the body: as plain functions both."""
    effect(order)
    return [charge_plainly(f"{order} inner"), within(f"{order} itself") if " " not in order else None]


async def _charge_later(order: str) -> str:
    await asyncio.sleep(0)
    return f"{order} charged {effect(order)}"


@idempotent(key="order")
def charge_later(order: str) -> Any:
    """Return a coroutine, which RQ runs, though it is no coroutine function."""
    return _charge_later(order)


@idempotent(key="order")
def charge_each(order: str) -> Any:
    """Return what has not done its work yet, though it is no generator function."""
    return (effect(f"{order}-{item}") for item in range(3))


@idempotent(key="order")
def charge_plainly(order: str) -> int:
    return effect(order)


@idempotent(key="order")
def annotate(order: str) -> Any:
    """Write to the job's meta, as bodies do that tell of their progress."""
    job = get_current_job()
    assert job is not None
    seen = dict(job.meta.get("idempotency", {}))
    job.meta["progress"] = effect(order)
    job.save_meta()  # type: ignore[no-untyped-call]
    return seen


@idempotent(key="order")
def keyed_elsewhere(order: str) -> str | None:
    """Return the key that this run holds."""
    effect(order)
    lease = current_lease()
    return lease.key if lease else None


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do something around a function, as decorators do."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        Journal.from_env().write("entered", function.__name__)
        return function(*args, **kwargs)

    return wrapper


class Till:
    """Has methods for jobs."""

    def __init__(self, name: str = "till") -> None:
        self.name = name

    @idempotent(key="order")
    def charge(self, order: str) -> str:
        return f"{self.name}: {order} charged {effect(order)}"

    @idempotent()
    def count(self, day: str) -> str:
        return f"{self.name}: {day} counted {effect(day)}"

    @classmethod
    @idempotent(key="order")
    def charge_any(cls, order: str) -> str:
        return f"{cls.__name__}: {order} charged {effect(order)}"

    @staticmethod
    @idempotent(key="order")
    def charge_none(order: str) -> str:
        return f"{order} charged {effect(order)}"

    @idempotent(key="order")
    async def charge_slowly(self, order: str) -> str:
        await asyncio.sleep(0)
        return f"{self.name}: {order} charged {effect(order)}"

    @timed
    @idempotent(key="order")
    def charge_timed(self, order: str) -> str:
        return f"{self.name}: {order} charged {effect(order)}"


@timed
@idempotent(key="order")
def charge_timed(order: str) -> Any:
    return end(order, "return", effect(order))


@idempotent(key=lambda args: args[0])  # the decorator hides the names of arguments
@timed
def charge_timed_within(order: str) -> Any:
    return end(order, "return", effect(order))


def plain(order: str) -> Any:
    """Is guarded by nobody, and calls what would be."""
    return charge(order)


def follow(name: str) -> Any:
    """Depends on another job, whose result it reads."""
    job = get_current_job()
    assert job is not None
    read = [dependency.return_value() for dependency in job.fetch_dependencies()]
    Journal.from_env().write("followed", name, read=read)
    return read


def succeeded(job: Any, connection: Any, result: Any) -> None:
    Journal.from_env().write("succeeded", job.id, result=result)
    Gates.from_env().wait("succeeded")


def failed(job: Any, connection: Any, kind: Any, error: Any, traceback: Any) -> None:
    Journal.from_env().write("failed", job.id, error=kind.__name__)


def stopped(job: Any, connection: Any) -> None:
    Journal.from_env().write("stopped", job.id)


def broken_at_first(job: Any, connection: Any, result: Any) -> None:
    """Fail as a success callback, which makes RQ run the job again, the first time."""
    journal = Journal.from_env()
    journal.write("called back", job.id)
    if journal.count("called back", job.id) == 1:
        raise ValueError("the callback is broken")


def broken(job: Any, connection: Any, result: Any) -> None:
    Journal.from_env().write("called back", job.id)
    raise ValueError("the callback is broken")


@idempotent(key="order")
def unwritable(order: str) -> Any:
    effect(order)
    return lambda: None


@idempotent(key="order")
def limits(order: str) -> float:
    """Return for how much longer its lease is renewed."""
    effect(order)
    lease = current_lease()
    return lease.until - time.monotonic() if lease else 0


@idempotent(key="order", store=os.environ.get("STORE_URL"), lease_ttl=LEASE)
def charge_by_url(order: str) -> Any:
    """Have the policy name the store's URL."""
    return end(order, "return", effect(order))


@idempotent(key="order", store=RedisStore.from_url(os.environ.get("STORE_URL", "redis://")), lease_ttl=LEASE)
def charge_by_object(order: str) -> Any:
    """Have the policy name the store itself."""
    return end(order, "return", effect(order))


@idempotent(key="order", remember_failures=(JobTimeoutException,))
def charge_in_time(order: str) -> Any:
    """Is not run again once it took too long."""
    return end(order, "return", effect(order))


@idempotent(key="order", lease_ttl=1.5)
def charge_briefly(order: str) -> Any:
    """Have a lease that no worker renews in time which looks at its horse once a second."""
    return end(order, "return", effect(order))


@idempotent(key="order", lease_ttl=LEASE, fingerprint=["seconds"])
def hold_gil(order: str, seconds: int) -> int:
    """Call into C code which holds the GIL: no thread of this process runs meanwhile."""
    Journal.from_env().write("started", order)
    libc.sleep(seconds)
    effect(order)
    return fence()


@idempotent(key="order", lease_ttl=2.0, max_lease=2.0)
def hold_gil_beyond(order: str, seconds: int) -> None:
    """Do so for longer than the policy lets anybody renew."""
    Journal.from_env().write("started", order)
    libc.sleep(seconds)


def charge_parts(order: str) -> list[Any]:
    """Run two orders within this job, which nothing guards itself, once a test lets it."""
    Gates.from_env().wait("parts")
    job = get_current_job()
    assert job is not None
    queue = Queue("within", is_async=False, connection=job.connection)
    return [queue.enqueue(charge, f"{order}-{number}").return_value() for number in (1, 2)]


@idempotent(key="order", lease_ttl=LEASE)
def charge_parts_guarded(order: str) -> list[Any]:
    """Do the same within a job that is guarded."""
    return charge_parts(order)


def horse_end_of_a_child(order: str) -> list[str]:
    """Return what a program that a job starts knows of the worker's offer, which is not for it."""
    code = "from celery_idempotent.rq.horse import HorseEnd; print(HorseEnd.take())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.splitlines()
