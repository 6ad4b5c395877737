"""The application of the tests on FastAPI, whose dependencies know the caller."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.concurrency import iterate_in_threadpool, run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from celery_idempotent.http import INSIDE, IdempotencyMiddleware, abegin, begin
from tests.support.http import views

app = FastAPI()


def current_user(x_api_key: Annotated[str | None, Header()] = None) -> object:
    """Return who calls."""
    if x_api_key == "locked":
        raise HTTPException(403)
    return views.caller(x_api_key)


User = Annotated[Any, Depends(current_user)]


def once(request: Request, user: User) -> None:
    begin(request, user)


async def aonce(request: Request, user: User) -> None:
    await abegin(request, user)


async def body(request: Request) -> bytes:
    return await request.body()


def answered(request: Request, content: bytes) -> Response:
    found = views.answer(request.url.path, dict(request.query_params), content)
    if "parts" in request.query_params:
        response: Response = StreamingResponse(iterate_in_threadpool(found.parts), found.status)
    else:
        response = Response(b"".join(found.parts), found.status)
    for name, value in found.headers:
        response.headers.append(name, value)
    return response


Body = Annotated[bytes, Depends(body)]


@app.post("/sync/sync", dependencies=[Depends(once)])
@app.post("/async/sync", dependencies=[Depends(aonce)])
@app.post("/never")
@app.post("/exempt")
def serve(request: Request, content: Body) -> Response:
    """Answer a request in a thread."""
    return answered(request, content)


@app.post("/sync/async", dependencies=[Depends(once)])
@app.post("/async/async", dependencies=[Depends(aonce)])
async def serve_async(request: Request, content: Body) -> Response:
    """Answer a request in a coroutine."""
    return await run_in_threadpool(answered, request, content)


@app.post("/view/sync")
def begin_in_view(request: Request, user: User, content: Body) -> Response:
    """Begin in a thread, in the view itself."""
    begin(request, user)
    return answered(request, content)


@app.post("/view/async")
async def begin_in_coroutine(request: Request, user: User, content: Body) -> Response:
    """Begin in another task than the view's."""
    await asyncio.create_task(abegin(request, user))
    return await run_in_threadpool(answered, request, content)


@app.post("/catch")
async def catch(request: Request, user: User, content: Body) -> Response:
    """Catch what should pass."""
    try:
        await abegin(request, user)
    except BaseException:  # noqa: BLE001 - as some views do
        return Response("caught", 500)
    return await run_in_threadpool(answered, request, content)


class Timing(BaseHTTPMiddleware):
    """One that is built as most are."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        try:
            return await call_next(request)
        except Exception:  # noqa: BLE001 - as some do
            return Response("failed", 500)


app.add_middleware(Timing)
app.add_middleware(IdempotencyMiddleware, **{**views.options(), "scope": INSIDE})  # type: ignore[arg-type]
