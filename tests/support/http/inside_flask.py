"""The application of the tests on Flask, whose views know the caller."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, abort, request

from celery_idempotent.http import INSIDE, begin
from celery_idempotent.http.wsgi import IdempotencyMiddleware
from tests.support.http import views

app = Flask(__name__)


@app.errorhandler(Exception)
def failed(error: Exception) -> Any:
    """Answer every exception, as some applications do."""
    return Response(f"failed: {error!r}", getattr(error, "code", 500))


@app.before_request
def before() -> None:
    if request.headers.get("X-Api-Key") == "locked":
        abort(403)
    if request.path.startswith("/before"):
        begin(request, views.caller(request.headers.get("X-Api-Key")))


@app.post("/<path:path>")
def serve(path: str) -> Response:
    """Answer any request."""
    if path.startswith("view"):
        begin(request.environ, views.caller(request.headers.get("X-Api-Key")))
    if path.startswith("catch"):
        try:
            begin(request, views.caller(request.headers.get("X-Api-Key")))
        except BaseException:  # noqa: BLE001 - as some views do
            return Response("caught", 500)
    query = request.args.to_dict()
    found = views.answer(f"/{path}", query, request.get_data())
    response = Response(found.parts if "parts" in query else b"".join(found.parts), found.status)
    del response.headers["content-type"]
    response.headers.extend(found.headers)
    return response


app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, **{**views.options(), "scope": INSIDE})  # type: ignore[method-assign]
