"""The application of the tests on Flask."""

from __future__ import annotations

from flask import Flask, Response, request, send_file
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from celery_idempotent.http.wsgi import IdempotencyMiddleware
from tests.support.http import views

app = Flask(__name__)


@app.route("/<path:path>", methods=["GET", "POST", "PATCH", "PUT", "DELETE"])
def serve(path: str) -> Response | tuple[Response, int]:
    """Answer any request."""
    query = request.args.to_dict()
    found = views.respond(request.method, f"/{path}", query, request.get_data())
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
