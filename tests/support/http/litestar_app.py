"""The application of the tests on Litestar, whose own middlewares see no request without a route."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import HttpMethod, Litestar, Request, Response, route
from litestar.response import Stream

from celery_idempotent.http import IdempotencyMiddleware
from tests.support.http import views
from tests.support.http.asgi_app import account


@route("/{path:path}", http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.PATCH])
async def serve(request: Request[Any, Any, Any], path: str) -> Response[Any]:
    """Answer any request."""
    query, body = dict(request.query_params), await request.body()
    found = await asyncio.to_thread(views.respond, request.method, path, query, body)
    headers = dict(found.headers)
    kind = headers.pop("Content-Type")
    if "stream" in query:
        return Stream(found.parts, status_code=found.status, headers=headers, media_type=kind)
    return Response(b"".join(found.parts), status_code=found.status, headers=headers, media_type=kind)


app = IdempotencyMiddleware(Litestar([serve], openapi_config=None), **{**views.options(), "scope": account})
