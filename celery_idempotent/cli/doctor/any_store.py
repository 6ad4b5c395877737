# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks for every store: schema, round trip and claims; expired rows and clocks for those that have them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from urllib.parse import unquote

from ...core.keys import compose_default
from ...core.reservations import WaitingMessage, is_confirmed
from ...errors import StoreRefused
from ...stores.records import RESERVED, Claim, Lease, Outcome, Reason, Release, State, new_owner
from .findings import Checks, Finding, Findings, Target, error, info, ok, warning

#: The checks of a store of which nothing else is known.
CHECKS = Checks()


@CHECKS.add("the schema is that of this version")
def schema_pending(target: Target) -> Findings:
    if pending := target.store.pending_schema():
        lines = pending.strip().splitlines()
        about = lines[0].rstrip(",;") if len(lines) <= 2 else f"{len(lines)} lines of statements are due"
        yield error(
            f"The store lacks what this version needs on its server ({about}): claims are refused.",
            "celery -A proj idempotency schema --apply (or celery-idempotent --store URL schema --apply)",
            ends=True,
        )


#: Number of pings, and the median in seconds above which a store is slow: a first run makes two round trips.
PINGS, SLOW = 20, 0.05
#: Seconds after which no further ping is sent.
PATIENCE = 2.0


@CHECKS.add()
def slow_store(target: Target) -> Findings:
    end = perf_counter() + PATIENCE
    took = [_ping(target)]
    while len(took) < PINGS and perf_counter() < end:
        took.append(_ping(target))
    median = statistics.median(took)
    measured = f"a round trip takes {median * 1000:.2f} ms (median of {len(took)}, longest {max(took) * 1000:.2f} ms)"
    if median > SLOW:
        yield warning(
            f"{measured.capitalize()}: every first run waits for two, and a replay for one.",
            "Put the store into the region and the network of the workers, and look at its load.",
        )
    yield ok(measured)


def _ping(target: Target) -> float:
    began = perf_counter()
    target.store.ping()
    return perf_counter() - began


#: The task in the throwaway keys, and the seconds after which they expire.
TASK, SECONDS = "celery_idempotent.doctor", 5.0
#: Keys that are made to find one on each node of a cluster.
KEYS = 64


@CHECKS.add()
def claims_refused(target: Target) -> Findings:
    keys = [compose_default(target.namespace, TASK, new_owner()) for _ in range(KEYS)]
    chosen = {target.store.shard(key): key for key in keys}.values()
    try:
        for key in chosen:
            _live(target, key)
    except StoreRefused as refusal:
        yield error(
            f"A throwaway key under {target.namespace}: was refused. {' '.join(str(refusal).split())}",
            "Give the user the rights that the guide on this kind of store lists; if the app has an "
            "idempotency_namespace, run celery -A proj idempotency doctor, which knows it.",
        )
    nodes = f" on each of {len(chosen)} nodes" if len(chosen) > 1 else ""
    yield ok(f"a throwaway key was claimed, renewed, settled and forgotten{nodes}")


def _live(target: Target, key: str) -> None:
    store = target.store
    try:
        for reason in (Reason.FAILED, Reason.CRASHED):
            lease = _claim(target, key)
            store.renew([lease])
            store.release(lease, Release(reason))
        store.settle(_claim(target, key), Outcome(State.COMPLETED, b""), ttl=SECONDS)
        store.mark_dispatched(key, TASK)
        store.get(key)
    finally:
        store.delete(key)


def _claim(target: Target, key: str) -> Lease:
    lease = target.store.acquire(Claim(key, new_owner(), SECONDS, SECONDS, holder=TASK))
    assert isinstance(lease, Lease), f"no other can have {key}"
    return lease


#: Number of expired rows that is a warning, and the most that are counted.
MANY, MOST = 10_000, 100_000
SCHEDULE = "celery_idempotent.celery.schedule_purge(app)  # beat then purges once an hour"


def expired(target: Target, rows: int) -> Finding:
    """Return the finding for a number of expired rows."""
    count = f"{rows:,}{' or more' if rows >= MOST else ''} expired rows wait to be removed"
    if rows >= MANY:
        if target.purged:
            return warning(
                f"{count}, though beat purges the store.", "See that beat and a worker run, and purge more often."
            )
        return warning(f"{count}.", f"celery -A proj idempotency purge, and from then on {SCHEDULE}")
    if target.purged is False:
        return info(f"{count}, and nothing but new claims removes them.", SCHEDULE)
    return ok(count)


#: Seconds that two clocks may differ.
DIFFERENCE = 2.0


def compared(server_time: Callable[[], float]) -> Finding:
    """Compare a server's clock, in seconds since 1970, with this machine's."""
    before = time.time()
    there = server_time()
    after = time.time()
    # What was written between the two times is nowhere outside of them, if the clocks agree.
    ahead = there - after if there > after else min(0.0, there - before)
    if abs(ahead) > DIFFERENCE:
        return info(
            f"The clock of the store is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's.",
            "Let NTP set both. Leases do not mind, since the store's clock decides; countdowns and the "
            "visibility_timeout go by the clocks of the workers.",
        )
    return ok("the clocks of the store and of this machine agree")


#: The checks of every store whose app is known.
OF_APPS = Checks()


@OF_APPS.add("every reservation is that of a message", when=lambda target: target.messages is not None)
def reservation_orphaned(target: Target) -> Findings:
    lost: list[str] = []
    for _ in range(2):  # what was put back into its queue during the first look is there in the second
        held = dict(_reservations(target, lost))
        ids = target.messages(set(filter(None, map(_queue, held)))) if target.messages is not None else None
        if ids is None:
            yield info("The broker has too many messages to look for those that hold reservations.")
            return
        lost = [key for key, task_id in held.items() if _queue(key) and task_id not in ids]
        if not lost:
            return
    # What began meanwhile has none any more.
    lost = [key for key, _ in _reservations(target, lost)]
    if lost:
        every = f"--prefix {target.namespace}:{RESERVED}: --force"
        yield warning(
            f"{len(lost)} reservation{'' if len(lost) == 1 else 's'} of unique tasks whose message is in no queue, as "
            f"after a purge: calls are skipped until they end, of {', '.join(lost[:3])}.",
            "celery -A proj idempotency forget KEY"
            + (f"; or, for all of them and those of messages that do wait, forget {every}" if len(lost) > 1 else ""),
        )


def _reservations(target: Target, keys: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys and the task ids of confirmed reservations: of these keys, or of all if there are none."""
    prefix = f"{target.namespace}:{RESERVED}:"
    for record in map(target.store.get, keys) if keys else target.store.scan(prefix=prefix):
        met = WaitingMessage.read(record.holder) if record is not None and is_confirmed(record) else None
        if record is not None and met is not None:
            yield record.key, met.task_id


def _queue(slot: str) -> str:
    """Return the queue that the name of a reservation has; "" if it has none."""
    try:
        parts = json.loads(unquote(slot.rpartition(":~")[2]))
    except ValueError:
        return ""
    return next((part.removeprefix("queue=") for part in parts if part.startswith("queue=")), "")
