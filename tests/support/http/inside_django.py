"""The application of the tests on Django REST framework, whose middlewares see AnonymousUser; for WSGI and ASGI."""

from __future__ import annotations

from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import re_path

from celery_idempotent.http import INSIDE, abegin, begin
from tests.support.http import views

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="of the tests",
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"],
    MIDDLEWARE=["celery_idempotent.http.django.IdempotencyMiddleware"],
    IDEMPOTENCY_HTTP={**views.options(), "scope": INSIDE},
    LOGGING_CONFIG=None,
)
django.setup()

from rest_framework.authentication import BaseAuthentication  # noqa: E402 - it reads the settings
from rest_framework.parsers import BaseParser  # noqa: E402
from rest_framework.permissions import BasePermission  # noqa: E402
from rest_framework.views import APIView  # noqa: E402


class User:
    """A caller who is known."""

    is_authenticated = True

    def __init__(self, key: str) -> None:
        self.pk = views.caller(key)


class ApiKey(BaseAuthentication):
    """What the framework calls in its view alone."""

    def authenticate(self, request: Any) -> Any:
        """Return who calls; None is AnonymousUser."""
        key = request.headers.get("X-Api-Key")
        return (User(key), None) if key else None


class Unlocked(BasePermission):
    """Refuse a caller."""

    def has_permission(self, request: Any, view: Any) -> bool:
        return request.headers.get("X-Api-Key") != "locked"


class Once(BasePermission):
    """The last of the permissions."""

    def has_permission(self, request: Any, view: Any) -> bool:
        begin(request, getattr(request.user, "pk", None))
        return True


class Raw(BaseParser):
    """Give bodies as they are."""

    media_type = "*/*"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> bytes:
        return bytes(stream.read())


class Orders(APIView):
    """Views that know the caller, and do not begin."""

    authentication_classes = (ApiKey,)
    permission_classes: Any = (Unlocked,)
    parser_classes = (Raw,)

    def post(self, request: Any, path: str = "") -> Any:
        """Answer any request."""
        if path.startswith("view"):
            begin(request, request.user.pk if request.user.is_authenticated else request.user)
        if path.startswith("catch"):
            try:
                begin(request, request.user.pk)
            except BaseException:  # noqa: BLE001 - as some views do
                return HttpResponse("caught", status=500)
        return answered(request, path, request.data or b"")


def answered(request: Any, path: str, body: bytes) -> Any:
    query = request.GET.dict()
    found = views.answer(f"/{path}", query, body)
    if "parts" in query:
        response: Any = StreamingHttpResponse(found.parts, status=found.status)
    else:
        response = HttpResponse(b"".join(found.parts), status=found.status)
    for name, value in found.headers:
        if name != "Set-Cookie":
            response.headers[name] = value
    return response


class OrdersOnce(Orders):
    """Views behind a permission that begins."""

    permission_classes = (Unlocked, Once)


class OrdersAfterChecks(Orders):
    """Views that begin once all checks are done."""

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Begin."""
        super().initial(request, *args, **kwargs)
        begin(request, request.user.pk)


async def serve_async(request: Any, path: str) -> Any:
    """Begin in a coroutine."""
    await abegin(request, views.caller(request.headers.get("X-Api-Key")))
    return await sync_to_async(answered)(request, path, request.body)


urlpatterns = [
    re_path(r"^permission/(?P<path>.*)$", OrdersOnce.as_view()),
    re_path(r"^initial/(?P<path>.*)$", OrdersAfterChecks.as_view()),
    re_path(r"^async/(?P<path>.*)$", serve_async),
    re_path(r"^(?P<path>.*)$", Orders.as_view()),
]
application, asgi = get_wsgi_application(), get_asgi_application()
