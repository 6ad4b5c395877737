"""Responses: which are remembered, what of them a record has, and how they are replayed."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import BaseCookie
from typing import Any
from urllib.parse import quote

from ..errors import ConfigurationError, RecordUnreadable

Headers = Iterable[tuple[bytes, bytes]]

#: Seconds after the first part of a response from which on its parts are passed on as they come.
PATIENCE = 1.0
#: Refusals after which the same request may be granted, for it was refused unseen or too early.
COME_AGAIN = {401, 403, 407, 408, 409, 421, 423, 425, 429}
#: Redirections after which the same request is sent elsewhere, which may be to the same application.
ELSEWHERE = {307, 308}
#: Refusals that nothing was done for, and after which the client sends something else.
UNSEEN = {400, 405, 406, 411, 413, 414, 415, 417, 422, 426, 428, 431}
#: Headers of one response and of no replay: of the connection, of its time, of its caller's session.
NOT_KEPT = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
NOT_KEPT |= {b"age", b"content-length", b"date", b"server", b"server-timing", b"set-cookie", b"x-request-id"}
#: How the names of others begin.
NOT_KEPT_BEGIN = (b"ratelimit", b"x-ratelimit-")
#: Statuses whose responses have no content, and no Content-Length.
EMPTY = {204, 304}

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[^\x00\r\n]*")


@dataclass(frozen=True)
class Response:
    """A response: its status, its headers as they were sent, and its body."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    #: whether it answers a request that was carried out before
    replayed: bool = field(default=False, compare=False)

    def header(self, name: str) -> str | None:
        """Return the first value of a header, None if it has none."""
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for each, value in self.headers if each.lower() == wanted), None)

    @property
    def is_stream(self) -> bool:
        """Whether its client reads it as it comes."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower() == "text/event-stream"

    def sent(self) -> list[tuple[bytes, bytes]]:
        """Return its headers as a server gets them."""
        headers = list(self.headers)
        if self.status not in EMPTY and self.header("content-length") is None:
            headers.append((b"content-length", b"%d" % len(self.body)))
        return [*headers, (b"idempotent-replayed", b"true")] if self.replayed else headers


def is_remembered(status: int) -> bool:
    """Return whether a response with this status is the end of its operation, unless the option ``remember`` has it."""
    return status < 500 and status not in {304, *ELSEWHERE, *COME_AGAIN, *UNSEEN}


def as_response(value: object) -> Response:
    """Return a framework's response, or ``(status, headers, body)``, as a `Response`.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(value, Response):
        return value
    if isinstance(value, tuple) and len(value) == 3:
        status, headers, body = value
    elif not getattr(value, "is_rendered", True):  # by Django's templates or Django REST framework
        raise unfit_response(value, "it is not rendered yet", _RENDER)
    else:
        status = getattr(value, "status_code", None)
        headers = getattr(value, "raw_headers", None) or getattr(value, "headers", None)
        body = _body_of(value)
    if not isinstance(status, int) or headers is None or not isinstance(body, (bytes, str)):
        raise unfit_response(value)
    pairs = headers.items() if isinstance(headers, Mapping) or hasattr(headers, "items") else headers
    content = body.encode() if isinstance(body, str) else body
    try:
        found = tuple((_bytes(name), _bytes(text)) for name, text in pairs)
        return Response(status, (*found, *cookies_of(value)), content)
    except (TypeError, ValueError) as error:
        raise unfit_response(value, error) from error


def cookies_of(response: object) -> list[tuple[bytes, bytes]]:
    """Return the headers of the cookies that a response of Django has apart from its headers."""
    cookies = getattr(response, "cookies", None)
    found = cookies.values() if isinstance(cookies, BaseCookie) else ()
    return [(b"set-cookie", each.OutputString().encode("latin-1")) for each in found]


_MAKE = "Make the response first, as by jsonify(), JSONResponse() or JsonResponse()."
_RENDER = (
    "Render it first: response.render(), in a view of Django REST framework "
    "self.finalize_response(request, response).render()."
)


def unfit_response(value: object, why: object = "", cure: str = _MAKE) -> ConfigurationError:
    """Return the error for what is to be sent, and is no response."""
    got = f"({', '.join(type(part).__name__ for part in value)})" if isinstance(value, tuple) else type(value).__name__
    return ConfigurationError(
        "Expected a response of your framework with its whole body, or (status, headers, body), got "
        f"{got}{f': {why}' if why else ''}. {cure}"
    )


def _body_of(value: Any) -> object:
    if hasattr(value, "get_data"):  # Werkzeug
        return value.get_data()
    if getattr(value, "streaming", False):  # Django
        return None
    return getattr(value, "content", None) if hasattr(value, "content") else getattr(value, "body", None)


def _bytes(text: object) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise TypeError(f"names and values of headers are text, got {type(text).__name__}")
    return text.encode("latin-1")


def poll_at(result: Any, location: object, retry_after: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return body and headers of a 202, as the frameworks' functions ``accepted`` are given it."""
    if hasattr(result, "save"):  # of a group: else no other process would find its members
        result.save()
    where = str(location).replace("{id}", quote(result.id, safe=""))
    headers = {"Location": where, "Cache-Control": "no-store"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return {"id": result.id, "location": where}, headers


def _is_header(name: bytes, text: bytes) -> bool:
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(text))


@dataclass(frozen=True)
class Recorder:
    """Write what a record keeps of a response, and read it back.

    Arguments:
        keep: Names of headers to keep that are not kept by default, in lower case.
        drop: Names of more headers that are not kept.
        largest: Bytes of the largest body that is kept.
    """

    keep: frozenset[bytes] = frozenset()
    drop: frozenset[bytes] = frozenset()
    largest: int = 262144

    def write(self, response: Response, *, fact: bool = False) -> dict[str, Any]:
        """Return the value to record; of a ``fact``, and of what is too large, without headers and body."""
        if fact or len(response.body) > self.largest:
            return {"status": response.status, "location": response.header("location")}
        # Without what is no header, which some servers send all the same: its record could not be read.
        found = (pair for pair in response.headers if self._is_kept(pair[0]) and _is_header(*pair))
        kept = [[name.decode("latin-1"), text.decode("latin-1")] for name, text in found]
        value: dict[str, Any] = {"status": response.status, "headers": kept}
        try:
            value["text"] = response.body.decode("utf-8")
        except UnicodeDecodeError:
            value["base64"] = base64.b64encode(response.body).decode("ascii")
        return value

    def read(self, value: Any) -> Response | None:
        """Return the response to replay; None if the record has but the fact.

        Raises:
            RecordUnreadable: it is no such value.
        """
        try:
            if isinstance(value, Mapping) and "headers" not in value:
                return None
            body = value["text"].encode() if "text" in value else base64.b64decode(value["base64"], validate=True)
            headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in value["headers"]]
            # A record may be changed by other programs that write to the store: it must not make headers of its own.
            for name, text in headers:
                if not _is_header(name, text):
                    raise ValueError(f"the header {name!r} is malformed")
            status = int(value["status"])
            if not 200 <= status <= 999:
                raise ValueError(f"the status {status!r:.10} is that of no response")
            return Response(status, [pair for pair in headers if self._is_kept(pair[0])], body, True)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise RecordUnreadable(
                f"Expected the record of a response, got {type(value).__name__} ({error}). Forget the key if another "
                "program wrote it."
            ) from error

    def _is_kept(self, name: bytes) -> bool:
        name = name.lower()
        if name in self.keep:
            return name != b"content-length"
        return name not in NOT_KEPT and name not in self.drop and not name.startswith(NOT_KEPT_BEGIN)
