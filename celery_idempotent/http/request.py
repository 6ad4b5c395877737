"""Requests: the key that a header has, and the fingerprint that requests with the same key must share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, cast

from ..core import keys
from ..errors import ConfigurationError, MissingKey
from .problems import malformed

#: Characters of the longest key.
LONGEST_KEY = 255
#: Digits of the longest length that is one; Python reads no number of thousands of them.
DIGITS = 20
#: JSON that is nested more deeply is compared by its bytes.
DEEP = 100
#: Seconds for which the rest of a body is read that no application reads, and bytes of it at once.
REST, PART = 5.0, 65536

_BARE = re.compile(r"[!#-+\--~][!-+\--~]*")
# RFC 8941: a string, and parameters, which are ignored. It reads each blank in one way only: in two, a header of a
# hundred bytes would keep its server busy for years.
_STRING = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"[ \t]*(?:;[ \t]*[a-z*][a-z0-9_.*-]*(?:=[^;,]*|[ \t]*))*')
_VISIBLE = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Request:
    """What is read of a request before its application is called.

    Arguments:
        method: In upper case.
        path: As it was sent, from the server's root on, percent-escaped.
        query: As it was sent.
        headers: Names in lower case and values, as they were sent.
        native: What its framework has; given to the callables of the options.
    """

    method: str
    path: bytes
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    native: Any

    def values(self, name: str) -> list[bytes]:
        """Return the values of all headers with this name."""
        wanted = name.lower().encode()
        return [value for each, value in self.headers if each == wanted]

    def value(self, name: str) -> str:
        """Return the values of a header, joined as one."""
        return b",".join(self.values(name)).decode("latin-1")

    @property
    def length(self) -> int | None:
        """The bytes of its body, where they were announced."""
        text = self.value("content-length")
        return int(text) if text.isdecimal() and text.isascii() and len(text) <= DIGITS else None

    @property
    def is_coming(self) -> bool:
        """Whether its body comes unasked, also where its answer is known before that."""
        return self.value("expect").strip().lower() != "100-continue"


def read_key(header: str, values: list[bytes]) -> str | None:
    """Return the key in the values of a header, None if there is none.

    It stands bare, or as a string between quotation marks (RFC 8941, as the IETF's draft has it); both are one key.

    Raises:
        Problem: it is empty, malformed or too long, or there are two.
    """
    if not values:
        return None
    if len(values) > 1:
        raise malformed(header, f"{len(values)} fields")
    text = values[0].decode("latin-1").strip(" \t")
    quoted = _STRING.fullmatch(text)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else text if _BARE.fullmatch(text) else ""
    if not _VISIBLE.fullmatch(key):
        raise malformed(header, "an empty one" if not text else ascii(text[:80]))
    if len(key) > LONGEST_KEY:
        raise malformed(header, f"{len(key)} characters")
    return key


Comparison = str | Callable[[Any, bytes], object]


def fingerprints(
    request: Request, body: bytes, compare: Comparison, names: Iterable[str]
) -> tuple[str, Callable[[], str]]:
    """Return the digest of what requests with the same key must share, and a function that returns its twin.

    The twin is of the path with or without a last slash: frameworks redirect from one to the other, and a client that
    follows sends its request to both.

    Arguments:
        request: The request.
        body: Its body; empty where ``compare`` is "headers".
        compare: "bytes", "json" (by value), "headers" (not the body), or a callable over the framework's request and
            the body.
        names: Headers that count beside the content type.

    Raises:
        ConfigurationError: the callable returned what cannot be compared.
    """
    kind, boundary = _content_type(request.value("content-type"))
    parts = [request.query, kind.encode("latin-1")]
    parts += [f"{name.lower()}:{request.value(name)}".encode("latin-1") for name in names]
    if callable(compare):
        parts.append(_form_of(compare(request.native, body)))
    elif compare == "headers":
        # That of a multipart body is no longer the same where a client draws boundaries of several lengths.
        parts.append(b"" if boundary else request.value("content-length").encode("latin-1"))
    else:
        parts += _content(request, body, boundary, by_value=compare == "json")
    path, method = request.path, request.method.encode()
    other = path[:-1] if path.endswith(b"/") else path + b"/"
    return _digest(method, path, *parts), partial(_digest, method, other, *parts)


def _digest(*parts: bytes) -> str:
    digest = sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def _form_of(value: object) -> bytes:
    """Return the same bytes for equal values, in every process: not all have a `repr` that shows that."""
    if _is_plain(value):
        return repr(value).encode("utf-8", "surrogatepass")
    try:
        return b"value:" + keys.fingerprint({"fingerprint": value}).encode()
    except MissingKey as error:
        raise ConfigurationError(
            f"fingerprint: expected a callable that returns text, bytes or plain data, got a {type(value).__name__}, "
            "which cannot be compared with what another process makes of an equal request: return what is in it"
        ) from error


_PLAIN = (str, bytes, int, float, bool, type(None))


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, cast(Iterable[object], value)))
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return type(value) in _PLAIN


def _content_type(text: str) -> tuple[str, str]:
    """Return a content type without the boundary of a multipart body, which each try draws, and that boundary."""
    boundary = re.search(r';\s*boundary=(?:"([^"]*)"|([^\s;]+))', text, re.IGNORECASE)
    if not text.lower().lstrip().startswith("multipart/") or boundary is None:
        return text.strip(), ""
    return (text[: boundary.start()] + text[boundary.end() :]).strip(), boundary[1] or boundary[2]


def _content(request: Request, body: bytes, boundary: str, *, by_value: bool) -> list[bytes]:
    if boundary:
        return body.split(b"--" + boundary.encode("latin-1"))
    if request.value("content-encoding").strip().lower() in ("gzip", "x-gzip") and body[:2] == b"\x1f\x8b":
        return [body[:4], body[8:]]  # RFC 1952: between them is when it was compressed
    if by_value and (form := _json_form(body)) is not None:
        return [b"json", form]
    return [b"bytes", body]


def _json_form(body: bytes) -> bytes | None:
    """Return the same bytes for JSON of equal value; None for what is to be compared by its bytes."""
    try:
        value = json.loads(body, object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)
        if _depth(value) > DEEP:
            return None
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice, of which one server reads the first and another the last")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _number(text: str) -> Any:
    number = float(text)
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    if repr(number) != text:
        raise ValueError("a float has fewer digits than were sent")
    return number


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while nested := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
    return depth
