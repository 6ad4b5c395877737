"""This library, on Starlette."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from benchmarks.http_apps.shop import order
from celery_idempotent.http import IdempotencyMiddleware


async def serve(request: Request) -> Response:
    """Take an order."""
    status, content = await run_in_threadpool(order, request.query_params, request.url.path)
    if "html" in request.query_params:
        return HTMLResponse(f"<p>{content['run']}</p>", status)
    return JSONResponse(content, status)


app = Starlette(routes=[Route("/orders", serve, methods=["POST"]), Route("/refunds", serve, methods=["POST"])])
app.add_middleware(IdempotencyMiddleware, store=os.environ["STORE_URL"], scope="Authorization")
