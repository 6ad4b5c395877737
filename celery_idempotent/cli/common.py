"""Common parts of the commands: their group, exit statuses, stores, confirmation and progress."""

from __future__ import annotations

import difflib
import getpass
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib import import_module
from io import TextIOWrapper
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from ..errors import ConfigurationError, IdempotencyError, RecordUnreadable, StoreRefused, StoreUnreachable
from ..stores.history import text_of_operator
from ..stores.records import HistoryEntry, is_reservation
from ..units import clean
from .tables import task_of

if TYPE_CHECKING:
    from ..errors import StoreError
    from ..stores.maintenance import NamedStore, Trace
    from ..stores.records import Record


#: Where a command line keeps the URL of the store that it names, in the meta of click's context.
URL = "celery_idempotent.url"


def suggestion(typed: str, known: Iterable[str], form: str = "{}") -> str:
    """Return " Did you mean ...?" with the known name that is nearest to the typed one; "" if none is near."""
    near = difflib.get_close_matches(typed, list(known), 1)
    return f" Did you mean {form.format(near[0])}?" if near else ""


def say(line: str, *, err: bool = False) -> None:
    """Print one line, in which there may be text from elsewhere; ``err`` for standard error."""
    click.echo(clean(line), err=err)


class CommandFailed(click.ClickException):
    """An error as one line on standard error, and as the exit status that goes with it."""

    def __init__(self, error: IdempotencyError) -> None:
        super().__init__(clean(" ".join(str(error).split())))
        setattr(self, "exit_code", status_of(error))  # noqa: B010 - click declares it as the class's


class Commands(click.Group):
    """Commands by name, each the ``command`` of the module of that name here.

    Arguments:
        modules: The names.
        attributes: What click's groups take.
    """

    def __init__(self, *args: Any, modules: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._modules = tuple(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, sorted."""
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None if there is none."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(f"{__package__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name, and suggest the one that was meant."""
        name = args[0] if args else ""
        if not name.startswith("-") and name not in self._modules:
            known = self.list_commands(ctx)
            hint = suggestion(name, known, "{!r}") or f" There is {', '.join(map(repr, known))}."
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name; what is wrong with a store is an error in words."""
        if isinstance(sys.stdout, TextIOWrapper):  # a terminal may have fewer letters than a record
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except UnicodeEncodeError as error:  # of the command line: what stores hold is text
            raise click.UsageError(f"Expected text, which UTF-8 can encode, got {error.object!r}.") from error
        except IdempotencyError as error:
            raise CommandFailed(error) from error
        except (click.Abort, KeyboardInterrupt):
            ctx.exit(Exit.INTERRUPTED)
        except RuntimeError as error:  # what Python before 3.12 makes of an interruption while it makes a class
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            ctx.exit(Exit.INTERRUPTED)


class Exit(IntEnum):
    """The exit status of a command, the same in every command."""

    #: Done.
    OK = 0
    #: The answer is no: nothing is known of the key, something is pending or was left alone, a person declined.
    NO = 1
    #: The command was typed wrongly, or an option of the app or of a task is wrong.
    USAGE = 2
    #: The store cannot serve now; try again later.
    UNREACHABLE = 3
    #: The store refuses the user: a wrong password, a missing right.
    REFUSED = 4
    #: What the store holds under the key is no record, or one of a newer version.
    UNREADABLE = 5
    #: Interrupted, as in shells: 128 and the number of the signal.
    INTERRUPTED = 130


_STATUS: dict[type[IdempotencyError], Exit] = {
    ConfigurationError: Exit.USAGE,
    StoreUnreachable: Exit.UNREACHABLE,
    StoreRefused: Exit.REFUSED,
    RecordUnreadable: Exit.UNREADABLE,
}


def status_of(error: IdempotencyError) -> Exit:
    """Return the exit status of an error."""
    return next((status for cls, status in _STATUS.items() if isinstance(error, cls)), Exit.NO)


#: The entry of a command line's stores in the meta of click's context: a function without arguments.
STORES = "celery_idempotent.stores"
#: The entry of the checks of its app, if it has one: a function without arguments.
CHECKUP = "celery_idempotent.checkup"
#: The entry of the keys of its tasks, if it has an app: a function without arguments.
KEYS = "celery_idempotent.keys"
_CALL = "celery_idempotent.call"
VARIABLE = "CELERY_IDEMPOTENT_STORE"


class StoreCommand(click.Command):
    """A command that works on stores; it takes a URL where the command line has no app that names them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--store`` where it is needed."""
        params = super().get_params(ctx)
        return params if STORES in ctx.meta else [*params, _store_option()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; of what is often typed in the wrong place, the error names the right one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name == "--store" and STORES in ctx.meta:
                instead = f"For another store: celery-idempotent {self.name} --store URL"
                raise click.UsageError(f"Expected no --store: the app names its stores. {instead}", ctx) from error
            if error.option_name in {"-A", "--app"}:
                instead = f"celery -A proj idempotency {self.name}"
                raise click.UsageError(f"{error.format_message()} For the stores of an app: {instead}", ctx) from error
            raise
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                raise click.UsageError(f"{error.message}. {self._hint(error.message)}", ctx) from error
            raise

    def _hint(self, problem: str) -> str:
        if "://" in problem:
            return "Give the URL of a store as --store URL."
        if isinstance(self, KeyCommand):
            return "This command takes one KEY."
        return "For one key: show KEY. For an argument in a key: list --arg VALUE."


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
        help="The store to look into, as in the app's idempotency_store.",
    )


class KeyCommand(StoreCommand):
    """A command on keys, which may also be named by a task and its arguments."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with those that name a call; some are there where an app knows its tasks."""
        return [*super().get_params(ctx), *_call_options(with_app=KEYS in ctx.meta)]


class Argument(NamedTuple):
    """An argument of a task as it was typed; its name may be empty."""

    name: str
    value: str


class ArgumentType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """An argument of a task: NAME=VALUE, or VALUE alone."""

    name = "argument"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Argument:
        """Return the argument that the text stands for."""
        if isinstance(value, Argument):
            return value
        name, equals, rest = value.partition("=")
        found = Argument(name, rest) if equals and name.isidentifier() else Argument("", value)
        if not found.value:
            self.fail(f"expected NAME=VALUE or VALUE, as in order_id=ORD-1, got {value!r}.", param, ctx)
        return found


def _call_options(*, with_app: bool) -> list[click.Option]:
    def remember(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value not in (None, ()):
            ctx.meta.setdefault(_CALL, {})[option.name] = value

    def refuse(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value not in (None, ()):
            raise click.UsageError(
                f"Expected an app for {option.opts[0]}, which composes the key of a call, got none. Use "
                "`celery -A proj idempotency`, which has it, or write --arg NAME=VALUE."
            )

    options: dict[str, dict[str, Any]] = {
        "--task": {"metavar": "NAME", "help": "The task whose key it is; KEY is then the key without its prefix."},
        "--arg": {
            "metavar": "[NAME=]VALUE",
            "multiple": True,
            "type": ArgumentType(),
            "help": "Instead of KEY: an argument of which the key is made; may be repeated. 1 stands also for the text "
            '"1"; what changes records acts on neither where there are both.',
        },
        "--args": {"metavar": "JSON", "type": Json(list), "help": "With --task: the key of a call, by its arguments."},
        "--kwargs": {"metavar": "JSON", "type": Json(dict), "help": "With --task: its keyword arguments."},
        "--header": {
            "metavar": "NAME=VALUE",
            "multiple": True,
            "help": "A header of the message, where the scope of the key is one.",
        },
    }
    made = []
    for name, more in options.items():
        if with_app or name in ("--task", "--arg"):
            made.append(click.Option([name], expose_value=False, callback=remember, **more))
        else:
            made.append(click.Option([name], expose_value=False, callback=refuse, hidden=True))
    return made


class Json(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """JSON of one type."""

    name = "json"

    def __init__(self, wanted: type) -> None:
        self.wanted = wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the text stands for."""
        example = """'["ORD-1"]'""" if self.wanted is list else """'{"order_id": "ORD-1"}'"""
        try:
            read = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            read = None
        if not isinstance(read, self.wanted):
            self.fail(f"expected JSON like {example}, with the single quotes, got {value!r}.", param, ctx)
        return read


class Number(click.IntRange):
    """A whole number from 1 on."""

    name = "whole number"

    def __init__(self) -> None:
        super().__init__(min=1)


class Stores:
    """The stores of one command, one after the other; what one of them cannot do does not keep the others from it.

    Arguments:
        used: The stores.
        guesses: Returns the keys of the app's tasks that a text may stand for (default: none).
    """

    def __init__(self, used: Sequence[NamedStore], guesses: Callable[[str], Sequence[str]] = lambda typed: ()) -> None:
        self.used = tuple(used)
        #: Returns the keys of the app's tasks that a text may stand for.
        self.guesses = guesses
        #: The exit status, unless a command sets another.
        self.status = Exit.OK

    @property
    def one(self) -> bool:
        """Whether there is no other store that a line of output could be about."""
        return len(self.used) == 1

    def knows(self, key: str) -> bool:
        """Return whether any store has a record or a history of a key; one that cannot serve has none."""
        for used in self.used:
            try:
                if used.store.get(key) is not None or used.store.history(key):
                    return True
            except RecordUnreadable:  # there is one
                return True
            except IdempotencyError:
                continue
        return False

    def each(self, work: Callable[[NamedStore], Any]) -> Iterator[tuple[NamedStore, Any]]:
        """Yield each store with what the work answers for it; report those that could not serve, and go on."""
        for used in self.used:
            with self.serving():
                yield used, work(used)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Report the error of a store that cannot serve, and keep its exit status; the command goes on."""
        try:
            yield
        except IdempotencyError as error:
            failed = CommandFailed(error)
            failed.show()
            self.status = self.status or Exit(failed.exit_code)

    def end(self, ctx: click.Context, facts: object = None) -> None:
        """Print the facts as JSON, unless they are None, and exit with the status."""
        if facts is not None:
            click.echo(json.dumps(facts))
        ctx.exit(self.status)


@dataclass
class Changes:
    """The records that a command changed, left alone, and missed; those of a dry run are what it would have changed."""

    done: int = 0
    left: int = 0
    missing: list[str] = field(default_factory=list)

    def end(self, ctx: click.Context, stores: Stores, verb: str, *, as_json: bool) -> None:
        """End the command, with 1 if not all was done; ``verb`` is the key of what was done in the JSON."""
        if self.left or self.missing:
            stores.status = stores.status or Exit.NO
        stores.end(ctx, {verb: self.done, "left": self.left, "missing": self.missing} if as_json else None)


def stores_of(ctx: click.Context) -> Stores:
    """Return the stores that a command works on; they are closed when it ends.

    Raises:
        UsageError: there is neither an app nor a URL.
        ConfigurationError: the URL is wrong, or the app's configuration.
    """
    if STORES in ctx.meta:
        used = ctx.meta[STORES]()
        stores = Stores(used, lambda typed: ctx.meta[KEYS]().of_text(typed, _headers(ctx.meta.get(_CALL, {}))))
    else:
        stores = Stores([from_url(ctx)])
    for used in stores.used:
        ctx.call_on_close(used.store.close)
    return stores


def names_call(ctx: click.Context) -> bool:
    """Return whether the command line names a key by a task or an argument."""
    return bool({"task", "arg"} & ctx.meta.get(_CALL, {}).keys())


def named_arguments(ctx: click.Context) -> tuple[str | None, tuple[Argument, ...]]:
    """Return the task that the command line names, and the arguments of which its key is made."""
    call = ctx.meta.get(_CALL, {})
    return call.get("task"), call.get("arg", ())


def keys_of_arguments(ctx: click.Context, task: str | None, arguments: Sequence[Argument]) -> list[str]:
    """Return the keys that an app makes of some arguments; none where they do not determine them, or without an app.

    Raises:
        ConfigurationError: there is no such task, or its key shows no such argument.
    """
    if not task or not arguments or KEYS not in ctx.meta:
        return []
    found: list[str] = ctx.meta[KEYS]().of_arguments(task, arguments, _headers(ctx.meta.get(_CALL, {})))
    return found


def _headers(call: Mapping[str, Any]) -> dict[str, str]:
    headers = dict(each.partition("=")[::2] for each in call.get("header", ()))
    if "" in headers.values():
        raise click.UsageError("Expected --header NAME=VALUE, as in --header tenant=acme.")
    return headers


def check_one(ctx: click.Context, found: Sequence[str]) -> None:
    """Raise if there is more than the one operation that a command may change, as of ``1`` and ``"1"``."""
    if len(found) > 1:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise click.UsageError(
            f"Expected one operation, got {len(found)}: {clean(', '.join(found[:5]))}{more}. Name the KEY. Give it "
            "as it is listed here, without --task and --arg.",
            ctx,
        )


def keys_of(
    ctx: click.Context, stores: Stores, typed: Sequence[str], *, guess: bool = False, one: bool = False
) -> list[str]:
    """Return the keys that the command line names.

    Arguments:
        ctx: The command's.
        stores: Where they are looked up.
        typed: The KEYs.
        guess: Whether a KEY that no store knows may stand for the key of that text under a task of the app.
        one: Whether each KEY must stand for one key alone.

    Raises:
        UsageError: none is named, or one in two ways, or several where one must be.
        ConfigurationError: there is no such task, or its arguments do not fit.
    """
    call = ctx.meta.get(_CALL, {})
    by_arguments = "args" in call or "kwargs" in call
    if "task" not in call:
        if by_arguments:
            raise click.UsageError("Expected --task NAME together with --args or --kwargs.", ctx)
        if not typed:
            raise click.UsageError("Missing argument 'KEY', or --arg NAME=VALUE.", ctx)
        return [key for each in typed for key in (_meant(stores, each, stores.guesses) if guess else [each])]
    if bool(typed) == by_arguments:
        raise click.UsageError(
            "Expected, with --task, one of: KEY; --arg NAME=VALUE; --args JSON and --kwargs JSON.", ctx
        )
    if KEYS in ctx.meta:
        tasks, headers = ctx.meta[KEYS](), _headers(call)
        if by_arguments:
            return [tasks.of_call(call["task"], call.get("args", ()), call.get("kwargs", {}), headers)]
        under = [
            _meant(stores, each, lambda text: tasks.of_text(text, headers, call["task"]), literal=False)
            for each in typed
        ]
    else:
        under = [_under(stores, call["task"], each) for each in typed]
    if one:
        for found in under:
            check_one(ctx, found)
    return [key for found in under for key in found]


def _under(stores: Stores, task: str, typed: str) -> Sequence[str]:
    """Return the keys that a text may stand for under a task that no app describes: those that a store knows."""
    from ..core.keys import compose, compose_default

    found = [
        key
        for used in stores.used
        for namespace in used.namespaces
        for key in (compose(namespace, task, key=typed), compose_default(namespace, task, typed))
    ]
    return [key for key in found if stores.knows(key)] or found[:1]


def _meant(
    stores: Stores, typed: str, guesses: Callable[[str], Sequence[str]], *, literal: bool = True
) -> Sequence[str]:
    """Return those keys of a text that a store knows; if it knows none, the first."""
    if literal and stores.knows(typed):
        return [typed]
    found = guesses(typed)
    first = [typed] if literal else found[:1]
    return [key for key in found if stores.knows(key)] or first


def from_url(ctx: click.Context) -> NamedStore:
    """Return the store that ``--store`` or the environment names."""
    from ..stores import hide_password, open_store
    from ..stores.maintenance import NamedStore

    url = ctx.meta.get(URL)
    if not url:
        raise click.UsageError(
            f"Expected the URL of a store: give --store redis://localhost/1, or set {VARIABLE}. "
            "With an app, use `celery -A proj idempotency`, which finds its stores.",
            ctx,
        )
    if "django://" in url.lower():
        import_from_here()  # its settings
    store = open_store(url)
    if ctx.command.name != "schema" and not getattr(store, "has_file", lambda: True)():
        raise ConfigurationError(
            f"Expected the file of a store, got {url}, where none is: to look would make one. Check the path; one from "
            "the root has four slashes, sqlite:////var/lib/app.sqlite. `schema --apply` makes it, or a first task."
        )
    return NamedStore(hide_password(url), store)


def import_from_here() -> None:
    """Have modules of the current directory be found, as Celery's app option, RQ's worker and Django's manage.py do."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


#: Seconds to keep what an operator did where the task's options are not known: the default of `result_ttl`.
KEEP = 86400.0


def operator() -> str:
    """Return user@host of the operator; behind sudo that is the user who called it."""
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def command_line() -> str:
    """Return the command that runs in this thread, without its arguments; "" where none does, as for a web page."""
    context = click.get_current_context(silent=True)
    return "" if context is None else context.command_path


def waiting(record: Record) -> Record:
    """Return the record of a reservation with its message as its task, and the publisher as its holder; else as is."""
    from ..core.reservations import WaitingMessage

    message = WaitingMessage.read(record.holder) if is_reservation(record.key) else None
    return record if message is None else replace(record, task_id=message.task_id, holder=message.holder)


def trace_of(
    event: str, used: NamedStore, record: Record, command: str | None = None, *, state: str | None = None
) -> Trace:
    """Return the entry of a history for what an operator did to a record.

    Arguments:
        event: What they did, see `stores.history.OPERATORS`.
        used: The store.
        record: The record as it was.
        command: The command by which they did it (default: the one that runs).
        state: What the record was (default: its state).
    """
    from ..stores.maintenance import Trace

    def failed(error: StoreError) -> None:
        reason = " ".join(str(error).split())
        say(f"What was done to {record.key} could not be noted in its history: {reason}", err=True)

    forgotten, record = event == "ForgottenByOperator", waiting(record)
    facts = {
        "command": command_line() if command is None else command,
        "state": (state or str(record.state)) if forgotten else "",
        "holder": record.holder,
        "task_id": record.task_id,
    }
    keep = used.keep_ttls.get(task_of(record.key), KEEP)
    return Trace(HistoryEntry(record.key, text_of_operator(event, operator(), **facts), 0.0, keep), failed)


def confirmed(question: str, *, yes: bool, verb: str) -> bool:
    """Ask for confirmation on standard error, unless it is given; return False where no person can answer.

    Arguments:
        question: The text.
        yes: Whether it is answered already.
        verb: What ``--yes`` does without a question, as in "forgets".
    """
    try:
        return yes or click.confirm(clean(question), err=True)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            click.echo(f"\nNo answer came; --yes {verb} without a question.", err=True)
            return False
        raise


#: Seconds between two looks of it.
EVERY = 0.2


class ProgressCounter:
    """Count what is done, and show it with the time on standard error, if that is a terminal.

    A thread shows it: a store may look through much and find nothing.

    Arguments:
        done: What was done, as in "removed".
    """

    def __init__(self, done: str) -> None:
        self.count = 0
        self._done = done
        self._over = Event()
        self._thread = Thread(target=self._show, daemon=True) if sys.stderr.isatty() else None

    def add(self, number: int) -> None:
        """Count so many more."""
        self.count += number

    def __str__(self) -> str:
        return f"{self.count:,} {self._done}"

    def _show(self) -> None:
        since = monotonic()
        while not self._over.wait(EVERY):
            click.echo(f"\r{self}, {monotonic() - since:.0f} s", nl=False, err=True)

    def __enter__(self) -> ProgressCounter:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            click.echo("\r\033[K", nl=False, err=True)
        if kind is not None and self.count:  # interrupted, or the store went away: what is done is done
            click.echo(f"{self} before it ended", err=True)
