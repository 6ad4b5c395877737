"""``celery -A proj idempotency ...``: look at what the app's store remembers, and forget it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from ..errors import IdempotencyError
from ..records import Record, State
from ..stores import Store
from .binding import store_of

__all__ = ["idempotency"]

UNKNOWN = 1


@click.group()
def idempotency() -> None:
    """Look at what is remembered of idempotent tasks."""


@idempotency.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print the record as one JSON object.")
@click.pass_context
def show(context: click.Context, key: str, as_json: bool) -> None:
    """Show the record of KEY; exit with 1 if there is none."""
    record = _found(context, key)
    facts = {name: value for name, value in _facts(record).items() if value not in ("", 0, [], None)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


@idempotency.command()
@click.argument("key")
@click.option("--yes", is_flag=True, help="Do not ask, also where a live lease holds the key.")
@click.pass_context
def forget(context: click.Context, key: str, yes: bool) -> None:
    """Forget KEY, so that its operation may run again; exit with 1 if there is nothing to forget."""
    record = _found(context, key)
    if record.state is State.IN_PROGRESS and record.remaining and not yes:
        click.confirm(f"{record.holder} holds {key} and may be running it. Forget it all the same?", abort=True)
    _store(context).delete(key)
    click.echo(f"{key} is forgotten")


def _store(context: click.Context) -> Store:
    return store_of(context.obj.app)


def _found(context: click.Context, key: str) -> Record:
    try:
        record = _store(context).get(key)
    except IdempotencyError as error:
        raise click.ClickException(str(error)) from error
    if record is None:
        click.echo(f"Nothing is remembered of {key}", err=True)
        context.exit(UNKNOWN)
    return record


def _facts(record: Record) -> dict[str, Any]:
    """Return a record as words and numbers; of the result, how large it is and how it begins."""
    facts = asdict(record)
    payload = facts.pop("payload")
    text = payload[:60].decode(errors="backslashreplace")
    return {
        **facts,
        "state": str(record.state),
        "announced": sorted(record.announced),
        "payload_bytes": len(payload),
        "payload": text + ("..." if len(payload) > len(text) else ""),
    }
