"""``release``: give a lease back for a holder that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..stores.records import Claim, Lease, Reason, Record, Release, State, is_reservation
from ..units import clean, shorten_duration
from .common import Changes, KeyCommand, Stores, confirmed, say, stores_of, trace_of, waiting
from .explain import describe_record, end_of_reservation
from .search import selected_keys
from .show import unknown
from .tables import task_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


QUESTION = "If the holder is alive, this may be done twice. Release it all the same?"
#: Seconds to keep what is released, where the store does not know how long its holder wanted that: as `failure_ttl`.
KEEP = 86400.0


@click.command("release", cls=KeyCommand)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, keys: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Give the lease on KEYs back, so that the next delivery may run now.

    For a holder that is stuck. One that lives becomes a duplicate: what it writes late is refused, and what it has
    done is done twice if a delivery comes. Exits with 1 if a KEY is not held, or was left alone.
    """
    stores, changes = stores_of(ctx), Changes()
    for key in selected_keys(ctx, stores, keys, one=True):
        _release_key(stores, key, changes, yes=yes, as_json=as_json)
    changes.end(ctx, stores, "released", as_json=as_json)


def _release_key(stores: Stores, key: str, changes: Changes, *, yes: bool, as_json: bool) -> None:
    answers = [(used, record) for used, record in stores.each(lambda used: used.store.get(key)) if record]
    if not answers:
        if not stores.status:
            unknown(stores, key)
        changes.missing.append(key)
    for used, record in answers:
        with stores.serving():
            _release_record(used, record, changes, yes=yes, as_json=as_json)


def _release_record(used: NamedStore, record: Record, changes: Changes, *, yes: bool, as_json: bool) -> None:
    why = why_not_held(record)
    if not why and not yes:
        facts = holder_facts(used, record)
        click.echo("\n".join(f"{name:<9}  {clean(value)}" for name, value in facts.items()), err=True)
        if not confirmed(question_of(record), yes=False, verb="releases"):
            changes.left += 1
            return
    why = why or release_for_holder(used, record)
    if why:
        changes.left += 1
        say(why, err=True)
        return
    changes.done += 1
    if not as_json:
        say(f"{record.key} is released from {_who(record)}")


def why_not_held(record: Record) -> str:
    """Return in a sentence why there is no lease to give back, and what can be done; "" if there is one."""
    key = record.key
    if is_reservation(key):
        if record.state is not State.IN_PROGRESS:
            return f"No message holds {key}: it is released already, and the next call is published."
        over = f"The reservation {key} has run out: there is nothing to release, the next call is published."
        return "" if record.remaining else over
    if record.state is State.IN_PROGRESS:
        over = f"The lease on {key} has run out: there is nothing to release, the next delivery takes it over."
        return "" if record.remaining else over
    if record.state is not State.RELEASED:
        return f"No worker holds {key}: it is {record.state}. To let it run again: forget {key}"
    if record.remaining:
        due = f"its retry is due in {shorten_duration(record.remaining)}, and other messages wait for it"
        return f"No worker holds {key}: {due}. To let them run before that: forget {key}"
    if record.reason == Reason.CRASH_LOOP:
        loop = f"it is refused as a crash loop after {record.crashes} crashes"
        return f"No worker holds {key}: {loop}. To let the same message run again: forget {key}"
    return f"No worker holds {key}: it is released already, and the next delivery may run now."


def holder_facts(used: NamedStore, record: Record) -> dict[str, str]:
    """Return what is known of a holder, by name."""
    if is_reservation(record.key):
        return {"key": record.key, "now": describe_record(record)}
    ttl = used.lease_ttls.get(task_of(record.key), 0.0)
    beat = f"{shorten_duration(ttl - record.remaining)} ago, if its lease_ttl is {ttl:g} s"
    facts = {
        "key": record.key,
        "holder": _who(record) + (f", for {shorten_duration(record.held_for)}" if record.held_for else ""),
        "task id": record.task_id,
        "lease": f"{shorten_duration(record.remaining)} left",
        "last beat": beat if ttl > record.remaining else "unknown to the store",
    }
    return {name: value for name, value in facts.items() if value}


def question_of(record: Record) -> str:
    """Return what an operator must confirm before a lease is released."""
    return f"{end_of_reservation(record)} Release it all the same?" if is_reservation(record.key) else QUESTION


def _who(record: Record) -> str:
    return waiting(record).holder or "an unknown worker"


def release_for_holder(used: NamedStore, record: Record, command: str | None = None) -> str:
    """Release as if the holder's worker had been shut down, and note the operator: crashes and attempts stay.

    Arguments:
        used: The store.
        record: The record, as it was shown to the operator.
        command: As in `trace_of`.

    Returns:
        Why it was not released, or "".
    """
    keep = max(0.0, record.retention - record.remaining) or KEEP
    claim = Claim(record.key, record.owner, record.remaining, keep, task_id=record.task_id)
    if not used.store.release(Lease(claim, record.fence), Release(Reason.SHUTDOWN)):
        return f"{record.key} was left alone: it was settled meanwhile, or another holder has it."
    after = used.store.get(record.key)
    if after is not None and after.state is State.IN_PROGRESS and after.owner == record.owner:
        return f"{record.key} was left alone: an open transaction settles it, and decides when it ends."
    trace_of("ReleasedByOperator", used, record, command).leave(used.store)
    return ""
