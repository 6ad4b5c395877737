"""The application whose latency is measured, on Starlette and Flask, with and without the middleware."""

from __future__ import annotations

import os

from flask import Flask
from flask import request as flask_request
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from celery_idempotent.http import IdempotencyMiddleware
from celery_idempotent.http.wsgi import IdempotencyMiddleware as WsgiMiddleware

__all__ = ["asgi", "wsgi"]

ORDER = b'{"order": 4711, "status": "accepted"}'


async def create(request: Request) -> Response:
    """Read an order, and accept it."""
    await request.body()
    return Response(ORDER, 201, media_type="application/json")


asgi = Starlette(routes=[Route("/orders", create, methods=["POST"])])
wsgi = Flask(__name__)


@wsgi.post("/orders")
def create_sync() -> tuple[bytes, int, dict[str, str]]:
    """Read an order, and accept it."""
    flask_request.get_data()
    return ORDER, 201, {"Content-Type": "application/json"}


if store := os.environ.get("STORE_URL"):
    asgi.add_middleware(IdempotencyMiddleware, store=store, scope="X-Api-Key")
    wsgi.wsgi_app = WsgiMiddleware(wsgi.wsgi_app, store=store, scope="X-Api-Key")
