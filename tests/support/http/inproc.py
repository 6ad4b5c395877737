"""Clients of applications within the test's own process."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from celery_idempotent.http import Response


def request_wsgi(app: Any, key: str | None = "k", body: bytes = b"body", **more: Any) -> Response:
    """Send a request to a WSGI application."""
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        **more,
    }
    if key is not None:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    started: list[Any] = []

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        started[:] = [int(status[:3]), tuple((n.lower().encode(), v.encode()) for n, v in headers)]

    parts = app(environ, start)
    try:
        content = b"".join(parts)
    finally:
        if hasattr(parts, "close"):
            parts.close()
    return Response(started[0], started[1], content)


async def request_asgi(app: Any, key: str | None = "k", body: bytes = b"body", **more: Any) -> Response:
    """Send a request to an ASGI application."""
    headers = [(b"idempotency-key", key.encode())] if key is not None else []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "query_string": b"",
        "headers": [*headers, *more.pop("headers", [])],
        **more,
    }
    sent: list[Any] = []
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not given:
            await asyncio.sleep(3600)
        return given.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Response(sent[0]["status"], tuple(sent[0]["headers"]), content)
