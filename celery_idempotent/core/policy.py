"""The options of one task, `Policy` and `Unique`: checked when they are declared, layered library < app < task."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

from ..stores import scheme_of
from ..stores.base import Store
from ..units import Duration, hide_password, masked, parse_duration, parse_size, unfit
from . import compression
from .keys import KeySource, hides_arguments, own_signature

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it

Scope = str | Callable[..., object] | None
OnConflict = Literal["defer", "wait", "raise"]
OnDuplicate = Literal["replay", "raise"]
OnStoreError = Literal["wait", "run", "raise"]
Until = Literal["start", "done"]
OnPublished = Literal["skip", "raise", "replace"]


class IdempotencyOptions(TypedDict, total=False):
    """Name the options of `Policy`, with what may be written for each: for a dict of them that type checkers know.

    Durations are seconds, a `timedelta`, or text such as "90s", "15m", "24h", "7d", "500ms". Sizes are bytes, or text
    such as "64KiB".

    Example::

        shared: IdempotencyOptions = {"result_ttl": "7d", "on_conflict": "wait"}
    """

    store: Store | str | None
    """A store or its URL, for this task alone; None (the default): the app's."""
    key: KeySource
    """Name(s) of arguments, or a callable over the arguments; None (the default): the task id."""
    scope: Scope
    """A callable, or the name of a header, that gives the tenant; part of the key (default: none)."""
    lease_ttl: Duration
    """How long a dead holder blocks others, at least 0.5 s; renewed every third of it (default: 60 s)."""
    result_ttl: Duration
    """How long a duplicate is recognised after success; 0: only while it runs (default: 24 h)."""
    failure_ttl: Duration
    """The same after a remembered failure; how long released and lapsed records are kept (default: 24 h)."""
    on_conflict: OnConflict
    """What a duplicate does that meets a live lease (default: "defer")."""
    on_duplicate: OnDuplicate
    """What a duplicate does that meets a settled record (default: "replay")."""
    remember_failures: type[Exception] | Sequence[type[Exception]]
    """Exceptions that are final, and raised again for duplicates (default: none)."""
    store_result: bool
    """False keeps only the fact that the operation is done (default: True)."""
    compress_above: int | str
    """Payloads of more bytes are compressed (default: "1KiB")."""
    compression: str
    """How: "zlib" (the default), "zstd", "bzip2", "lzma", another one that kombu has, or "none"."""
    result_max_bytes: int | str
    """Payloads of more bytes, once compressed, are not kept in the record (default: "1MiB")."""
    large_results: str | None
    """Where those are kept: "backend", or an fsspec URL; None (the default): nowhere."""
    wait_timeout: Duration
    """How long ``on_conflict="wait"`` waits (default: 10 s)."""
    max_crashes: int
    """Deaths in a row before `CrashLoop` (default: 5)."""
    on_store_error: OnStoreError
    """What a delivery does while the store does not answer (default: "wait")."""
    max_lease: Duration | None
    """Stop renewing after this long; None (the default): the task's hard time limit + 60 s."""
    fingerprint: bool | Collection[str]
    """Compare the arguments of an explicit key (the default); or names to leave out; compares nothing with
    ``result_ttl=0``."""
    history: bool
    """Note what happens to a key, for ``explain``; False spares the store those writes (default: True)."""
    allow_early_ack: bool
    """Allow ``acks_late=False``, with which a killed worker loses the task (default: False)."""


@dataclass(init=False, repr=False, frozen=True, slots=True, kw_only=True)
class Policy:
    """Hold the options of one task, which `IdempotencyOptions` describes; durations are kept as seconds.

    Raises ConfigurationError for an unknown option or an unfit value.

    Example::

        @app.task(base=IdempotentTask, idempotency=Policy(key="order_id", result_ttl="7d"))
    """

    store: Store | str | None = None
    key: KeySource = None
    scope: Scope = None
    lease_ttl: float = 60.0
    result_ttl: float = 86400.0
    failure_ttl: float = 86400.0
    on_conflict: OnConflict = "defer"
    on_duplicate: OnDuplicate = "replay"
    remember_failures: tuple[type[Exception], ...] = ()
    store_result: bool = True
    compress_above: int = 1024
    compression: str = "zlib"
    result_max_bytes: int = 1048576
    large_results: str | None = None
    wait_timeout: float = 10.0
    max_crashes: int = 5
    on_store_error: OnStoreError = "wait"
    max_lease: float | None = None
    fingerprint: bool | tuple[str, ...] = True
    history: bool = True
    allow_early_ack: bool = False
    _given: frozenset[str] = field(default=frozenset(), compare=False)

    def __init__(self, **options: Unpack[IdempotencyOptions]) -> None:
        written = cast(dict[str, Any], options)
        before = written.pop("_given", written)  # dataclasses.replace() passes every field, also this one
        for name in written:
            if name not in _CHECKS:
                raise unfit("idempotency", "options of Policy", name, _BESIDE.get(name) or _hint(name, _CHECKS))
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, _CHECKS[name](written[name], name) if name in written else default)
        given = frozenset(n for n in written if n in before or getattr(self, n) != _DEFAULTS[n])
        object.__setattr__(self, "_given", given)
        if self.remember_failures and not self.result_ttl:
            expected = "nothing to be remembered with result_ttl=0"
            raise unfit("remember_failures", expected, self.remember_failures, "write remember_failures=()")
        if self.max_lease is not None and self.max_lease < self.lease_ttl:
            expected = f"at least lease_ttl, {self.lease_ttl:g} s"
            raise unfit("max_lease", expected, self.max_lease, "give a longer max_lease or a shorter lease_ttl")

    @classmethod
    def of(cls, value: Policy | Mapping[str, Any] | None, *, base: Policy | None = None) -> Policy:
        """Lay what a task or an app declares on top of a ``base`` (default: the library's defaults).

        A `Policy` overrides what its constructor was given, a mapping what it holds, None nothing. Returns a policy.
        Raises ConfigurationError for anything else, for an unknown option and for an unfit value.
        """
        given = value._options() if isinstance(value, Policy) else {} if value is None else value
        if not isinstance(given, Mapping):
            raise unfit("idempotency", "a Policy or a mapping of its options", value, "write {'key': 'order_id'}")
        below = base._options() if base is not None else {}
        return cls(**below | {str(name): option for name, option in given.items()})

    def check_signature(self, signature: inspect.Signature, task: str, *, hidden: bool = False) -> None:
        """Compare the names of arguments in ``key`` and ``fingerprint`` with the signature of the task called ``task``.

        A task that takes ``**kwargs`` has any argument, unless a decorator takes them for it: ``hidden``. Raises
        ConfigurationError for a name that it has not, and for a callable that would be given what it does not take.
        """
        for option in ("key", "fingerprint"):
            _check_names(getattr(self, option), option, signature, task, hidden=hidden)
        for option in ("key", "scope"):
            _check_callable(getattr(self, option), option, signature, task, hidden=hidden)

    def __repr__(self) -> str:
        """Show the options that were given, without the password of a store."""
        large = self.large_results and masked(self.large_results)
        store = hide_password(self.store) if isinstance(self.store, str) else self.store
        shown = {**self._options(), "store": store, "large_results": large}
        return f"Policy({', '.join(f'{name}={shown[name]!r}' for name in self._options())})"

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS if name in self._given}


_For = TypedDict("_For", {"for": Duration}, total=False)  # Python allows no attribute of that name
_UNSET: Any = object()


class UniqueOptions(_For, total=False):
    """Name the options of `Unique`, as `IdempotencyOptions` does those of `Policy`.

    ``for`` is how long a reservation outlives its due time without a sign of life (default: 1 h).
    """

    key: KeySource
    """Name(s) of arguments, or a callable over the arguments; None (the default): all arguments."""
    until: Until
    """Until the body is about to run, or until the operation has ended for good (default: "start")."""
    on_duplicate: OnPublished
    """What a call does that finds a waiting message (default: "skip")."""
    debounce: Duration | None
    """Run once it has been quiet for so long, with the newest arguments (default: None)."""
    max_wait: Duration | None
    """At the latest so long after the first call; None (the default): ten times ``debounce``."""
    throttle: Duration | None
    """The first call runs now, those within the period once at its end (default: None)."""


@dataclass(init=False, repr=False, frozen=True, slots=True, kw_only=True)
class Unique:
    """Hold the options of unique publishing: which calls of a task are not published while a message waits.

    `UniqueOptions` describes them; ``for`` is ``for_`` where Python allows no such name. Raises ConfigurationError for
    an unknown option, an unfit value, and for options that contradict each other.

    Example::

        @app.task(base=IdempotentTask, unique=Unique(key="document_id", until="done"))
    """

    key: KeySource = None
    until: Until = "start"
    for_: float = 3600.0
    on_duplicate: OnPublished = "skip"
    debounce: float | None = None
    max_wait: float | None = None
    throttle: float | None = None
    _given: frozenset[str] = field(default=frozenset(), compare=False)

    def __init__(self, *, for_: Duration = _UNSET, **options: Unpack[UniqueOptions]) -> None:
        given = {name: value for name, value in cast(dict[str, Any], options).items() if name != "_given"}
        if for_ is not _UNSET:
            if "for" in given:
                raise unfit("for", "no for_ beside it", given["for"], "they are one option; leave one of the two out")
            given["for"] = for_
        for name in given:
            if name not in _UNIQUE_CHECKS:
                own = f"write idempotency={{{name!r}: ...}} beside unique" if name in _CHECKS else ""
                raise unfit("unique", "options of Unique", name, own or _hint(name, _UNIQUE_CHECKS))
        for name, default in _UNIQUE_DEFAULTS.items():
            value = _UNIQUE_CHECKS[name](given[name], name) if name in given else default
            object.__setattr__(self, _attribute(name), value)
        object.__setattr__(self, "_given", frozenset(given))
        self._check()

    def _check(self) -> None:
        if self.debounce is not None and self.throttle is not None:
            raise unfit("throttle", "no debounce beside it", self.throttle, "choose one of the two")
        for name, given in (("debounce", self.debounce is not None), ("replace", self.on_duplicate == "replace")):
            if given and self.until == "done":
                hint = "a message that runs already cannot be replaced; leave until out"
                raise unfit("until", f'"start" beside {name}', self.until, hint)
        if self.debounce is not None and self.on_duplicate == "raise":
            raise unfit("on_duplicate", "no debounce beside it", self.on_duplicate, "leave one of the two out")
        if self.max_wait is not None and (self.debounce is None or self.max_wait < self.debounce):
            expected = "a debounce that is no longer than it"
            raise unfit("max_wait", expected, self.max_wait, 'write {"debounce": 30, "max_wait": "5m"}')

    @property
    def newest(self) -> bool:
        """Whether a later call replaces the message that waits."""
        return self.on_duplicate == "replace" or self.debounce is not None

    @property
    def longest_wait(self) -> float:
        """Seconds after the first call at which a debounced message runs at the latest."""
        return self.max_wait if self.max_wait is not None else 10 * (self.debounce or 0.0)

    @classmethod
    def of(cls, value: object, *, base: Unique | None = None) -> Unique | None:
        """Lay what a task, an app or a call declares on top of a ``base`` (default: the library's defaults).

        True is the base, names or a callable are a key, a mapping or a `Unique` override what they hold; None and False
        are no uniqueness, for which None is returned. Raises ConfigurationError for anything else.
        """
        if value is None or value is False:
            return None
        below = base._options() if base is not None else {}
        if value is True:
            return cls(**below)
        if isinstance(value, Unique):
            return cls(**below | value._options())
        if isinstance(value, Mapping):
            return cls(**below | {str(name): option for name, option in value.items()})
        if isinstance(value, (str, list, tuple)) or callable(value):
            return cls(**below | {"key": value})
        hint = 'write unique="document_id", or unique={"key": "document_id", "until": "done"}'
        raise unfit("unique", "True, False, a key, a Unique or a mapping of its options", value, hint)

    def check_signature(self, signature: inspect.Signature, task: str, *, hidden: bool = False) -> None:
        """Compare the key with the signature of the task called ``task``, as `Policy.check_signature` does."""
        _check_names(self.key, "key", signature, task, hidden=hidden)
        _check_callable(self.key, "key", signature, task, hidden=hidden)

    def __repr__(self) -> str:
        """Show the options that were given."""
        return f"Unique({', '.join(f'{_attribute(name)}={value!r}' for name, value in self._options().items())})"

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, _attribute(name)) for name in _UNIQUE_DEFAULTS if name in self._given}


def _attribute(name: str) -> str:
    return "for_" if name == "for" else name


def _required(source: Callable[..., object]) -> list[str]:
    """Return the names of the arguments without which a callable cannot be called."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _positional(source: Callable[..., object]) -> str:
    """Return which argument of a callable can have no name, so that it is never given one; "" if there is none."""
    if isinstance(source, (itemgetter, attrgetter, methodcaller)):  # some Pythons know no signature of them
        return "the object"
    try:
        parameters = own_signature(source).parameters.values()
    except (TypeError, ValueError):
        return ""
    by_name = any(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and (p.default is p.empty or not by_name):
            return p.name
        if p.kind is p.VAR_POSITIONAL and not by_name:
            return f"*{p.name}"
    return ""


def _names_of(signature: inspect.Signature, *, hidden: bool) -> list[str]:
    """Return the names under which the arguments of a task are known."""
    collected = _collected(signature, hidden=hidden)
    return [name for name in signature.parameters if name not in collected]


def _collected(signature: inspect.Signature, *, hidden: bool) -> set[str]:
    # What *args collects stands under the parameter's name; within a decorator that may be anything.
    kinds = {inspect.Parameter.VAR_KEYWORD, *([inspect.Parameter.VAR_POSITIONAL] if hidden else [])}
    return {p.name for p in signature.parameters.values() if p.kind in kinds}


def _check_names(names: object, option: str, signature: inspect.Signature, task: str, *, hidden: bool) -> None:
    known, collected = _names_of(signature, hidden=hidden), _collected(signature, hidden=hidden)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in [names] if isinstance(names, str) else names if isinstance(names, tuple) else ():
        # What **kwargs collects is known by its own name, not by that of the parameter.
        if name in known or (takes_any and not hidden and name not in collected):
            continue
        hint = _hint(name, known, option) if not hidden else _HIDDEN[option]
        raise unfit(option, f"names of arguments of {task}{signature}", name, hint)


def _hint(name: str, known: Collection[str], option: str = "") -> str:
    constant = f", or key=lambda: {name!r} for one key of all calls" if option == "key" else ""
    if not known:
        bound = "with bind=True the first one is the task, and no argument"
        return f"it has none; {bound}: write def task(self, ...){constant}"
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}{constant}"


#: What to do where a decorator hides the arguments.
_HIDDEN = {
    "key": "a decorator hides which arguments the body gets, and may add some; use a callable, as key=lambda args, "
    "**kwargs: ..., or give what the decorator returns a __signature__",
    "fingerprint": "a decorator hides which arguments the body gets, and may add some; compare none, with "
    "fingerprint=False, or give what the decorator returns a __signature__",
}


def _check_callable(source: object, option: str, signature: inspect.Signature, task: str, *, hidden: bool) -> None:
    if not callable(source):
        return
    known = _names_of(signature, hidden=hidden)
    if inspect.iscoroutinefunction(source):
        raise unfit(option, "a plain function", source, "write def instead of async def: nothing awaits it")
    hides = hides_arguments(source)
    within = inspect.signature(source).parameters if hides else {}
    if within and not any(p.kind is p.VAR_KEYWORD for p in within.values()) and not within.keys() >= set(known):
        expected = f"a callable that declares which of the arguments {sorted(known)} it takes"
        hint = (
            f"its decorator hides that, so it would be given all; write lambda {', '.join(known)}: ..., which calls it"
        )
        raise unfit(option, expected, source, hint)
    if positional := _positional(source):
        names = ", ".join(known) or "**arguments"
        hint = f"it is given them by name, and nothing for {positional}; write lambda {names}: ..."
        raise unfit(option, f"a callable that takes arguments of {task}{signature} by their names", source, hint)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in [] if takes_any or hidden or hides else _required(source):
        if name not in known:
            # As the task's self: there is none yet.
            hint = f"it is called before the task runs, with arguments alone: {', '.join(known) or 'there are none'}"
            raise unfit(option, f"a callable over arguments of {task}{signature}", name, hint)


def _are_names(value: object) -> bool:
    return isinstance(value, Collection) and all(isinstance(name, str) and name.isidentifier() for name in value)


def _key(value: object, option: str) -> object:
    if value is None or callable(value) or (isinstance(value, str) and value.isidentifier()):
        return value
    if isinstance(value, (list, tuple)) and value and _are_names(value):
        return tuple(value)
    constant = value if isinstance(value, str) and re.fullmatch(r"[\w-]+", value) else "all"  # and no URL of a store
    names = f'write "order_id" or ["shop", "order_id"], or lambda: {constant!r} for one key of all calls'
    hint = _accessor(value) or names
    raise unfit(option, "None, name(s) of arguments, or a callable", value, hint)


def _accessor(value: object) -> str:
    """Return the callable that a key means which names a part of an argument; "" if it names none."""
    names = [value] if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ()
    parts = [re.fullmatch(r"([^\W\d]\w*)((?:\.[^\W\d]\w*|\[[^\[\]]+\])+)", str(name)) for name in names]
    if not any(parts):
        return ""
    arguments = dict.fromkeys(part[1] if part else str(name) for part, name in zip(parts, names, strict=True))
    wanted = [re.sub(r"\[([^\W\d]\w*)\]", r'["\1"]', str(name)) for name in names]
    result = wanted[0] if len(wanted) == 1 else f"({', '.join(wanted)})"
    return f"write a callable: key=lambda {', '.join(arguments)}: {result}"


def _failures(value: object, option: str) -> tuple[type[Exception], ...]:
    classes = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if all(isinstance(cls, type) and issubclass(cls, Exception) for cls in classes):
        return classes
    raise unfit(option, "classes derived from Exception", value, "write (CardDeclined, UnknownOrder)")


def _fingerprint(value: object, option: str) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) and _are_names(value):
        return tuple(sorted(set(value)))  # type: ignore[call-overload]
    raise unfit(option, "True, False or the names of arguments to leave out", value, 'write ["requested_at"]')


def _compression(value: object, option: str) -> str:
    lacking = compression.missing(value) if isinstance(value, str) else "?"
    if isinstance(value, str) and not lacking:
        return value
    names = ", ".join(map(repr, compression.known()))
    hint = "write 'zlib'" if lacking == "?" else f"write 'zlib', or install it: pip install {lacking}"
    raise unfit(option, f"a compression that is installed, as {names}", value, hint)


def _large_results(value: object, option: str) -> str | None:
    if value is None or value == "backend":
        return value
    if isinstance(value, str) and re.fullmatch(r"(\w+::)*[\w+.-]+://[^#?]+", value):
        return value
    raise unfit(option, 'None, "backend" or a URL that fsspec opens', value, 'write "file:///var/results"')


def _fit(test: Callable[[Any], bool], expected: str, hint: str) -> Callable[[object, str], object]:
    def check(value: object, option: str) -> object:
        if not test(value):
            raise unfit(option, expected, value, hint)
        return value

    return check


def _one_of(choices: tuple[str, ...]) -> Callable[[object, str], object]:
    return _fit(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}", f"write {choices[0]!r}")


def _is_store(value: object) -> bool:
    return (
        value is None
        or (isinstance(value, str) and value != "")
        or (hasattr(value, "acquire") and not isinstance(value, type))
    )


def _store(value: object, option: str) -> object:
    if not _is_store(value):
        raise unfit(option, "None, a URL or a store", value, 'write "redis://localhost/1", or make the store first')
    if isinstance(value, str):
        scheme_of(value)  # here, and not at the first call
    return value


def _is_scope(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "") or callable(value)


_flag = _fit(lambda value: isinstance(value, bool), "True or False", "write True")


def _result_ttl(value: object, option: str) -> float:
    seconds = parse_duration(value, option, least=0.0)
    if 0 < seconds < 0.5:
        raise unfit(option, "0, or a duration from 0.5 s", value, 'write "24h"; 0 remembers an operation while it runs')
    return seconds


_ttl = partial(parse_duration, least=0.5)  # a third of a lease must outlast a round trip to the store
_DEFAULTS = {option.name: option.default for option in fields(Policy) if option.name != "_given"}
#: The names of all options.
OPTIONS = tuple(_DEFAULTS)
_CHECKS: dict[str, Callable[[object, str], object]] = {
    "store": _store,
    "key": _key,
    "scope": _fit(_is_scope, "None, the name of a header, or a callable", 'write "tenant"'),
    "lease_ttl": _ttl,
    "result_ttl": _result_ttl,
    "failure_ttl": _ttl,
    "on_conflict": _one_of(get_args(OnConflict)),
    "on_duplicate": _one_of(get_args(OnDuplicate)),
    "remember_failures": _failures,
    "store_result": _flag,
    "compress_above": parse_size,
    "compression": _compression,
    "result_max_bytes": parse_size,
    "large_results": _large_results,
    "wait_timeout": parse_duration,
    "max_crashes": _fit(lambda value: type(value) is int and value >= 1, "a whole number of at least 1", "write 5"),
    "on_store_error": _one_of(get_args(OnStoreError)),
    "max_lease": lambda value, option: None if value is None else parse_duration(value, option),
    "fingerprint": _fingerprint,
    "history": _flag,
    "allow_early_ack": _flag,
}


def _period(value: object, option: str) -> float | None:
    return None if value is None else parse_duration(value, option)


_UNIQUE_CHECKS: dict[str, Callable[[object, str], object]] = {
    "key": _key,
    "until": _one_of(get_args(Until)),
    "for": _ttl,
    "on_duplicate": _one_of(get_args(OnPublished)),
    "debounce": _period,
    "max_wait": _period,
    "throttle": _period,
}
_UNIQUE_DEFAULTS = {
    option.name.rstrip("_"): cast(object, option.default) for option in fields(Unique) if option.name != "_given"
}
#: What to write instead of what belongs to a unique task.
_BESIDE = {
    "unique": "a Celery task has it beside idempotency, as in @app.task(base=IdempotentTask, unique=...)",
    **{
        name: f"a Celery task has it beside idempotency, as in unique={{{name!r}: ...}}"
        for name in _UNIQUE_CHECKS
        if name not in _CHECKS
    },
}
#: The names of its options that nothing else is called.
UNIQUE_OPTIONS = ("debounce", "throttle")
