"""Arguments -> canonical form -> key and fingerprint.

The canonical form of a value is an ASCII text. It is *injective*, as a text can be read back in one way only: numbers
(floats always show a point, an exponent or a letter, and no x as huge integers do), strings with JSON's quotes and
escapes, ``null true false [value,..] {"name":value,..} set[..] bytes".." decimal".." uuid".." datetime".." date".."
time".."``, and ``type("marker",value)`` for other types registered with kombu. Mappings and sets are sorted.

It is *unchanged by the trip through the broker*: the same before kombu's JSON wrote a value and after it was read. So a
tuple is a list; a mapping key is the string JSON makes of it; an enum of str or int is its value; surrogates are the
character they spell; ``__json__`` is obeyed; a mapping that kombu would read as bytes, a Decimal, .. is one.
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from json.encoder import encode_basestring_ascii as _quote
from typing import Any
from urllib.parse import quote
from uuid import UUID

from kombu.utils import json as kombu_json

from .errors import MissingKey

__all__ = ["KeySource", "bind", "canonical", "compose", "compose_default", "fingerprint", "resolve"]
KeySource = str | Sequence[str] | Callable[..., object] | None

MAX_DEPTH, MAX_PART = 100, 128  # the depth is far below Python's own limit, which depends on version and caller
_MARKED = {'"__type__"', '"__value__"'}
_EMPTY = {"null", '""', "[]", "{}", "set[]", 'bytes""'}
_SAFE = "".join(set(string.punctuation) - set("%:~"))
_NEEDS_NO_ESCAPE = re.compile(r"[!-$&-9;-}]*").fullmatch
_to_kombu: Callable[[object], Any] = kombu_json.JSONEncoder().default
_dumps: Callable[[object], str] = kombu_json.dumps
_loads: Callable[[str], object] = kombu_json.loads
# datetime stands before date, which it derives from. Decimal writes "e" or "E" as the caller's context says.
_OWN_FORMS: tuple[tuple[type, str, Callable[[Any], str]], ...] = (
    (bytes, "bytes", lambda value: value.decode("latin-1")),
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (Decimal, "decimal", lambda value: Decimal.__str__(value).replace("e", "E")),
    (UUID, "uuid", UUID.__str__),
)


def canonical(value: object) -> str:
    """Write a value as the one text that stands for it, before and after its trip through the broker.

    Returns ASCII text, whatever the serializer, the version of Python and PYTHONHASHSEED. Raises TypeError for a type
    that kombu's JSON cannot carry (sets excepted), and for what is nested above 100 levels or contains itself.
    """
    return _encode(value, 0)


def fingerprint(arguments: Mapping[str, object], *, leave_out: Collection[str] = ()) -> str:
    """Digest the arguments of a call, so that another call under the same key can be compared with it.

    ``arguments`` are what `bind` returns; those named in ``leave_out`` (default: none) may differ. An argument that
    `canonical` refuses, which only pickle can deliver, counts by its type alone. Returns 32 hex digits of SHA-256.
    """
    members = []
    for name in sorted(arguments.keys() - leave_out):
        try:
            members.append(f"{_quote(name)}:{_encode(arguments[name], 0)}")
        except TypeError:
            members.append(f"{_quote(name)}:<{_name(type(arguments[name]))}>")
    return sha256(f"{{{','.join(members)}}}".encode()).hexdigest()[:32]


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object]:
    """Name the arguments of a call, so that positional, keyword and default spell the same.

    ``*args`` stand under their parameter's name; what ``**kwargs`` collects stands beside the named parameters, or in a
    mapping under ``**`` where it would clash (``f(*args, **kwargs)`` called with ``args=``). Returns name -> value.
    Raises the TypeError that the call itself would raise.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, object] = dict(bound.arguments)
    collected: dict[str, object] = {}
    for name in [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]:
        collected = bound.arguments[name]
        del named[name]
    clashing = {name: value for name, value in collected.items() if name in named or name == "**"}
    return {**collected, **named, "**": clashing} if clashing else {**collected, **named}


def resolve(source: str | Sequence[str] | Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Take the key of an operation from its arguments.

    ``source`` is the name of an argument; a sequence of names, which gives the tuple of their values; or a callable,
    which gets those of ``arguments`` that its signature names, as keywords, or all of them if it takes ``**kwargs``.
    Raises MissingKey if an argument is missing, if the callable raises, or for None, "" and what cannot be a key.
    """
    if isinstance(source, str):
        return _argument(source, arguments)
    if callable(source):
        return _call(source, arguments)
    return tuple([_argument(name, arguments) for name in source])


def compose(namespace: str, task: str, *, key: object, scope: object | None = None) -> str:
    """Write the name under which a store remembers an operation whose key was given.

    Returns ``namespace:task:scope:key``. Text stands as it is, percent-escaped; any other value as ``~`` and its
    canonical form; a part above 128 characters as ``~~`` and the SHA-256 of that form. Without ``scope`` (None, the
    default) that part is empty. Raises MissingKey for a key or scope that is empty or has no canonical form.
    """
    tenant = "" if scope is None else _part(scope, "the scope")
    return f"{_escape(namespace)}:{_escape(task)}:{tenant}:{_part(key, 'the key')}"


def compose_default(namespace: str, task: str, task_id: str) -> str:
    """Write the name under which a store remembers an operation whose key is its task id.

    Returns ``namespace:task:task_id``: three parts, which no given key has. Raises MissingKey for an empty id.
    """
    return f"{_escape(namespace)}:{_escape(task)}:{_part(task_id, 'the task id')}"


def placed(key: str, place: str) -> str:
    """Write the name of an operation that is one at each place, ``key:~@place``; the key itself where it has none."""
    return f"{key}:~@{_part(place, 'the place')}" if place else key


def _encode(value: object, depth: int) -> str:
    if isinstance(value, str):
        return _quote(value)
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int):
        # Python refuses decimal text above a limit that may be set as low as 640 digits; 2048 bits have 617.
        return int.__repr__(value) if value.bit_length() <= 2048 else hex(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if depth >= MAX_DEPTH:
        raise TypeError(f"Nested more than {MAX_DEPTH} levels deep, or contains itself: pass an id or a flatter value")
    if isinstance(value, (list, tuple)):
        return f"[{','.join([_encode(member, depth + 1) for member in value])}]"
    if isinstance(value, dict):
        return _encode_mapping(value, depth)
    return _encode_object(bytes(value) if isinstance(value, (bytearray, memoryview)) else value, depth)


def _encode_mapping(value: dict[Any, Any], depth: int) -> str:
    # Where 1 and "1" are both keys, JSON keeps the last.
    members = {_quote(_name_of_member(name)): member for name, member in value.items()}
    if members.keys() == _MARKED:
        read = _read_by_kombu(value)
        if read is not value:
            return _encode(read, depth + 1)
    return f"{{{','.join([f'{name}:{_encode(members[name], depth + 1)}' for name in sorted(members)])}}}"


def _name_of_member(name: object) -> str:
    if isinstance(name, str):
        return name
    with suppress(ValueError):  # more digits than Python writes, and so than JSON carries
        if name is None or isinstance(name, (int, float)):
            return json.dumps(name)
    raise TypeError(f"Expected text or a number of less than 4300 digits as mapping key, got {_name(type(name))}")


def _encode_object(value: object, depth: int) -> str:
    try:
        reduced, refusal = _to_kombu(value), None
    except Exception as exc:  # noqa: BLE001 - __json__ is the user's code
        reduced, refusal = None, exc
    if refusal is None and not (isinstance(reduced, dict) and reduced.keys() == {"__type__", "__value__"}):
        return _encode(reduced, depth + 1)
    for type_, tag, text_of in _OWN_FORMS:
        if isinstance(value, type_):
            return tag + _quote(text_of(value))
    if isinstance(value, (set, frozenset)):
        return f"set[{','.join(sorted([_encode(member, depth + 1) for member in value]))}]"
    if refusal is not None:
        raise TypeError(
            f"Expected a value that kombu's JSON can carry, or a set, got {_name(type(value))} ({refusal}): "
            "pass its id, give the class a __json__ method, or register it with kombu.utils.json.register_type"
        ) from refusal
    read = _read_by_kombu(reduced)
    if type(read) is type(value):
        return f"type({_quote(str(reduced['__type__']))},{_encode(reduced['__value__'], depth + 1)})"
    return _encode(read, depth + 1)


def _read_by_kombu(marked: dict[Any, Any]) -> object:
    with suppress(Exception):  # the decoders of registered types are the user's code
        return _loads(_dumps(marked))
    return marked  # a mapping that only other serializers deliver


def _argument(name: str, arguments: Mapping[str, object]) -> object:
    if name not in arguments:
        raise MissingKey(f"Expected an argument {name!r} to make the key of, got {sorted(arguments)}: pass it")
    _usable(arguments[name], f"the argument {name!r}, of which the key is made,")
    return arguments[name]


def _call(source: Callable[..., object], arguments: Mapping[str, object]) -> object:
    try:
        wanted = _wanted(source) if getattr(source, "__hash__", None) else _wanted.__wrapped__(source)
        key = source(**{name: arguments[name] for name in arguments if wanted is None or name in wanted})
    except Exception as exc:
        got = f"{type(exc).__name__}: {exc}. It is given those it names of the arguments {sorted(arguments)}"
        raise MissingKey(f"Expected the key callable {_name(source)} to return a key, got {got}") from exc
    _usable(key, f"what the key callable {_name(source)} returns")
    return key


@lru_cache(maxsize=1024)
def _wanted(source: Callable[..., object]) -> set[str] | None:
    """Return the names of the keywords that a callable takes, None if it takes any or does not tell."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return None
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else names


def _usable(value: object, what: str) -> str:
    try:
        encoded = _encode(value, 0)
    except TypeError as exc:
        raise MissingKey(f"Expected {what} to be text, a number or a sequence of them. {exc}") from exc
    if encoded in _EMPTY:
        raise MissingKey(f"Expected {what} to name the operation, got {value!r}: pass a value that is not empty")
    return encoded


def _part(value: object, what: str) -> str:
    encoded = _usable(value, what)
    part = _escape(json.loads(encoded)) if encoded[0] == '"' else "~" + _escape(encoded)
    return part if len(part) <= MAX_PART else f"~~{sha256(encoded.encode('ascii')).hexdigest()}"


def _escape(text: str) -> str:
    if _NEEDS_NO_ESCAPE(text):
        return text
    return quote(text, safe=_SAFE, errors="surrogatepass").replace("~", "%7E")  # quote never escapes a tilde


def _name(thing: object) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
