"""The application of the tests on Flask."""

from __future__ import annotations

from flask import Flask, Response, request, send_file
from flask.typing import ResponseReturnValue
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from celery_idempotent.http.wsgi import IdempotencyMiddleware, accepted
from tests.support.http import views

app = Flask(__name__)


@app.route("/<path:path>", methods=["GET", "POST", "PATCH", "PUT", "DELETE"])
def serve(path: str) -> ResponseReturnValue:
    """Answer any request."""
    query = request.args.to_dict()
    result = views.publish(query) if "publish" in query else None
    found = views.respond(request.method, f"/{path}", query, request.get_data())
    if result is not None:
        return accepted(result, "/jobs/{id}")
    if "file" in query:
        return send_file(views.file_of(int(query["file"]))), found.status
    body = found.parts if "parts" in query or "stream" in query else b"".join(found.parts)
    response = Response(body, found.status)
    del response.headers["content-type"]
    response.headers.extend(found.headers)
    return response


uploads = IdempotencyMiddleware(app.wsgi_app, **{**views.uploads(), "scope": "X-Api-Key"})
app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/uploads": uploads})  # type: ignore[method-assign]
app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, **{**views.options(), "scope": "X-Api-Key"})  # type: ignore[method-assign]
