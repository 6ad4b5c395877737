"""Checks for every store: round trip, claims, schema, expired rows and clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from time import perf_counter

from ...core.keys import compose_default
from ...errors import StoreRefused
from ...stores.records import Claim, Lease, Outcome, Reason, Release, State, new_owner
from .findings import Finding, Target, error, info, ok, warning

#: How many calls are timed, and the seconds above which the median is too long: a first run makes two.
PINGS, SLOW = 20, 0.05
#: Seconds after which a store that is very slow is called no more.
PATIENCE = 2.0


def slow_store(patient: Target) -> Finding:
    """Compare the median time of an answer with what a task can bear."""
    end = perf_counter() + PATIENCE
    took = [_ping(patient)]
    while len(took) < PINGS and perf_counter() < end:
        took.append(_ping(patient))
    median = statistics.median(took)
    measured = f"a round trip takes {median * 1000:.2f} ms (median of {len(took)}, longest {max(took) * 1000:.2f} ms)"
    if median > SLOW:
        return warning(
            f"{measured.capitalize()}: every first run waits for two, and a replay for one.",
            "Put the store into the region and the network of the workers, and look at its load.",
        )
    return ok(measured)


def _ping(patient: Target) -> float:
    began = perf_counter()
    patient.store.ping()
    return perf_counter() - began


#: The task that the throwaway keys are of, and the seconds after which they go by themselves.
TASK, SECONDS = "celery_idempotent.doctor", 5.0
#: Keys that are made to find one on each node of a cluster.
KEYS = 64


def claims_refused(patient: Target) -> Finding:
    """Claim, renew, release, settle and forget a throwaway key, on each part of the store."""
    keys = [compose_default(patient.namespace, TASK, new_owner()) for _ in range(KEYS)]
    chosen = {patient.store.shard(key): key for key in keys}.values()
    try:
        for key in chosen:
            _live(patient, key)
    except StoreRefused as refusal:
        return error(
            f"A throwaway key under {patient.namespace}: was refused. {' '.join(str(refusal).split())}",
            "Give the user the rights that the guide on this kind of store lists; if the app has an "
            "idempotency_namespace, run celery -A proj idempotency doctor, which knows it.",
        )
    nodes = f" on each of {len(chosen)} nodes" if len(chosen) > 1 else ""
    return ok(f"a throwaway key was claimed, renewed, settled and forgotten{nodes}")


def _live(patient: Target, key: str) -> None:
    store = patient.store
    try:
        for reason in (Reason.FAILED, Reason.CRASHED):
            lease = _claim(patient, key)
            store.renew([lease])
            store.release(lease, Release(reason))
        store.settle(_claim(patient, key), Outcome(State.COMPLETED, b""), ttl=SECONDS)
        store.mark_dispatched(key, TASK)
        store.get(key)
    finally:
        store.delete(key)


def _claim(patient: Target, key: str) -> Lease:
    lease = patient.store.acquire(Claim(key, new_owner(), SECONDS, SECONDS, holder=TASK))
    assert isinstance(lease, Lease), f"no other can have {key}"
    return lease


#: Expired rows from which on there is a finding, and the most that are counted.
MANY, MOST = 10_000, 100_000
SCHEDULE = "celery_idempotent.celery.schedule_purge(app)  # beat then purges once an hour"


def schema_pending(patient: Target) -> Finding:
    """See whether the store has on its server what it needs."""
    pending = patient.store.pending_schema()
    if pending:
        what = pending.strip().splitlines()
        about = f"{what[0].rstrip(',;')}" if len(what) <= 2 else f"{len(what)} lines of statements are due"
        return error(
            f"The store lacks what this version needs on its server ({about}): claims are refused.",
            "celery -A proj idempotency schema --apply (or celery-idempotent --store URL schema --apply)",
            ends=True,
        )
    return ok("the schema is that of this version")


def expired(patient: Target, rows: int) -> Finding:
    """Return what becomes of rows that have expired, given how many there are."""
    count = f"{rows:,}{' or more' if rows >= MOST else ''} expired rows wait to be removed"
    if rows >= MANY:
        if patient.purged:
            return warning(
                f"{count}, though beat purges the store.", "See that beat and a worker run, and purge more often."
            )
        return warning(f"{count}.", f"celery -A proj idempotency purge, and from then on {SCHEDULE}")
    if patient.purged is False:
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
