"""``forget``: let operations run again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import RecordUnreadable
from ..stores.records import Record, State, is_reservation
from .common import (
    KEEP,
    Changes,
    Exit,
    KeyCommand,
    ProgressCounter,
    Stores,
    confirmed,
    named_arguments,
    names_call,
    say,
    stores_of,
    trace_of,
)
from .explain import describe_record, end_of_reservation
from .search import selected_keys
from .show import unknown
from .tables import task_of

if TYPE_CHECKING:
    from ..stores.maintenance import MatchCounts, NamedStore


@click.command("forget", cls=KeyCommand)
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--prefix", help="Forget every record whose key begins so, namespace included.")
@click.option("--state", type=click.Choice([state.value for state in State]), help="With --prefix: only in this state.")
@click.option("--dry-run", is_flag=True, help="Print what would be forgotten, and forget nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. A KEY that is named is forgotten also if a live lease holds it.")
@click.option("--force", is_flag=True, help="With --prefix: forget also what a live lease holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, keys: tuple[str, ...], prefix: str | None, **options: Any) -> None:
    """Forget KEYs, or all with a prefix.

    Their operations may run again, since no record is left that they were done.

    What a live lease holds is being done right now: forgotten, it may be done twice. Exits with 1 if there was nothing
    to forget, or something was left alone.
    """
    wish = Options(**options)
    if bool(keys or names_call(ctx)) == (prefix is not None):
        raise click.UsageError("Expected KEYs, --arg [NAME=]VALUE or --prefix PREFIX; one of them.", ctx)
    if prefix is None and wish.state:
        raise click.UsageError("Expected --state together with --prefix, and no KEY.", ctx)
    if prefix == "":
        raise click.UsageError("Expected a prefix that is not empty; all of an app's keys begin with idem:", ctx)
    stores, changes = stores_of(ctx), Changes()
    if prefix is None:
        for key in selected_keys(ctx, stores, keys, one=True):
            # The key that an argument finds was not typed.
            if not named_arguments(ctx)[1] or wish.dry_run or wish.confirmed(f"Forget {key}?"):
                _forget_key(stores, key, wish, changes)
            else:
                changes.left += 1
    else:
        _forget_prefix(stores, prefix, wish, changes)
    changes.end(ctx, stores, "forgotten", as_json=wish.as_json)


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    state: str | None
    dry_run: bool
    yes: bool
    force: bool
    as_json: bool

    @property
    def only(self) -> State | None:
        """The state that records must be in."""
        return State(self.state) if self.state else None

    def print(self, text: str) -> None:
        """Print for people."""
        if not self.as_json:
            say(text)

    def confirmed(self, question: str) -> bool:
        """Ask for confirmation, unless it is given."""
        return confirmed(question, yes=self.yes, verb="forgets")


def _forget_key(stores: Stores, key: str, wish: Options, changes: Changes) -> None:
    from ..stores.maintenance import erase_leftovers

    answers = list(stores.each(lambda used: _read(used, key)))
    if not any(record for _, record in answers):
        if not stores.status:
            unknown(stores, key)
        changes.missing.append(key)
    for used, record in answers:
        with stores.serving():
            if isinstance(record, RecordUnreadable):
                _forget_unreadable(stores, used, key, record, wish, changes)
            elif record is not None:
                _forget_record(used, record, wish, changes)
            elif not wish.dry_run:
                # A cache may remember what the store behind it does not any more.
                erase_leftovers(used.store, key, used.keep_ttls.get(task_of(key), KEEP))


def _read(used: NamedStore, key: str) -> Record | RecordUnreadable | None:
    try:
        return used.store.get(key)
    except RecordUnreadable as error:  # which can be deleted all the same
        return error


def _forget_unreadable(
    stores: Stores, used: NamedStore, key: str, error: RecordUnreadable, wish: Options, changes: Changes
) -> None:
    from ..stores.maintenance import erase

    question = f"{' '.join(str(error).split())} A worker of that version may be running it. Forget it all the same?"
    if wish.dry_run:
        changes.done += 1
        wish.print(f"{key} would be forgotten (it cannot be read)")
    elif wish.confirmed(question):
        unread = Record(key, State.RELEASED)
        erase(used.store, key, trace_of("ForgottenByOperator", used, unread, state="unreadable"))
        changes.done += 1
        wish.print(f"{key} is forgotten")
    else:
        changes.left += 1
        stores.status = stores.status or Exit.UNREADABLE


def _forget_record(used: NamedStore, record: Record, wish: Options, changes: Changes) -> None:
    from ..stores.maintenance import is_held

    key = record.key
    held = is_held(record) and not (wish.force or wish.dry_run)
    if held and not wish.confirmed(question_of_held(record)):
        changes.left += 1
    elif wish.dry_run:
        changes.done += 1
        wish.print(f"{key} would be forgotten" + (" (a live lease holds it)" if is_held(record) else ""))
    else:
        forget_record(used, record)
        changes.done += 1
        wish.print(f"{key} is forgotten")


def question_of_held(record: Record) -> str:
    """Return what an operator must confirm before what a live lease holds is forgotten."""
    if is_reservation(record.key):
        return f"{record.key} is {describe_record(record)}. {end_of_reservation(record)} Forget it all the same?"
    return f"{record.holder or 'An unknown worker'} holds {record.key} and may be running it. Forget it all the same?"


def forget_record(used: NamedStore, record: Record, command: str | None = None) -> None:
    """Delete a record, and note the operator in the history of its key."""
    from ..stores.maintenance import erase

    erase(used.store, record.key, trace_of("ForgottenByOperator", used, record, command))


def _forget_prefix(stores: Stores, prefix: str, wish: Options, changes: Changes) -> None:
    from ..stores.maintenance import count

    counted = list(stores.each(lambda used: count(used.store, prefix, wish.only)))
    for used, matches in counted:
        if matches.unreadable and not wish.state:
            changes.left += matches.unreadable
            what = f"{matches.unreadable:,} whose key begins with {prefix} cannot be read, and are left alone"
            say(f"{used.name}: {what}. Each can be forgotten by its KEY.", err=True)
    if not any(matches.total for _, matches in counted):
        if counted and not changes.left:  # else none of the stores could serve
            _nothing(stores, prefix, wish, changes)
        return
    for used, matches in counted:
        wish.print(f"{used.name}: {_in_words(matches)}")
    held = 0 if wish.force else sum(matches.held for _, matches in counted)
    total = sum(matches.total for _, matches in counted) - held
    if wish.dry_run:
        changes.done, changes.left = total, changes.left + held
        wish.print(f"{total:,} would be forgotten{_left(held)}")
        return
    records = "record whose key begins" if total == 1 else "records whose keys begin"
    if total and not wish.confirmed(f"Forget {total:,} {records} with {prefix}{_left(held)}?"):
        changes.left += total + held
        return
    chosen = Stores([used for used, matches in counted if matches.total])
    for used, (forgotten, left) in chosen.each(lambda used: _sweep(used, prefix, wish)):
        changes.done, changes.left = changes.done + forgotten, changes.left + left
        wish.print(f"{used.name}: {forgotten:,} forgotten{_left(left)}")
    stores.status = stores.status or chosen.status


def _nothing(stores: Stores, prefix: str, wish: Options, changes: Changes) -> None:
    """Report that no key begins so, and which do."""
    state = f" and is {wish.state}" if wish.state else ""
    meant = [found for _, found in stores.each(lambda used: used.meant_prefix(prefix)) if found]
    hint = f"; did you mean --prefix {meant[0]}?" if meant else ""
    say(f"Nothing is remembered whose key begins with {prefix}{state}{hint}", err=True)
    changes.missing.append(prefix)


def _sweep(used: NamedStore, prefix: str, wish: Options) -> tuple[int, int]:
    from ..stores.maintenance import forget

    left = 0
    with ProgressCounter("records forgotten") as tally:
        trace = partial(trace_of, "ForgottenByOperator", used)
        for forgotten in forget(used.store, prefix, wish.only, held_too=wish.force, trace=trace):
            tally.add(forgotten)
            left += not forgotten
        return tally.count, left


def _in_words(matches: MatchCounts) -> str:
    states = ", ".join(f"{number:,} {state}" for state, number in sorted(matches.by_state.items()))
    return states + (f" ({matches.held:,} held by a live lease)" if matches.held else "") if states else "nothing"


def _left(held: int) -> str:
    return f", and {held:,} left alone that a live lease holds" if held else ""
