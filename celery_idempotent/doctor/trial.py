"""What a delivery does to a store, done to a key that nobody else has."""

from __future__ import annotations

from ..errors import StoreRefused
from ..keys import compose_default
from ..records import Claim, Lease, Outcome, Reason, Release, State, new_owner
from .finding import Finding, error, ok
from .patient import Patient

__all__ = ["claims_refused"]

#: The task that the throwaway keys are of, and the seconds after which they go by themselves.
TASK, SECONDS = "celery_idempotent.doctor", 5.0
#: Keys that are made to find one on each node of a cluster.
KEYS = 64


def claims_refused(patient: Patient) -> Finding:
    """Claim, renew, release, settle and forget a throwaway key, on each part of the store."""
    keys = [compose_default(patient.namespace, TASK, new_owner()) for _ in range(KEYS)]
    chosen = {patient.store.part(key): key for key in keys}.values()
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


def _live(patient: Patient, key: str) -> None:
    store = patient.store
    try:
        for reason in (Reason.FAILED, Reason.CRASHED):
            lease = _claim(patient, key)
            store.renew([lease])
            store.release(lease, Release(reason))
        store.settle(_claim(patient, key), Outcome(State.COMPLETED, b""), ttl=SECONDS)
        store.announce(key, TASK)
        store.get(key)
    finally:
        store.delete(key)


def _claim(patient: Patient, key: str) -> Lease:
    lease = patient.store.acquire(Claim(key, new_owner(), SECONDS, SECONDS, holder=TASK))
    assert isinstance(lease, Lease), f"nobody else can have {key}"
    return lease
