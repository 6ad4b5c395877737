"""Which records a command is about: options, and the records that they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ConfigurationError
from ..stores.base import Unreadable
from ..stores.records import Record, State, is_part, is_reservation
from ..units import parse_duration
from .common import (
    Argument,
    ArgumentType,
    Exit,
    Number,
    ProgressCounter,
    Stores,
    check_one,
    keys_of,
    keys_of_arguments,
    named_arguments,
    say,
    suggestion,
    waiting,
)
from .tables import age_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


F = TypeVar("F", bound=Callable[..., Any])


def states(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[State, ...]:
    """Return the states of these names.

    Raises:
        BadParameter: one is none; the error suggests one.
    """
    known = [state.value for state in State]
    for name in given:
        if name not in known:
            hint = suggestion(name.lower().replace("-", "_"), known)
            raise click.BadParameter(f"expected one of {', '.join(known)}, got {name!r}.{hint}")
    return tuple(State(name) for name in given)


def duration(context: click.Context | None, option: click.Parameter | None, given: str | None) -> float | None:
    """Return a duration in seconds.

    Raises:
        BadParameter: it is none.
    """
    if given is None:
        return None
    try:
        return parse_duration(float(given) if given.isdecimal() else given, "")
    except ConfigurationError:
        raise click.BadParameter(f"expected a duration such as 90s, 15m, 24h or 7d, got {given!r}.") from None


_OPTIONS = (
    click.option(
        "--state",
        "states",
        metavar="STATE",
        multiple=True,
        callback=states,
        help="Only in this state; may be repeated.",
    ),
    click.option("--task", metavar="NAME", help="Only of the task of this name."),
    click.option(
        "--arg",
        "arguments",
        metavar="[NAME=]VALUE",
        multiple=True,
        type=ArgumentType(),
        help="Only what has this argument in its key; may be repeated.",
    ),
    click.option("--prefix", default="", help="Only keys that begin so, namespace included."),
    click.option(
        "--older",
        metavar="DURATION",
        callback=duration,
        help="Only what is held, or settled, for longer: 90s, 15m, 7d.",
    ),
    click.option("--younger", metavar="DURATION", callback=duration, help="Only what is held, or settled, for less."),
    click.option("--held", is_flag=True, help="Only what a live lease holds."),
    click.option("--unique", is_flag=True, help="Not operations, but what messages of unique tasks hold."),
    click.option("--limit", type=Number(), default=100, show_default=True, help="Show so many of a store."),
)


def filters(function: F) -> F:
    """Give a command the options that make a `Filter`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True)
class Filter:
    """The options of a search.

    Raises:
        UsageError: there are no such records.
    """

    states: tuple[State, ...]
    task: str | None
    prefix: str
    older: float | None
    younger: float | None
    held: bool
    limit: int
    unique: bool = False
    arguments: tuple[Argument, ...] = ()
    #: The keys to look up, where they are known; else all are looked through.
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.task and self.prefix:
            raise click.UsageError("Expected --task or --prefix, got both: the prefix may name the task, too.")
        if self.older is not None and self.younger is not None and self.older >= self.younger:
            raise click.UsageError(
                "Expected --older to be less than --younger: no age is above the one and below the other."
            )

    @property
    def wanted(self) -> set[State]:
        """The states that records may be in."""
        states = set(self.states or State)
        return states & {State.IN_PROGRESS} if self.held else states

    def scan(self, used: NamedStore) -> Iterator[Record]:
        """Yield the records of a store that must be read to find them; `fits` returns which are among them."""
        if self.keys:
            yield from filter(None, map(used.store.get, self.keys))
            return
        seek = self.wanted == {State.IN_PROGRESS} and used.store.seeks_in_progress
        prefixes = [self.prefix]
        if self.task:
            from ..core.keys import compose_default, slots_of  # with kombu behind them

            kind = slots_of if self.unique else lambda namespace, task: compose_default(namespace, task, "-")[:-1]
            prefixes = [kind(namespace, self.task) for namespace in used.namespaces]
        for prefix in prefixes:
            yield from used.store.scan(prefix=prefix, state=State.IN_PROGRESS if seek else None)

    def fits(self, record: Record) -> bool:
        """Return whether a record is one of them, but for its age."""
        if is_reservation(record.key) is not self.unique or is_part(record.key):
            return False
        if self.arguments and not self.keys:
            from ..core.keys import is_made_of  # with kombu behind it

            if not all(is_made_of(record.key, argument.value) for argument in self.arguments):
                return False
        return record.state in self.wanted and (not self.held or record.remaining > 0)

    @property
    def timed(self) -> bool:
        """Whether the age of a record matters."""
        return self.older is not None or self.younger is not None

    def fits_age(self, age: float) -> bool:
        """Return whether a record of this age is one of them."""
        return (self.older is None or age > self.older) and (self.younger is None or age < self.younger)


def looked_up(ctx: click.Context, wish: Filter) -> Filter:
    """Return the filter with the keys of its arguments, where an app knows them.

    Raises:
        ConfigurationError: there is no such task, or its key shows no such argument.
    """
    if wish.unique:
        return wish
    return replace(wish, keys=tuple(keys_of_arguments(ctx, wish.task, wish.arguments)))


def selected_keys(
    ctx: click.Context, stores: Stores, typed: Sequence[str], *, guess: bool = False, one: bool = False
) -> list[str]:
    """Return the keys that the command line names, also by arguments; report it if there are none.

    Arguments:
        ctx: The command's.
        stores: Where they are looked up.
        typed: The KEYs.
        guess: As in `keys_of`.
        one: Whether arguments, or a KEY with --task, must name one key alone.

    Raises:
        UsageError: none is named, or one in two ways, or several where one must be.
        ConfigurationError: there is no such task, or its arguments do not fit.
    """
    task, arguments = named_arguments(ctx)
    if not arguments:
        return keys_of(ctx, stores, typed, guess=guess, one=one)
    if typed:
        raise click.UsageError("Expected either a KEY or --arg, got both.", ctx)
    exact = keys_of_arguments(ctx, task, arguments)
    if exact:
        known = [key for key in exact if stores.knows(key)] or exact[:1]
        if one:
            check_one(ctx, known)
        return known
    wish = Filter((), task, "", None, None, False, SELECTED, arguments=arguments)
    results = [found for _, found in stores.each(partial(search, wish))]
    found = list(dict.fromkeys(key for result in results for key in result.records))
    if one:
        check_one(ctx, found)
    if any(result.more for result in results):
        click.echo(f"There are more than these {SELECTED}: narrow it down, or see list.", err=True)
    if not found and not stores.status:
        say(f"No record{f' of {task}' if task else ''} has {_shown(arguments)} in its key.", err=True)
        stores.status = Exit.NO
    return found


#: How many keys one command explains, or shows.
SELECTED = 20


def _shown(arguments: Sequence[Argument]) -> str:
    return " and ".join(f"{each.name}={each.value}" if each.name else each.value for each in arguments)


@dataclass
class SearchResult:
    """What a search found in one store, within its limit."""

    records: dict[str, Record] = field(default_factory=dict)
    more: bool = False
    #: How many were read to find them.
    read: int = 0
    #: How many were left out because their age is not known.
    ageless: int = 0
    interrupted: bool = False
    unreadable: Unreadable = field(default_factory=Unreadable)


def search(filter: Filter, used: NamedStore, *, progress: bool = True) -> SearchResult:  # noqa: A002
    """Return the records of a store that a filter leaves, up to its limit or until Ctrl-C.

    Arguments:
        filter: Which.
        used: The store.
        progress: Whether to show how many were found so far.
    """
    found = SearchResult()
    with (
        ProgressCounter("found") if progress else nullcontext() as counter,
        used.unreadable_reported_to() as found.unreadable,
    ):
        try:
            for record in matches(filter, used, found):
                if record is None:
                    continue
                if counter is not None:
                    counter.add(1)
                if len(found.records) == filter.limit and record.key not in found.records:
                    found.more = True
                    break
                found.records[record.key] = record  # a scan of Redis may return one twice
        except KeyboardInterrupt:
            found.more = found.interrupted = True
    return found


def matches(filter: Filter, used: NamedStore, found: SearchResult) -> Iterator[Record | None]:  # noqa: A002
    """Yield the records of a store that a filter leaves, and None for each that it does not; count in the result."""
    for record in filter.scan(used):
        found.read += 1
        fits, age = filter.fits(record), age_of(record)
        if fits and age is None and filter.timed:
            found.ageless += 1
        elif fits and (age is None or filter.fits_age(age)):
            yield waiting(record) if filter.unique else record
            continue
        yield None
