"""The application of the tests on Quart."""

from __future__ import annotations

import asyncio

from quart import Quart, Response, request

from celery_idempotent.http import IdempotencyMiddleware
from tests.support.http import views
from tests.support.http.asgi_app import account

app = Quart(__name__)


@app.route("/<path:path>", methods=["GET", "POST", "PATCH", "PUT", "DELETE"])
async def serve(path: str) -> Response:
    """Answer any request."""
    query, body = request.args.to_dict(), await request.get_data()
    found = await asyncio.to_thread(views.respond, request.method, f"/{path}", query, body)
    response = Response(found.parts if "stream" in query else b"".join(found.parts), found.status)
    del response.headers["content-type"]
    response.headers.extend(found.headers)
    return response


app.asgi_app = IdempotencyMiddleware(app.asgi_app, **{**views.options(), "scope": account})
