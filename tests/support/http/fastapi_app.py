"""The application of the tests on FastAPI, which commits after its response: the exit of a dependency with yield."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import StreamingResponse

from celery_idempotent.http import IdempotencyMiddleware
from tests.support.http import views

app = FastAPI()


def transaction(request: Request) -> Iterator[None]:
    """Commit what the handler did; or fail, or have the process die, before that."""
    yield
    query = dict(request.query_params)
    tag = query.get("tag", "-")
    committed = f"{tag}-exit"
    views.note(f"{committed} begins")
    if query.get("exit") == "raise":
        raise ValueError("the commit failed")
    exits = sum(line.startswith(f"{committed} begins") for line in views.RUNS.read_text().splitlines())
    views.die_if("exit", query, exits)
    views.note(f"{tag}-committed lease")


@app.api_route("/{path:path}", methods=["GET", "POST", "PATCH", "PUT", "DELETE"])
async def serve(request: Request, path: str, _: Annotated[None, Depends(transaction)]) -> Response:
    """Answer any request."""
    query, body = dict(request.query_params), await request.body()
    found = await run_in_threadpool(views.respond, request.method, f"/{path}", query, body)
    if "parts" in query or "stream" in query:
        response: Response = StreamingResponse(iterate_in_threadpool(found.parts), found.status)
    else:
        response = Response(b"".join(found.parts), found.status)
    for name, value in found.headers:
        if name == "Content-Type":
            response.headers[name] = value
        else:
            response.headers.append(name, value)
    return response


class Around(BaseHTTPMiddleware):
    """A middleware as most are written, which reads the response as a stream."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


def account(scope: dict[str, object]) -> object:
    """Return who calls."""
    return views.caller(Request(scope).headers.get("x-api-key"))


# The first is the innermost.
for inner in (GZipMiddleware, Around):
    app.add_middleware(inner)
app.add_middleware(IdempotencyMiddleware, **{**views.options(), "scope": account, "settle_at": "return"})  # type: ignore[arg-type]
app.add_middleware(Around)
app.add_middleware(CORSMiddleware, allow_origins=["https://shop.test"])
app.add_middleware(GZipMiddleware)
