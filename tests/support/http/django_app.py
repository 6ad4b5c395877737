"""The application of the tests on Django, for WSGI and ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db import transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.urls import re_path

from celery_idempotent.http.django import accepted
from tests.support.http import views

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="of the tests",
    MIDDLEWARE=["celery_idempotent.http.django.IdempotencyMiddleware"],
    IDEMPOTENCY_HTTP={**views.options(), "scope": lambda request: views.caller(request.headers.get("X-Api-Key"))},
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DATA_UPLOAD_MAX_MEMORY_SIZE=20_000,
    LOGGING_CONFIG=None,
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
)
django.setup()

from rest_framework.views import APIView  # noqa: E402 - it reads the settings


def serve(request: Any, path: str) -> Any:
    """Answer any request."""
    query, results = request.GET.dict(), []
    if "publish" in query:
        with transaction.atomic():
            transaction.on_commit(lambda: results.append(views.publish(query)))
    found = views.respond(request.method, f"/{path}", query, request.body)
    if results:
        return accepted(results[0], "/jobs/{id}")
    if "file" in query:
        return FileResponse(views.file_of(int(query["file"])).open("rb"), status=found.status)
    if "parts" in query or "stream" in query:
        response: Any = StreamingHttpResponse(found.parts, status=found.status)
    else:
        response = HttpResponse(b"".join(found.parts), status=found.status)
    for name, value in found.headers:
        if name == "Set-Cookie":
            response.set_cookie(*value.split("="))
        else:
            response.headers[name] = value
    return response


async def serve_async(request: Any, path: str) -> Any:
    """Answer any request, with a stream that asyncio reads."""
    response = await sync_to_async(serve, thread_sensitive=False)(request, path)
    if response.streaming:
        parts = response.streaming_content
        following = sync_to_async(lambda: next(parts, None), thread_sensitive=False)

        async def read() -> AsyncIterator[bytes]:
            while (part := await following()) is not None:
                yield part

        response.streaming_content = read()
    return response


class RestView(APIView):
    """The same, by the REST framework."""

    def get(self, request: Any, path: str) -> Any:
        return serve(request, path)

    post = patch = put = delete = get


urlpatterns = [re_path(r"^rest/(?P<path>.*)$", RestView.as_view())]
urlpatterns += [re_path(r"^async/(?P<path>.*)$", serve_async), re_path(r"^(?P<path>.*)$", serve)]
application, asgi = get_wsgi_application(), get_asgi_application()
