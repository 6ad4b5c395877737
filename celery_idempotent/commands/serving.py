"""The stores that a command works on: those of an app, or the one that the command line names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import IdempotencyError
from .exits import Exit
from .group import URL, CommandFailed

if TYPE_CHECKING:
    from ..stores.used import UsedStore

__all__ = [
    "CHECKUP",
    "KEYS",
    "STORES",
    "KeyCommand",
    "StoreCommand",
    "Stores",
    "from_url",
    "keys_of",
    "names_call",
    "stores_of",
]

#: Where a command line says what its stores are, in the meta of click's context: a function without arguments.
STORES = "celery_idempotent.stores"
#: Where it says what looks at its app, if it has one: a function without arguments.
CHECKUP = "celery_idempotent.checkup"
#: Where it says which keys its tasks have, if it has an app: a function without arguments.
KEYS = "celery_idempotent.keys"
_CALL = "celery_idempotent.call"
VARIABLE = "CELERY_IDEMPOTENT_STORE"


class StoreCommand(click.Command):
    """A command that works on stores; it asks for a URL where the command line has no app that knows them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--store`` where it is needed."""
        params = super().get_params(ctx)
        return params if STORES in ctx.meta else [*params, _store_option()]


def _store_option() -> click.Option:
    def remember(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        # An option before the command is more specific than the environment, and less than one after the command.
        if URL not in ctx.meta or ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            ctx.meta[URL] = value

    return click.Option(
        ["--store"],
        metavar="URL",
        envvar=VARIABLE,
        show_envvar=True,
        expose_value=False,
        callback=remember,
        help="The store to look into, as the app's idempotency_store says it.",
    )


class KeyCommand(StoreCommand):
    """A command on keys; where there is an app, they may be named by a task and its arguments."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with those that name a call where an app knows its tasks."""
        params = super().get_params(ctx)
        return [*params, *_call_options()] if KEYS in ctx.meta else params


def _call_options() -> list[click.Option]:
    def remember(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value not in (None, ()):
            ctx.meta.setdefault(_CALL, {})[option.name] = value

    options: dict[str, dict[str, Any]] = {
        "--task": {"metavar": "NAME", "help": "The task whose key it is; KEY is then the key without its prefix."},
        "--args": {"metavar": "JSON", "type": _Json(list), "help": "With --task: the key of a call, by its arguments."},
        "--kwargs": {"metavar": "JSON", "type": _Json(dict), "help": "With --task: its keyword arguments."},
        "--header": {
            "metavar": "NAME=VALUE",
            "multiple": True,
            "help": "A header of the message, where the scope of the key is one.",
        },
    }
    return [click.Option([name], expose_value=False, callback=remember, **more) for name, more in options.items()]


class _Json(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """JSON of one type."""

    name = "json"

    def __init__(self, wanted: type) -> None:
        self.wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the text stands for."""
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"expected JSON, got {value!r} ({error}).", param, ctx)
        if not isinstance(read, self.wanted):
            example = """'["ORD-1"]'""" if self.wanted is list else """'{"order_id": "ORD-1"}'"""
            self.fail(f"expected JSON like {example}, got {value!r}.", param, ctx)
        return read


class Stores:
    """The stores of one command, one after the other; what one of them cannot do does not keep the others from it.

    Arguments:
        used: The stores.
        guesses: Returns the keys of the app's tasks that a text may stand for (default: none).
    """

    def __init__(self, used: Sequence[UsedStore], guesses: Callable[[str], Sequence[str]] = lambda typed: ()) -> None:
        self.used = tuple(used)
        #: Returns the keys of the app's tasks that a text may stand for.
        self.guesses = guesses
        #: How the command ends if nothing else is said.
        self.status = Exit.OK

    @property
    def one(self) -> bool:
        """Whether there is no other store that a line of output could be about."""
        return len(self.used) == 1

    def knows(self, key: str) -> bool:
        """Return whether any store has a record or a history of a key; one that cannot serve has none."""
        for used in self.used:
            with suppress(IdempotencyError):
                if used.store.get(key) is not None or used.store.history(key):
                    return True
        return False

    def each(self, work: Callable[[UsedStore], Any]) -> Iterator[tuple[UsedStore, Any]]:
        """Yield each store with what the work answers for it; say which could not serve, and go on."""
        for used in self.used:
            try:
                answer = work(used)
            except IdempotencyError as error:
                failed = CommandFailed(error)
                failed.show()
                self.status = self.status or Exit(failed.exit_code)
            else:
                yield used, answer


def stores_of(ctx: click.Context) -> Stores:
    """Return the stores that a command works on; they are closed when it ends.

    Raises:
        UsageError: there is neither an app nor a URL.
        ConfigurationError: the URL is wrong, or what the app says.
    """
    stores = Stores(ctx.meta[STORES](), _guesses(ctx)) if STORES in ctx.meta else Stores([from_url(ctx)])
    for used in stores.used:
        ctx.call_on_close(used.store.close)
    return stores


def _guesses(ctx: click.Context) -> Callable[[str], Sequence[str]]:
    def guess(typed: str) -> list[str]:
        found: list[str] = ctx.meta[KEYS]().of_text(typed, _headers(ctx.meta.get(_CALL, {})))
        return found

    return guess


def names_call(ctx: click.Context) -> bool:
    """Return whether the command line names a key by a task."""
    return "task" in ctx.meta.get(_CALL, {})


def _headers(call: Mapping[str, Any]) -> dict[str, str]:
    headers = dict(each.partition("=")[::2] for each in call.get("header", ()))
    if "" in headers.values():
        raise click.UsageError("Expected --header NAME=VALUE, as in --header tenant=acme.")
    return headers


def keys_of(ctx: click.Context, stores: Stores, typed: Sequence[str], *, guess: bool = False) -> list[str]:
    """Return the keys that the command line names.

    Arguments:
        ctx: The command's.
        stores: Where they are looked up.
        typed: The KEYs.
        guess: Whether a KEY that no store knows may stand for the key of that text under a task of the app.

    Raises:
        UsageError: none is named, or one in two ways.
        ConfigurationError: there is no such task, or its arguments do not fit.
    """
    call = ctx.meta.get(_CALL, {})
    by_arguments = "args" in call or "kwargs" in call
    if "task" not in call:
        if by_arguments:
            raise click.UsageError("Expected --task together with --args or --kwargs.", ctx)
        if not typed:
            raise click.UsageError("Missing argument 'KEY'.", ctx)
        return [key for each in typed for key in (_meant(stores, each, stores.guesses) if guess else [each])]
    if bool(typed) == by_arguments:
        raise click.UsageError("Expected, with --task, either a KEY or --args and --kwargs.", ctx)
    tasks, headers = ctx.meta[KEYS](), _headers(call)
    if by_arguments:
        return [tasks.of_call(call["task"], call.get("args", ()), call.get("kwargs", {}), headers)]
    return [
        key
        for each in typed
        for key in _meant(stores, each, lambda text: tasks.of_text(text, headers, call["task"]), literal=False)
    ]


def _meant(
    stores: Stores, typed: str, guesses: Callable[[str], Sequence[str]], *, literal: bool = True
) -> Sequence[str]:
    """Return those keys of a text that a store knows; if it knows none, the first."""
    if literal and stores.knows(typed):
        return [typed]
    found = guesses(typed)
    first = [typed] if literal else found[:1]
    return [key for key in found if stores.knows(key)] or first


def from_url(ctx: click.Context) -> UsedStore:
    """Return the store that ``--store`` or the environment names."""
    from ..stores import hide_password, open_store
    from ..stores.used import UsedStore

    url = ctx.meta.get(URL)
    if not url:
        raise click.UsageError(
            f"Expected the URL of a store: give --store redis://localhost/1, or set {VARIABLE}. "
            "With an app, use `celery -A proj idempotency`, which finds its stores.",
            ctx,
        )
    return UsedStore(hide_password(url), open_store(url))
