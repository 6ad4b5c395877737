"""The application of the tests on Starlette."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Scope

from celery_idempotent.http import INSIDE, IdempotencyMiddleware, abegin, accepted
from tests.support.http import views


async def serve(request: Request) -> Response:
    """Answer any request."""
    query, body = dict(request.query_params), await request.body()
    result = views.publish(query) if "publish" in query else None
    found = await run_in_threadpool(views.respond, request.method, request.scope["path"], query, body)
    if result is not None:
        return accepted(result, "/jobs/{id}")
    if "file" in query:
        return FileResponse(views.file_of(int(query["file"])), found.status)
    if "parts" in query or "stream" in query:
        response: Response = StreamingResponse(iterate_in_threadpool(found.parts), found.status)
    else:
        response = Response(b"".join(found.parts), found.status)
    if "content-type" in response.headers:
        del response.headers["content-type"]
    for name, value in found.headers:
        response.headers.append(name, value)
    return response


METHODS = ["GET", "POST", "PATCH", "PUT", "DELETE"]
routes = [Route("/{path:path}", serve, methods=METHODS)]
uploads = Mount("/uploads", routes=routes, middleware=[Middleware(IdempotencyMiddleware, **views.uploads())])
app = Starlette(routes=[Mount("/mounted", routes=routes), uploads, *routes])


async def account(scope: Scope) -> object:
    """Return who calls."""
    return views.caller(Request(scope).headers.get("x-api-key"))


app.add_middleware(IdempotencyMiddleware, **{**views.options(), "scope": account})


async def serve_inside(request: Request) -> Response:
    """Begin and answer any request."""
    await abegin(request.scope, await account(request.scope))
    return await serve(request)


#: The same, where the view knows the caller.
inside = Starlette(routes=[Route("/{path:path}", serve_inside, methods=METHODS)])
inside.add_middleware(IdempotencyMiddleware, **{**views.options(), "scope": INSIDE})
