"""Arguments -> canonical form -> key and fingerprint.

The canonical form of a value is an ASCII text. It is *injective*, as a text can be read back in one way only: numbers
(floats always show a point, an exponent or a letter, and no x as huge integers do), strings with JSON's quotes and
escapes, ``null true false [value,..] {"name":value,..} set[..] bytes".." decimal".." uuid".." datetime".." date".."
time".."``, and ``type("marker",value)`` for other types registered with kombu. Mappings and sets are sorted.
Fingerprints also have ``enum("class","name") path("class","..") name("module.name") map[[key,value],..]
object("class",digest)`` for what JSON cannot carry and pickle can; keys have not.

It is *unchanged by the trip through the broker*: the same before kombu's JSON wrote a value and after it was read. So a
tuple is a list; a mapping key is the string JSON makes of it; an enum of str or int is its value; surrogates are the
character they spell; ``__json__`` is obeyed; a mapping that kombu would read as bytes, a Decimal, .. is one.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import inspect
import json
import re
import string
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from hashlib import sha256
from json.encoder import encode_basestring_ascii as _quote
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any
from urllib.parse import quote, unquote
from uuid import UUID

from ..errors import MissingKey
from ..stores.records import PART, RESERVED
from .serialization import serialization

KeySource = str | Sequence[str] | Callable[..., object] | None

MAX_DEPTH, MAX_PART = 100, 128  # the depth is far below Python's own limit, which depends on version and caller
_MARKED = {'"__type__"', '"__value__"'}
#: Matches the canonical form of what names nothing, and of a sequence of nothing else.
_EMPTY = re.compile(r'(?:null|nan|(?:bytes)?""|(?:set)?\[|[\],{}])+').fullmatch
#: Finds how Python writes an object whose class has no way of its own, as ``<shop.Order object at 0x7f3c>``.
find_address = re.compile(r"<[^<>]* at (0x[0-9A-Fa-f]+)>").search
_SAFE = "".join(set(string.punctuation) - set("%:~"))
_NEEDS_NO_ESCAPE = re.compile(r"[!-$&-9;-}]*").fullmatch
_NONE: Mapping[str, object] = {}
# datetime stands before date, which it derives from. Decimal writes "e" or "E" depending on the caller's context.
_OWN_FORMS: tuple[tuple[type, str, Callable[[Any], str]], ...] = (
    (bytes, "bytes", lambda value: value.decode("latin-1")),
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (Decimal, "decimal", lambda value: Decimal.__str__(value).replace("e", "E")),
    (UUID, "uuid", UUID.__str__),
)
_DERIVED_FROM = (str, int, float, list, tuple, dict, bytes, bytearray, date, time, Decimal, UUID, set, frozenset)
_BUILT_IN = {*_DERIVED_FROM, bool, datetime, type(None)}
_CACHED = type(lru_cache(len))
#: Modules of decorators that hand all arguments through.
_HANDING_THROUGH = {"contextlib", "celery.app.base"}
_REDUCERS = {"__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}


def canonical(value: object) -> str:
    """Write a value as the one text that stands for it, before and after its trip through the broker.

    Returns ASCII text, whatever the serializer, the version of Python and PYTHONHASHSEED. Raises TypeError for a type
    that kombu's JSON cannot carry (sets excepted), and for what is nested above 100 levels or contains itself.
    """
    return _strict.encode(value, 0)


def fingerprint(
    arguments: Mapping[str, object], *, leave_out: Collection[str] = (), defaults: Mapping[str, object] = _NONE
) -> str:
    """Digest the arguments of a call, so that another call under the same key can be compared with it.

    Arguments are compared by value: what `canonical` refuses, which pickle delivers and a plain function is given, by
    its fields (dataclasses, attrs, Pydantic) or by the form to which pickle reduces it.

    Arguments:
        arguments: What `bind` returns.
        leave_out: Names of those that may differ (default: none).
        defaults: What `defaults_of` returns (default: nothing). An argument that equals its default does not count, so
            that a call stays the same when its function gets another parameter.

    Returns:
        32 hex digits of SHA-256.

    Raises:
        MissingKey: an argument has no value that could be compared.
    """
    members = []
    for name in sorted(arguments.keys() - leave_out):
        value, default = arguments[name], defaults.get(name, inspect.Parameter.empty)
        if value is default:
            continue
        form = _comparable(name, value)
        if default is inspect.Parameter.empty or form != _form_of_default(default):
            members.append(f"{_quote(name)}:{form}")
    return sha256(f"{{{','.join(members)}}}".encode()).hexdigest()[:32]


def defaults_of(signature: inspect.Signature) -> dict[str, object]:
    """Return what `bind` gives arguments that a call leaves out: their defaults, and nothing for ``*args``."""
    given = {p.name: () if p.kind is p.VAR_POSITIONAL else p.default for p in signature.parameters.values()}
    return {name: default for name, default in given.items() if default is not inspect.Parameter.empty}


def _form_of_default(default: object) -> str:
    try:
        return _Comparison().encode(default, 0)
    except (TypeError, RecursionError):
        return ""  # equal to itself alone


def _comparable(name: str, value: object) -> str:
    if type(value) is str:
        return _quote(value)
    try:
        return _Comparison().encode(value, 0)
    except (TypeError, RecursionError) as exc:
        raise MissingKey(
            f"Expected the argument {name!r} to have a value that can be compared with that of another call under the "
            f"same key, got {_name(type(value))}. {exc}. Pass an id or plain data instead, leave the argument out with "
            f'fingerprint=["{name}"], or compare none with fingerprint=False'
        ) from exc


def own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a callable itself takes, and not what the callable takes that it wraps.

    A decorator written with `functools.wraps` may add, drop or exchange arguments. Those of `contextlib`, Celery's own
    for Pydantic and ``lru_cache`` hand them through, and a ``__signature__`` of its own is believed.

    Arguments:
        function: A function, method or other callable.

    Raises:
        ValueError: it has no signature.
        TypeError: it is no callable.
    """
    function, declared = _outermost(function), _declared_signature(function)
    of = function.__func__ if isinstance(function, MethodType) else function
    if declared is None and isinstance(of, FunctionType) and "__signature__" in vars(of):  # copied from what it wraps
        bare = FunctionType(of.__code__, {}, of.__name__, of.__defaults__, of.__closure__)
        bare.__kwdefaults__ = of.__kwdefaults__
        of, declared = bare, inspect.signature(bare)
    if isinstance(function, MethodType):  # without the first argument, also where a signature was declared
        return inspect.signature(MethodType(of, function.__self__), follow_wrapped=False)
    if declared is not None:
        return declared
    if _is_proxy(function):
        return inspect.signature(_anything)
    return inspect.signature(function, follow_wrapped=False)


def with_own_defaults(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature whose defaults are as they were declared, also once a body has changed a list among them."""
    parameters = [
        p.replace(default=_own(p.default)) if type(p.default) in (list, dict, set, tuple) else p
        for p in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


def _own(value: Any) -> Any:
    """Return a copy of a collection and of those in it; other objects as they are, which may equal no copy."""
    kind = type(value)
    if kind is dict:
        return {key: _own(each) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(_own(each) for each in value)
    return value.copy() if kind is set else value


def hides_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a callable wraps another one and does not declare which arguments that one gets."""
    function = _outermost(function)
    if isinstance(function, partial):
        return hides_arguments(function.func)
    if not hasattr(function, "__wrapped__") or _declared_signature(function) is not None:
        return False
    return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own_signature(function).parameters.values())


def _anything(*args: Any, **kwargs: Any) -> None: ...


def _outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a callable is, below decorators that are known to hand all arguments through."""
    of = function.__func__ if isinstance(function, MethodType) else function
    while isinstance(of, _CACHED) or (hasattr(of, "__wrapped__") and _home(of) in _HANDING_THROUGH):
        of = of.__wrapped__
    return MethodType(of, function.__self__) if isinstance(function, MethodType) else of


def _home(function: object) -> str | None:
    """Return the module whose code a function has; its ``__module__`` is that of what it wraps."""
    return function.__globals__.get("__name__") if isinstance(function, FunctionType) else None


def _declared_signature(function: Any) -> inspect.Signature | None:
    """Return the signature that a callable was given, and not by `functools.wraps`, which copies it."""
    declared = getattr(function, "__signature__", None)
    copied = getattr(getattr(function, "__wrapped__", None), "__signature__", None)
    return declared if isinstance(declared, inspect.Signature) and declared is not copied else None


def _is_proxy(function: Any) -> bool:
    """Return whether a callable is an object around another one, as those of wrapt."""
    return hasattr(function, "__wrapped__") and type(function) not in (FunctionType, MethodType)


def positional(signature: inspect.Signature) -> tuple[str, ...] | None:
    """Return the names of the parameters where each is one argument, that may be positional; None where not."""
    parameters = signature.parameters.values()
    return tuple(signature.parameters) if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) else None


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object]:
    """Name the arguments of a call, so that positional, keyword and default spell the same.

    ``*args`` stand under their parameter's name; what ``**kwargs`` collects stands beside the named parameters, or in a
    mapping under ``**`` where it would clash (``f(*args, **kwargs)`` called with ``args=``). Returns name -> value.
    Raises the TypeError that the call itself would raise.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            collected = named.pop(parameter.name)
            clashing = {name: value for name, value in collected.items() if name in named or name == "**"}
            return {**collected, **named, "**": clashing} if clashing else {**collected, **named}
    return named


def resolve(
    source: str | Sequence[str] | Callable[..., object], arguments: Mapping[str, object], what: str = "key"
) -> object:
    """Take the key of an operation from its arguments.

    ``source`` is the name of an argument; a sequence of names, which gives the tuple of their values; or a callable,
    which gets those of ``arguments`` that its signature names, as keywords, or all of them if it takes ``**kwargs``.
    Raises MissingKey if an argument is missing, if the callable raises or returns the address of an object, or for
    None, "" and what cannot be a key; it calls the source a callable of ``what``.
    """
    if isinstance(source, str):
        return _argument(source, arguments)
    if callable(source):
        return _call(source, arguments, what)
    return tuple([_argument(name, arguments) for name in source])


def compose(namespace: str, task: str, *, key: object, scope: object | None = None) -> str:
    """Write the name under which a store remembers an operation whose key was given.

    Returns ``namespace:task:scope:key``. Text stands as it is, percent-escaped; any other value as ``~`` and its
    canonical form; a part above 128 characters as ``~~`` and the SHA-256 of that form. Without ``scope`` (None, the
    default) that part is empty. Raises MissingKey for a key or scope that is empty or has no canonical form.
    """
    tenant = "" if scope is None else _part(scope, "the scope")
    return f"{_prefix(namespace, task)}:{tenant}:{_part(key, 'the key')}"


def compose_default(namespace: str, task: str, task_id: str) -> str:
    """Write the name under which a store remembers an operation whose key is its task id.

    Returns ``namespace:task:task_id``: three parts, which no given key has. Raises MissingKey for an empty id.
    """
    return f"{_prefix(namespace, task)}:{_part(task_id, 'the task id')}"


def compose_slot(
    namespace: str,
    task: str,
    source: KeySource,
    arguments: Mapping[str, object],
    *,
    scope: object | None = None,
    message: tuple[str, ...],
) -> str:
    """Write the name of the reservation that a waiting message holds: ``namespace:~unique:task:scope:key:message``.

    No task's escaped name begins with a tilde.

    Arguments:
        namespace: How the task's keys begin.
        task: Its name.
        source: What its calls share, as in `resolve`; None: all arguments.
        arguments: What `bind` returns.
        scope: The tenant (default: none).
        message: What the message has beside its arguments, as its queue.

    Raises:
        MissingKey: the arguments do not name it.
    """
    part = _whole(arguments) if source is None else _part(resolve(source, arguments), "the unique key")
    tenant = "" if scope is None else _part(scope, "the scope")
    return f"{slots_of(namespace, task)}{tenant}:{part}:{_message_part(message)}"


def compose_part(namespace: str, group: str, task_id: str) -> str:
    """Write the name of the claim to return the part of a chord's member: ``namespace:~part:group:task_id``."""
    return f"{_escape(namespace)}:{PART}:{_escape(group)}:{_escape(task_id)}"


@lru_cache(maxsize=1024)
def slots_of(namespace: str, task: str) -> str:
    """Return how the names of all reservations of a task begin."""
    return f"{_escape(namespace)}:{RESERVED}:{_escape(task)}:"


@lru_cache(maxsize=1024)
def _message_part(message: tuple[str, ...]) -> str:
    return _part(message, "the message")


def _whole(arguments: Mapping[str, object]) -> str:
    try:
        encoded = _strict.encode(dict(arguments), 0)
    except TypeError as exc:
        raise MissingKey(
            f"Expected arguments of which a unique key can be made. {exc}. Or name what distinguishes two calls: "
            f"unique=lambda {next(iter(arguments))}: {next(iter(arguments))}..."
        ) from exc
    part = "~" + _escape(encoded)
    return part if len(part) <= MAX_PART else f"~~{sha256(encoded.encode('ascii')).hexdigest()}"


@lru_cache(maxsize=1024)
def _prefix(namespace: str, task: str) -> str:
    return f"{_escape(namespace)}:{_escape(task)}"


def is_made_of(name: str, value: str) -> bool:
    """Return whether the name of an operation shows that its scope, its key or a part of that is a value.

    A name that was too long shows no values, but those of its scope.

    Arguments:
        name: What `compose` or `compose_default` returned, or the name of a reservation.
        value: The value as text: ``ORD-1``, ``17``, a UUID's digits.
    """
    quoted, bare = _quote(value), rf"(?<![^\[,:{{]){re.escape(value)}(?![^\],}}])"
    for part in name.split(":")[2:]:
        text = unquote(part)
        if not part.startswith("~"):
            if text == value:
                return True
        elif not part.startswith("~~") and (quoted in text or re.search(bare, text[1:])):
            return True
    return False


def placed(key: str, place: str) -> str:
    """Write the name of an operation that is one at each place, ``key:~@place``; the key itself where it has none."""
    return f"{key}:~@{_part(place, 'the place')}" if place else key


class _Form:
    """Write canonical forms of what kombu's JSON can carry; a subclass, of other values too."""

    by_value = False

    def encode(self, value: object, depth: int, *, as_built_in: bool = False) -> str:
        if type(value) is str:  # which most are
            return _quote(value)
        if self.by_value and not as_built_in and type(value) not in _BUILT_IN and _is_derived(type(value)):
            return self.derived(value, depth)
        if isinstance(value, str):
            return _quote(value)
        if value is None or value is True or value is False:
            return "null" if value is None else "true" if value else "false"
        if isinstance(value, int):
            # Python refuses decimal text above a limit that may be set as low as 640 digits; 2048 bits have 617.
            return int.__repr__(value) if value.bit_length() <= 2048 else hex(value)
        if isinstance(value, float):
            return float.__repr__(value)
        _check_depth(depth)
        if isinstance(value, (list, tuple)):
            return f"[{','.join([self.encode(member, depth + 1) for member in value])}]"
        if isinstance(value, dict):
            return self._mapping(value, depth)
        return self._object(bytes(value) if isinstance(value, (bytearray, memoryview)) else value, depth)

    def derived(self, value: Any, depth: int) -> str:
        """Write a value of a class derived from a built-in one: as such."""
        return self.encode(value, depth, as_built_in=True)

    def other(self, value: object, depth: int, refusal: Exception) -> str:
        """Write what kombu's JSON cannot carry, or raise TypeError."""
        raise TypeError(
            f"Expected a value that kombu's JSON can carry, or a set, got {_name(type(value))} ({refusal}): "
            "pass its id, give the class a __json__ method, or register it with kombu.utils.json.register_type"
        ) from refusal

    def other_mapping(self, value: dict[Any, Any], depth: int, refusal: TypeError) -> str:
        """Write a mapping with a key that JSON cannot write, or raise TypeError."""
        raise refusal

    def _mapping(self, value: dict[Any, Any], depth: int) -> str:
        try:
            # Where 1 and "1" are both keys, JSON keeps the last.
            members = {_quote(_name_of_member(name)): member for name, member in value.items()}
        except TypeError as refusal:
            return self.other_mapping(value, depth, refusal)
        if members.keys() == _MARKED:
            read = _read_by_kombu(value)
            if read is not value:
                return self.encode(read, depth + 1)
        return f"{{{','.join([f'{name}:{self.encode(members[name], depth + 1)}' for name in sorted(members)])}}}"

    def _object(self, value: object, depth: int) -> str:
        try:
            reduced, refusal = serialization.reduce(value), None
        except Exception as exc:  # noqa: BLE001 - __json__ is the user's code
            reduced, refusal = None, exc
        if refusal is None and not (isinstance(reduced, dict) and reduced.keys() == {"__type__", "__value__"}):
            return self.encode(reduced, depth + 1)
        for type_, tag, text_of in _OWN_FORMS:
            if isinstance(value, type_):
                return tag + _quote(text_of(value))
        if isinstance(value, (set, frozenset)):
            return f"set[{','.join(sorted([self.encode(member, depth + 1) for member in value]))}]"
        if refusal is not None:
            return self.other(value, depth, refusal)
        read = _read_by_kombu(reduced)
        if type(read) is type(value):
            return f"type({_quote(str(reduced['__type__']))},{self.encode(reduced['__value__'], depth + 1)})"
        return self.encode(read, depth + 1)


class _Comparison(_Form):
    """Write canonical forms of one argument, by value whatever it is.

    An object's form holds the digest of what is in it, and is made once: objects that refer to each other may be
    reached on more ways than could ever be written down.
    """

    by_value = True

    def __init__(self) -> None:
        # With each object, so that no other one gets its id; "" while it is being written.
        self._written: dict[int, tuple[object, str]] = {}

    def other_mapping(self, value: dict[Any, Any], depth: int, refusal: TypeError) -> str:
        return f"map{self._pairs(value.items(), depth)}"

    def other(self, value: object, depth: int, refusal: Exception) -> str:
        cls = type(value)
        if isinstance(value, Enum):
            if value._name_ in type(value).__members__:
                return f"enum({_quote(_name(cls))},{_quote(value._name_)})"
            return self._whole(value, [value._value_], depth)  # flags that have no name together
        if isinstance(value, PurePath):
            # Its module and its reduced form depend on the version of Python.
            name = f"pathlib.{cls.__qualname__}" if cls.__module__.startswith("pathlib.") else _name(cls)
            form = f"path({_quote(name)},{_quote(str(value))})"
            added = _attributes(value) if _is_of_users(cls) else None
            return self._whole(value, [form, added], depth) if added else form
        if isinstance(value, Fraction) and cls is Fraction:  # so does its reduced form
            return self._whole(value, [value.numerator, value.denominator], depth)
        if isinstance(value, (type, FunctionType)):
            return _global(value)
        if isinstance(value, Iterator):
            raise TypeError(f"What is in {_name(cls)} is not known before it is read")
        return self._whole(value, None, depth)

    def derived(self, value: Any, depth: int) -> str:
        """Write a value of a class derived from a built-in one: as such, unless it has attributes beside."""
        form = super().derived(value, depth)
        added = _attributes(value)
        if not added:
            return form
        _check_depth(depth)
        base = next(base for base in type(value).__mro__ if base in _BUILT_IN)
        if not _is_of_users(_reducing(type(value))):  # and so may leave out the attributes
            return self._whole(value, [form, added], depth)
        reduced = _reduced(value)
        # What is beside it is nothing that pickle would keep, as the app that a signature of Celery's refers to.
        is_pair = isinstance(reduced, tuple) and len(reduced) == 2
        args: tuple[Any, ...] = reduced[1] if is_pair else ()
        is_plain = len(args) == 1 and type(args[0]) is base and self.encode(args[0], depth + 1) == form
        return form if is_plain else self._whole(value, None, depth)

    def _whole(self, value: object, content: list[Any] | None, depth: int) -> str:
        """Write an object as its class and the digest of what is in it."""
        _check_depth(depth)
        known = self._written.get(id(value))
        if known is None:
            self._written[id(value)] = (value, "")
            text = self._content(value, depth + 1) if content is None else self.encode(content, depth + 1)
            form = f"object({_quote(_name(type(value)))},{sha256(text.encode('ascii')).hexdigest()})"
            known = self._written[id(value)] = (value, form)
        if not known[1]:
            raise TypeError(f"What is in {_name(type(value))} contains itself")
        return known[1]

    def _content(self, value: object, depth: int) -> str:
        fields = _fields(value)
        if fields is not None:
            return f"fields{self._pairs(fields.items(), depth)}"
        reduced = _reduced(value)
        if isinstance(reduced, str):  # the name of something that there is once
            return f"name({_quote(reduced)})"
        make, args, state, items, pairs, *more = (*reduced, None, None, None, None)[:6]
        if state is None and _is_of_users(type(value)) and not _is_of_users(_reducing(type(value))):
            state = _attributes(value)  # of which a class of Python's own knows nothing
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # attributes and slots
            state = (_without_cached(value, state[0]), state[1])
        elif isinstance(state, dict):
            state = _without_relations(value, _without_cached(value, state))
        added = _beside_fields(value)
        if added:
            state = [state, added]
        parts = [self._part_of(value, part, depth) for part in (make, *args)]
        parts += [self.encode(part, depth) for part in (state, list(items or ()), *more)]
        return f"{','.join(parts)},{self._pairs(pairs or (), depth)}"

    def _part_of(self, value: object, part: object, depth: int) -> str:
        return "class" if part is type(value) else self.encode(part, depth)

    def _pairs(self, pairs: Iterable[tuple[object, object]], depth: int) -> str:
        written = [f"[{self.encode(key, depth + 1)},{self.encode(value, depth + 1)}]" for key, value in pairs]
        return f"[{','.join(sorted(written))}]"


_strict = _Form()


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise TypeError(f"Nested more than {MAX_DEPTH} levels deep, or contains itself: pass an id or a flatter value")


def has_fields(value: object) -> bool:
    """Return whether a value is of a dataclass, or of a class of attrs or Pydantic, or of one derived from such."""
    declared = hasattr(type(value), "__dataclass_fields__") or hasattr(type(value), "__attrs_attrs__")
    return not isinstance(value, type) and (declared or _fields(value) is not None)


def _fields(value: object) -> dict[str, object] | None:
    """Return what is in the fields of a value, None where its class declares none."""
    cls = type(value)
    found: Any = None
    if "__dataclass_fields__" in vars(cls):  # and not of a class above it, whose fields need not be all
        found = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
    elif "__attrs_attrs__" in vars(cls):
        found = [attribute.name for attribute in vars(cls)["__attrs_attrs__"]]
    elif hasattr(cls, "__pydantic_fields_set__") or hasattr(cls, "__fields_set__"):  # Pydantic 2, and 1
        # Not model_dump() itself, which leaves out excluded fields, and those that a class adds to that of its field.
        return {**_without_cached(value, vars(value)), **(getattr(value, "__pydantic_extra__", None) or {})}
    return None if found is None else {name: getattr(value, name) for name in found if hasattr(value, name)}


def _beside_fields(value: object) -> dict[str, object]:
    """Return what a class adds to one whose state, as attrs or dataclasses wrote it, is its fields alone."""
    written = vars(_reducing(type(value))).get("__getstate__")
    if getattr(written, "__module__", None) not in ("attr._make", "dataclasses"):
        return {}
    return _without_cached(value, getattr(value, "__dict__", {}))


def _is_derived(cls: type) -> bool:
    return issubclass(cls, _DERIVED_FROM) and not issubclass(cls, Enum)


def _is_of_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names


def _attributes(value: object) -> dict[str, object]:
    """Return what a value of a class derived from one of Python's own has beside that."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in filter(_is_of_users, type(value).__mro__):
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            spelled = f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, spelled):
                found[spelled] = getattr(value, spelled)
    return _without_cached(value, found)


def _without_cached(value: object, attributes: dict[Any, Any]) -> dict[Any, Any]:
    """Leave out what a cached property keeps, which follows from the rest and may not have been computed yet."""
    return {name: kept for name, kept in attributes.items() if not _is_cached(type(value), name)}


def _without_relations(value: object, attributes: dict[Any, Any]) -> dict[Any, Any]:
    """Leave out the other objects that a model instance of Django has read, which its own columns refer to."""
    state: Any = attributes.get("_state")
    if not (hasattr(getattr(type(value), "_meta", None), "concrete_fields") and hasattr(state, "fields_cache")):
        return attributes
    state = copy.copy(state)
    state.fields_cache = {}
    kept = {name: kept for name, kept in attributes.items() if name != "_prefetched_objects_cache"}
    return {**kept, "_state": state}


def _is_cached(cls: type, name: object) -> bool:
    found = inspect.getattr_static(cls, name, None) if isinstance(name, str) else None
    return any(base.__name__ == "cached_property" for base in type(found).__mro__)  # Django has its own, and so on


def _reducing(cls: type) -> type:
    """Return the class that declares to what pickle reduces the values of a class."""
    return next(base for base in cls.__mro__ if not _REDUCERS.isdisjoint(vars(base)))


def _reduced(value: object) -> Any:
    """Return what pickle would keep of a value."""
    try:
        registered = copyreg.dispatch_table.get(type(value))
        return registered(value) if registered is not None else value.__reduce_ex__(4)
    except Exception as exc:
        raise TypeError(f"What is in {_name(type(value))} cannot be read ({exc})") from exc


def _global(value: Any) -> str:
    """Write a function or a class as the name by which other processes find it."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not value:
        raise TypeError(f"{_name(value)} is no name by which another process would find it")
    return f"name({_quote(_name(value))})"


def _name_of_member(name: object) -> str:
    if isinstance(name, str):
        return name
    with suppress(ValueError):  # more digits than Python writes, and so than JSON carries
        if name is None or isinstance(name, (int, float)):
            return json.dumps(name)
    raise TypeError(f"Expected text or a number of less than 4300 digits as mapping key, got {_name(type(name))}")


def _read_by_kombu(marked: dict[Any, Any]) -> object:
    with suppress(Exception):  # the decoders of registered types are the user's code
        return serialization.from_json(serialization.to_json(marked))
    return marked  # a mapping that only other serializers deliver


def _argument(name: str, arguments: Mapping[str, object]) -> object:
    if name not in arguments:
        raise MissingKey(f"Expected an argument {name!r} to make the key of, got {sorted(arguments)}: pass it")
    value = arguments[name]
    if type(value) is not str or not value:
        _usable(value, f"the argument {name!r}, of which the key is made,")
    return value


def _call(source: Callable[..., object], arguments: Mapping[str, object], what: str) -> object:
    try:
        wanted = _wanted(source) if getattr(source, "__hash__", None) else _wanted.__wrapped__(source)
        key = source(**{name: arguments[name] for name in arguments if wanted is None or name in wanted})
    except Exception as exc:
        got = f"{type(exc).__name__}: {exc}. Fix it; it gets what it names of the arguments {sorted(arguments)}"
        raise MissingKey(f"Expected the {what} callable {_name(source)} to return a {what}, got {got}") from exc
    returned = f"what the {what} callable {_name(source)} returns"
    encoded = _usable(key, returned)
    if " at 0x" in encoded and (found := find_address(encoded)) and found[1] not in _text_of(arguments):
        raise MissingKey(
            f"Expected {returned} to be the same in every process, got {found[0]}, the address of an object in this "
            "one. Return its id instead, or give its class a __str__"
        )
    return key


def _text_of(arguments: Mapping[str, object]) -> str:
    """Return the text in which a message has these arguments; "" where none could."""
    try:
        return _strict.encode(dict(arguments), 0)
    except TypeError:
        return ""


@lru_cache(maxsize=1024)
def _wanted(source: Callable[..., object]) -> set[str] | None:
    """Return the names of the keywords that a callable takes, None if it takes any or has no signature."""
    try:
        parameters = own_signature(source).parameters.values()
    except (TypeError, ValueError):
        return None
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else names


def _usable(value: object, what: str) -> str:
    try:
        encoded = _strict.encode(value, 0)
    except TypeError as exc:
        raise MissingKey(f"Expected {what} to be text, a number or a sequence of them. {exc}") from exc
    if encoded == '""' or (encoded[0] != '"' and _EMPTY(encoded)):
        raise MissingKey(f"Expected {what} to name the operation, got {value!r}: pass a value that is not empty")
    return encoded


def digest(value: object, what: str) -> str:
    """Return the SHA-256 of a value's canonical form, in hex.

    Arguments:
        value: The value.
        what: What errors call it.

    Raises:
        MissingKey: it is empty or has no canonical form.
    """
    return sha256(_usable(value, what).encode("ascii")).hexdigest()


def _part(value: object, what: str) -> str:
    if type(value) is str and value and value.isascii():  # which its canonical form spells as it is
        part = _escape(value)
    else:
        encoded = _usable(value, what)
        part = _escape(json.loads(encoded)) if encoded[0] == '"' else "~" + _escape(encoded)
    return part if len(part) <= MAX_PART else f"~~{digest(value, what)}"


def _escape(text: str) -> str:
    if _NEEDS_NO_ESCAPE(text):
        return text
    return quote(text, safe=_SAFE, errors="surrogatepass").replace("~", "%7E")  # quote never escapes a tilde


def module_of(thing: object) -> str:
    """Return the name of a thing's module; that of a script is one in all its processes.

    Those that multiprocessing has started otherwise than by a fork call it ``__mp_main__``.
    """
    module = getattr(thing, "__module__", None) or "?"
    return "__main__" if module == "__mp_main__" else str(module)


def class_name(thing: object) -> str:
    """Return the name of a class, or of that of an object."""
    return _name(thing if isinstance(thing, type) else type(thing))


def _name(thing: object) -> str:
    return f"{module_of(thing)}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
