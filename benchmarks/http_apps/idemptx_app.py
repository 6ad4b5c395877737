"""idemptx, a decorator for FastAPI, which leaves it to the application how its exceptions are answered."""

from __future__ import annotations

import os
from typing import Any

import redis.asyncio as aioredis
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse
from idemptx import ConflictRequestException, RequestInProgressException, idempotent
from idemptx.backend import AsyncRedisBackend

from benchmarks.http_apps.shop import order

app = FastAPI()
backend = AsyncRedisBackend(aioredis.from_url(os.environ["STORE_URL"]))


@app.exception_handler(RequestInProgressException)
async def in_progress(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose key is in use."""
    return JSONResponse({"detail": str(error)}, 409)


@app.exception_handler(ConflictRequestException)
async def reused(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose key was used for another one."""
    return JSONResponse({"detail": str(error)}, 422)


@app.post("/orders")
@app.post("/refunds")
@idempotent(storage_backend=backend)
async def serve(request: Request) -> Any:
    """Take an order."""
    status, content = await run_in_threadpool(order, request.query_params, request.url.path)
    if "html" in request.query_params:
        return HTMLResponse(f"<p>{content['run']}</p>", status)
    return JSONResponse(content, status)
