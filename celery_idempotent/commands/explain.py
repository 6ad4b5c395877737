"""``explain``: what happened to a key, in order, and what that means."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click

from .serving import KeyCommand, Stores, keys_of, stores_of
from .show import facts_of_record, unknown
from .story import meaning, sentence, span, standing

if TYPE_CHECKING:
    from ..notes import Noted
    from ..records import Record
    from ..stores.used import UsedStore

__all__ = ["command"]

#: Columns of a line where nobody says how many there are.
COLUMNS = 80


@click.command("explain", cls=KeyCommand)
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with ids and figures as they are.")
@click.pass_context
def command(ctx: click.Context, key: str | None, as_json: bool) -> None:
    """Tell what happened to KEY, and what that means.

    In order: who took it over, what was deferred, replayed, retried or lost. A first run that simply completed is told
    by its record alone. Exits with 1 if nothing is known of the key.
    """
    stores = stores_of(ctx)
    for each in keys_of(ctx, stores, [key] if key else [], guess=True):
        _explain(stores, each, as_json=as_json)
    ctx.exit(stores.status)


def _explain(stores: Stores, key: str, *, as_json: bool) -> None:
    known = 0
    for used, (record, history) in stores.each(lambda used: _found(used, key)):
        if record is None and not history:
            continue
        known += 1
        name = "" if stores.one else used.name
        click.echo(_as_json(key, name, record, history) if as_json else _as_text(key, name, record, history))
    if not known and not stores.status:
        unknown(stores, key)


def _found(used: UsedStore, key: str) -> tuple[Record | None, Sequence[Noted]]:
    return used.store.get(key), used.store.history(key)


def _as_json(key: str, store: str, record: Record | None, history: Sequence[Noted]) -> str:
    from ..notes import facts_of

    now = datetime.now(timezone.utc)
    said: dict[str, Any] = {"key": key, **({"store": store} if store else {})}
    said["history"] = [
        {
            "at": (now - timedelta(seconds=noted.age)).isoformat(timespec="milliseconds"),
            "ago": round(noted.age, 3),
            **facts_of(noted.text),
        }
        for noted in history
    ]
    said["now"] = None if record is None else facts_of_record(record)
    return json.dumps({**said, "meaning": meaning(record)})


def _as_text(key: str, store: str, record: Record | None, history: Sequence[Noted]) -> str:
    width = min(max(shutil.get_terminal_size((COLUMNS, 0)).columns, 40), 120)
    lines = [f"{key} in {store}" if store else key, *_told(history, width)]
    for title, text in (("Now", standing(record)), ("What this means", meaning(record))):
        lines += textwrap.wrap(f"{title}: {text}", width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _told(history: Sequence[Noted], width: int) -> list[str]:
    from ..notes import facts_of

    now = datetime.now()
    times = [_time(now, noted.age) for noted in history]
    ages = [f"({span(noted.age)} ago)" for noted in history]
    widest, oldest = max(map(len, times), default=0), max(map(len, ages), default=0)
    lines: list[str] = []
    for when, age, noted in zip(times, ages, history, strict=True):
        begin = f"  {when:>{widest}}  {age:<{oldest}}  "
        text = sentence(facts_of(noted.text))
        indent = " " * len(begin)
        lines += textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False) or [
            begin.rstrip()
        ]
    return lines


def _time(now: datetime, age: float) -> str:
    then = now - timedelta(seconds=age)
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")
