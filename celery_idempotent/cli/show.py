"""``show``: the record of a key."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..core.reservations import WaitingMessage
from ..stores.records import is_reservation
from ..units import format_duration
from .common import Exit, KeyCommand, Stores, say, stores_of
from .search import selected_keys
from .tables import show_facts

if TYPE_CHECKING:
    from ..stores.records import Record


#: What a reservation has to say of its message, beside what is for publishers and workers.
SHOWN = ("task_id", "eta", "expires", "holder")


@click.command("show", cls=KeyCommand)
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each record.")
@click.pass_context
def command(ctx: click.Context, key: str | None, as_json: bool) -> None:
    """Show the record of KEY; exit with 1 if there is none.

    With an app, KEY may also be the key that a task makes of its arguments: ORD-1.
    """
    stores = stores_of(ctx)
    for each in selected_keys(ctx, stores, [key] if key else [], guess=True):
        _show(stores, each, as_json=as_json)
    ctx.exit(stores.status)


def _show(stores: Stores, key: str, *, as_json: bool) -> None:
    shown = 0
    for used, record in stores.each(lambda used: used.store.get(key)):
        if record is None:
            continue
        shown += 1
        facts = facts_of_record(record)
        if not stores.one:
            facts = {"store": used.name, **facts}
        if as_json:
            click.echo(json.dumps(facts))
        else:
            show_facts({name: in_words(value) for name, value in facts.items()})
    if not shown and not stores.status:
        unknown(stores, key)


def unknown(stores: Stores, key: str) -> None:
    """Report that no store knows the key, and which one it does know."""
    say(describe_unknown(stores, key), err=True)
    stores.status = stores.status or Exit.NO


def describe_unknown(stores: Stores, key: str) -> str:
    """Return that no store knows the key, and which one it does know."""
    where = ", ".join(used.name for used in stores.used)
    meant = [found for _, found in stores.each(lambda used: used.meant_key(key)) if found]
    meant += [found for found in stores.guesses(key) if stores.knows(found)]
    hint = f"; did you mean {meant[0]}?" if meant else ""
    if not hint and ":" not in key:
        hint = f". Keys begin with a namespace and a task; to look for {key} in them: list --arg {key}"
    elif not hint and key.endswith("*"):
        hint = f". For all keys that begin so: --prefix {key.rstrip('*')}"
    return f"Nothing is remembered of {key} in {where}{hint}"


def facts_of_record(record: Record) -> dict[str, Any]:
    """Return a record as words and numbers, without what is empty; of the result, its size and its beginning."""
    facts = asdict(record)
    payload = facts.pop("payload")
    text = payload[:60].decode(errors="backslashreplace")
    facts |= {
        "state": str(record.state),
        "announced": sorted(facts.pop("dispatched")),
        "payload_bytes": len(payload),
        "payload": text + ("..." if len(payload) > len(text) else ""),
    }
    if is_reservation(record.key) and (message := WaitingMessage.read(record.holder)):
        facts |= {name: value for name, value in message._asdict().items() if name in SHOWN}
    return {name: value for name, value in facts.items() if value not in ("", 0, [], None)}


def in_words(value: object) -> str:
    """Return a fact of a record in words; what is no whole number is a duration."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return format_duration(value) if isinstance(value, float) else str(value)
