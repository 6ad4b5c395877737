"""asgi-idempotency-header, on FastAPI."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse
from idempotency_header_middleware import IdempotencyHeaderMiddleware
from idempotency_header_middleware.backends import RedisBackend
from redis.asyncio import from_url

from benchmarks.http_apps.shop import order

app = FastAPI()
app.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(redis=from_url(os.environ["STORE_URL"])))


@app.post("/orders")
@app.post("/refunds")
async def serve(request: Request) -> Any:
    """Take an order."""
    status, content = await run_in_threadpool(order, request.query_params, request.url.path)
    if "html" in request.query_params:
        return HTMLResponse(f"<p>{content['run']}</p>", status)
    return JSONResponse(content, status)
