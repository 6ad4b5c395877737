"""The applications that docs/guides/http-inside.md shows carry out a request once."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.support.docs.pages import PYTHON, ROOT, blocks
from tests.support.docs.stage import stage
from tests.support.http.inproc import request_asgi

PAGE = "docs/guides/http-inside.md"

DJANGO = """
from django.conf import settings
from celery_idempotent.http import INSIDE
{settings}
IDEMPOTENCY_HTTP["store"] = "memory://"
settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"],
    MIDDLEWARE=MIDDLEWARE,
    IDEMPOTENCY_HTTP=IDEMPOTENCY_HTTP,
)
import django
django.setup()
from django.contrib.auth.models import User
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

class ApiKey(BaseAuthentication):
    def authenticate(self, request):
        key = request.headers.get("X-Api-Key")
        return (User(pk=int(key)), None) if key else None

{views}
runs = []

class Orders(OrderMixin, APIView):
    authentication_classes = [ApiKey]

    def post(self, request):
        return Response(runs.append(1), 201)

urlpatterns = [path("orders", Orders.as_view())]
from django.test import Client

def post(**headers):
    return Client(headers={{"Idempotency-Key": "k", **headers}}).post("/orders").status_code, len(runs)

assert post(**{{"X-Api-Key": "1"}}) == (201, 1)
assert post(**{{"X-Api-Key": "1"}}) == (201, 1)
assert post(**{{"X-Api-Key": "2"}}) == (201, 2)
assert post() == (403, 2)
"""


def code(*texts: str) -> str:
    """Return the blocks of the page that hold these texts."""
    return "\n".join(b.text for b in blocks(PAGE) if b.language == PYTHON and any(text in b.text for text in texts))


def test_the_fastapi_application_takes_an_order_once() -> None:
    names = vars(stage())
    exec(code("FastAPI()").replace("redis://localhost/1", "memory://"), names)
    headers = [(b"content-type", b"application/json"), (b"x-api-key", b"secret")]

    def order(*headers: tuple[bytes, bytes]) -> int:
        return asyncio.run(request_asgi(names["app"], body=b"{}", headers=headers)).status

    assert [order(*headers), order(*headers), order(headers[0])] == [201, 201, 401]
    assert len(names["database"].calls) == 1


def test_the_django_application_takes_an_order_once() -> None:
    script = DJANGO.format(settings=code("MIDDLEWARE ="), views=code("BasePermission"))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
