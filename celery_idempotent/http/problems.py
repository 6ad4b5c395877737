"""Problem details (RFC 9457): what a client is answered whose request was not, or not again, carried out."""

from __future__ import annotations

import json
from typing import Any

from ..core.guard import Busy
from ..errors import (
    Conflict,
    CrashLoop,
    KeyReused,
    RecordUnreadable,
    ResultUnavailable,
    SettleNotCommitted,
    StoreError,
)
from .response import Response

#: Seconds after which a client may come again, at least, and where the store is down.
SOON, LATER = 1, 5


class Problem(Exception):
    """The answer to a request that was refused.

    Arguments:
        slug: Its name, the end of its type.
        status: Of the response.
        title: The same for every problem of this type.
        detail: What is special about this one, and what to do.
        retry_after: Seconds after which the same request may be answered otherwise; None where it never is.
        more: Other members.
    """

    def __init__(
        self, slug: str, status: int, title: str, detail: str, *, retry_after: float | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.slug, self.status, self.title, self.detail = slug, status, title, detail
        self.retry_after, self.more = retry_after, more

    def response(self, docs_url: str | None) -> Response:
        """Return it as a response, whose type is a section of the page at ``docs_url``."""
        kind = f"{docs_url}#{self.slug}" if docs_url else f"urn:celery-idempotent:{self.slug}"
        body = {"type": kind, "title": self.title, "status": self.status, "detail": self.detail, **self.more}
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"cache-control", b"no-store"),
        ]
        if docs_url:
            headers.append((b"link", f'<{docs_url}>; rel="describedby"; type="text/html"'.encode()))
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(SOON, -(-self.retry_after // 1))))
        return Response(self.status, headers, json.dumps(body).encode())


def malformed(header: str, got: str) -> Problem:
    """Return the answer to a key that is none."""
    detail = (
        f"Expected one {header} of 1 to 255 visible ASCII characters, bare or between quotation marks, got {got}. "
        "Send one that is random, such as a UUID, and the same one again when you repeat the request."
    )
    return Problem("key-malformed", 400, "The idempotency key is malformed", detail)


def missing(header: str) -> Problem:
    """Return the answer to a request without a key that needs one."""
    detail = f"Expected the header {header}, got none. Send a random one, such as a UUID, with every new operation."
    return Problem("key-missing", 400, "The idempotency key is missing", detail)


def unknown_caller() -> Problem:
    """Return the answer to a request of which it is not known who makes it."""
    detail = "Expected a caller who is known, got none. Authenticate, and send the same key again."
    return Problem("caller-unknown", 401, "An idempotency key needs a caller", detail)


def cut_off() -> Problem:
    """Return the answer to a request whose body ended early; few clients are there to read it."""
    detail = "Expected as many bytes as Content-Length announces, got fewer. Nothing was done; send the request again."
    return Problem("body-incomplete", 400, "The body is incomplete", detail)


def too_large(most: int, by: str = "") -> Problem:
    """Return the answer to a request whose body is too large to be compared.

    Arguments:
        most: The bytes that it may have.
        by: What has that limit (default: an option of the middleware).
    """
    limit = f"at most {most:,} bytes with an idempotency key{f', by {by}' if by else ''}"
    detail = f"Expected {limit}, got more. Send less, or leave the key out."
    return Problem("body-too-large", 413, "The body is too large", detail)


def not_kept(key: str, status: int | None, location: str | None) -> Problem:
    """Return the answer to a repetition whose response was not kept."""
    more = {"key": key, "first_status": status, "location": location}
    detail = "The request was carried out, and its response is not kept. Read what it has made; do not repeat it."
    present: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    return Problem("not-kept", 409, "The response is not kept", detail, **present)


def in_progress(key: str, remaining: float) -> Problem:
    """Return the answer to a repetition of a request that is being carried out."""
    detail = "A request with this key is being carried out. Send it again, with the same key, after Retry-After."
    title = "The request is in progress"
    return Problem("in-progress", 409, title, detail, retry_after=min(remaining, SOON), key=key)


def unavailable() -> Problem:
    """Return the answer while the store cannot serve: nothing was done."""
    detail = "Whether this request was carried out before cannot be read now. Send it again, with the same key."
    return Problem("store-unavailable", 503, "Idempotency is not available", detail, retry_after=LATER)


def of_decision(key: str, busy: Busy) -> Problem:
    """Return the answer to a request that cannot be carried out now."""
    return unavailable() if busy.error is not None else in_progress(key, busy.remaining)


def of_error(key: str, error: Exception) -> Problem | None:
    """Return the answer for an error of this library; None for another one."""
    match error:
        case KeyReused():
            detail = "The key was used for another request: method, path, query, type or body differ. Make a new key."
            return Problem("key-reused", 422, "The idempotency key was used before", detail, key=key)
        case Conflict():
            return in_progress(key, error.remaining)
        case ResultUnavailable():
            return not_kept(key, None, None)
        case CrashLoop():
            detail = (
                "Carrying out this request has ended the server's process again and again, so it was not carried out "
                "this time. Sent again, it will be."
            )
            return Problem("crash-loop", 500, "The request cannot be carried out", detail, key=key)
        case SettleNotCommitted():
            detail = "That this request was carried out was not committed. Send it again, with the same key."
            return Problem("not-committed", 500, "The request was not carried out", detail, key=key)
        case RecordUnreadable():
            detail = "What is remembered of this request cannot be read. An operator has to look at it."
            return Problem("record-unreadable", 500, "The request cannot be answered", detail, key=key)
        case StoreError():
            return unavailable()
    return None
