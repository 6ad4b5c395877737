"""How a delivery is answered without a run of its own: by what is settled, or by standing aside until something is."""

from __future__ import annotations

from . import complaints, hooks, telling
from .answers import Answer, Busy, Delivery, Dropped, Ignored, Replayed
from .errors import StoreError
from .pauses import uninterrupted
from .policy import Policy
from .recording import STORE_PAUSE
from .records import Record, Refusal, State, Verdict
from .results import Codec, Kind
from .stores.base import Store

__all__ = ["duplicate", "refused", "unreadable"]

#: A record that cannot be read is looked at again after this: by then it was mended, or this worker upgraded.
UNREADABLE_PAUSE = 60.0


def refused(delivery: Delivery, refusal: Refusal, policy: Policy, codec: Codec) -> Answer:
    """Answer a delivery whose claim was refused for good.

    Raises:
        KeyReused, CrashLoop, Conflict, ResultUnavailable: see `celery_idempotent.errors`.
        RecordUnreadable: the record cannot be read, and the policy is ``on_store_error="raise"``.
        BaseException: what the settled run raised.
    """
    record = refusal.record
    if refusal.verdict in (Verdict.COMPLETED, Verdict.FAILED):
        return _replay(delivery, record, policy, codec)
    telling.refused(delivery, refusal)
    if refusal.verdict is Verdict.KEY_REUSED:
        raise complaints.key_reused(record)
    if refusal.verdict is Verdict.CRASH_LOOP:
        raise complaints.crash_loop(record.key, record.crashes)
    return Dropped()


def duplicate(delivery: Delivery, store: Store, policy: Policy, codec: Codec) -> Answer:
    """Answer a run that lost its lease: with what is settled, or by standing aside until something is."""
    try:
        record = uninterrupted(lambda: store.get(delivery.claim.key))
    except Exception as error:  # noqa: BLE001 - the store cannot tell, and will be asked again
        hooks.logger.warning("What became of %s cannot be told yet: %s", delivery.claim.key, error)
        record = None
    if record is not None and record.state in (State.COMPLETED, State.FAILED):
        return _replay(delivery, record, policy, codec)
    if record is None:
        return Busy(STORE_PAUSE[1])
    return Busy(record.remaining, record.task_id, awaited=record.state is State.RELEASED)


def unreadable(policy: Policy, error: StoreError) -> Busy:
    """Stand aside from a record that cannot be read, and not run: it may well say that the operation is done."""
    if policy.on_store_error == "raise":
        raise error
    hooks.logger.error("%s", error)
    return Busy(UNREADABLE_PAUSE, error=error)


def _replay(delivery: Delivery, record: Record, policy: Policy, codec: Codec) -> Answer:
    completed = record.state is State.COMPLETED
    if completed and policy.on_duplicate == "raise" and record.task_id != delivery.claim.task_id:
        raise complaints.done_before(record)
    try:
        payload = codec.decode(record.payload, age=record.age)
    except StoreError as error:
        return unreadable(policy, error)
    telling.replays(delivery, record)
    if not completed:
        delivery.recalls(record)
        raise codec.rebuild_exception(payload, policy.remember_failures)
    if payload.kind is Kind.VALUE:
        return Replayed(payload.data, record)
    if payload.kind is Kind.IGNORED:
        return Ignored(payload.reason, record, payload.data if isinstance(payload.data, int) else None)
    if delivery.wants_result:
        raise complaints.not_kept(record, payload.reason)
    return Replayed(None, record)
