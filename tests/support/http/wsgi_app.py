"""The application of the tests on Flask."""

from __future__ import annotations

from flask import Flask, Response, request
from flask.typing import ResponseReturnValue

from celery_idempotent.http.wsgi import IdempotencyMiddleware, accepted
from tests.support.http import views

app = Flask(__name__)


@app.route("/<path:path>", methods=["GET", "POST", "PATCH", "PUT", "DELETE"])
def serve(path: str) -> ResponseReturnValue:
    """Answer any request."""
    query = request.args.to_dict()
    result = views.publish(query) if "publish" in query else None
    found = views.answer(f"/{path}", query, request.get_data())
    if result is not None:
        return accepted(result, "/jobs/{id}")
    body = found.parts if "parts" in query else b"".join(found.parts)
    response = Response(body, found.status)
    del response.headers["content-type"]
    response.headers.extend(found.headers)
    return response


app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, **{**views.options(), "scope": "X-Api-Key"})  # type: ignore[method-assign]
