"""The server of examples/shop_api, killed where a test has armed that: `python -m tests.support.http.shop_server PORT`.

A server that dies is replaced, as gunicorn's master does it: by a fork of a process that has imported the application.
"""

from __future__ import annotations

import os
import socket
import sys

import uvicorn
from sqlalchemy import event
from sqlalchemy.orm import Session
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from examples.shop_api.api import api
from tests.support.http.shop_points import ANY, SERVER, ShopPoints

points = ShopPoints(os.environ["FAIL_POINTS"])
points.operation = ANY
for moment, name in zip(SERVER[:3], ("before_flush", "after_flush", "after_commit"), strict=True):
    event.listen(Session, name, lambda *_, moment=moment: points.strike(moment))
for middleware in api.user_middleware:
    if "scope" in middleware.kwargs:
        middleware.kwargs["lease_ttl"] = 1


def breaking(app: ASGIApp) -> ASGIApp:
    """Send each body in two parts, and come to a fail point in between."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_parts(message: Message) -> None:
            if message.get("body"):
                await send({**message, "body": message["body"][:9], "more_body": True})
                points.strike(SERVER[-1])
                message = {**message, "body": message["body"][9:]}
            await send(message)

        await app(scope, receive, send_parts)

    return serve


def main() -> None:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    while True:
        child = os.fork()
        if not child:
            uvicorn.Server(uvicorn.Config(breaking(api))).run([listener])
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
