"""A middleware as it is written by hand: look the key up, run, store the response. What it lacks is the comparison."""

from __future__ import annotations

import json
import os

from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from benchmarks.http_apps.shop import order

redis = Redis.from_url(os.environ["STORE_URL"])


class GetThenSet(BaseHTTPMiddleware):
    """GET, run, SET."""

    async def dispatch(self, request: Request, call_next) -> Response:  # type: ignore[no-untyped-def]
        """Answer a request from what is stored, or run it and store its response."""
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return await call_next(request)
        if (stored := await redis.get(f"idempotency:{key}")) is not None:
            found = json.loads(stored)
            return Response(found["body"], found["status"], found["headers"])
        response = await call_next(request)
        body = b"".join([part async for part in response.body_iterator])
        found = {"status": response.status_code, "headers": dict(response.headers), "body": body.decode()}
        await redis.set(f"idempotency:{key}", json.dumps(found), ex=86400)
        return Response(body, response.status_code, found["headers"])


async def serve(request: Request) -> Response:
    """Take an order."""
    status, content = await run_in_threadpool(order, request.query_params, request.url.path)
    if "html" in request.query_params:
        return HTMLResponse(f"<p>{content['run']}</p>", status)
    return JSONResponse(content, status)


app = Starlette(routes=[Route("/orders", serve, methods=["POST"]), Route("/refunds", serve, methods=["POST"])])
app.add_middleware(GetThenSet)
