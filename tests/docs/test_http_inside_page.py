"""The applications that docs/guides/http-inside.md shows carry out a request once."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from fastapi import FastAPI, Request
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from celery_idempotent.http import INSIDE, IdempotencyMiddleware
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


SETTLED = """
import sys
from django.conf import settings
from celery_idempotent import current_lease
from celery_idempotent.http import INSIDE
{settings}
IDEMPOTENCY_HTTP["store"] = "django://default"
settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}}}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"],
    MIDDLEWARE=MIDDLEWARE,
    IDEMPOTENCY_HTTP=IDEMPOTENCY_HTTP,
)
import django
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import Group
from django.test import Client
from django.urls import path
from rest_framework.generics import ListCreateAPIView
from rest_framework.permissions import BasePermission
from rest_framework.serializers import ModelSerializer
from celery_idempotent.http import begin
{views}
class Once(BasePermission):
    def has_permission(self, request, view):
        begin(request, 7)
        return True

class Groups(ModelSerializer):
    class Meta:
        model = Group
        fields = ["name"]

fail = True

class Orders(SettledMixin, ListCreateAPIView):
    queryset, serializer_class, permission_classes = Group.objects.all(), Groups, [Once]

    def create(self, request, *args, **kwargs):
        response = super().create(request, *args, **kwargs)
        if fail:
            raise RuntimeError("after the commit")
        return response

urlpatterns = [path("orders", Orders.as_view())]
call_command("migrate", verbosity=0)
client = Client(headers={{"Idempotency-Key": "k"}}, raise_request_exception=False)
seen = [client.post("/orders", {{"name": "one"}}) for _ in range(2)]
assert [(each.status_code, each.json(), "Idempotent-Replayed" in each.headers) for each in seen] == [
    (201, {{"name": "one"}}, False), (201, {{"name": "one"}}, True)
]
assert Group.objects.count() == 1
fail = False
assert [client.post("/orders", {{"name": "one"}}, headers={{"Idempotency-Key": "b"}}).status_code] == [400]
assert [client.post("/orders", {{"name": "two"}}, headers={{"Idempotency-Key": "c"}}).status_code] == [201]
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


@pytest.mark.thorough
def test_a_view_of_fastapi_commits_its_response_with_its_rows(postgres_url: str) -> None:
    names = vars(stage())
    exec(code("async def place_order_once"), names)
    database = postgres_url.partition("?")[0]
    app, engine = (
        FastAPI(),
        create_async_engine(database.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool),
    )
    app.add_middleware(IdempotencyMiddleware, store=postgres_url, scope=INSIDE)
    schema = re.findall(r"schema=(\w+)", postgres_url)[0]
    with psycopg.connect(database) as connection:
        connection.execute(f"create table {schema}.orders (id serial, item text)".encode())

    @app.post("/orders")
    async def place_order(request: Request) -> object:
        async with AsyncSession(engine) as session:
            await session.execute(sqlalchemy.text(f"set local search_path = {schema}"))
            return await names["place_order_once"](request, "anna", session, "book")

    async def main() -> list[tuple[int, bytes]]:
        replies = [await request_asgi(app, key) for key in ("k", "k", None)]
        return [(reply.status, reply.body) for reply in replies]

    assert asyncio.run(main()) == [(201, b'{"id":1}'), (201, b'{"id":1}'), (201, b'{"id":2}')]


def test_the_django_application_takes_an_order_once() -> None:
    script = DJANGO.format(settings=code("MIDDLEWARE ="), views=code("BasePermission"))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_view_of_rest_framework_settles_its_response_with_its_rows(tmp_path: Path) -> None:
    script = SETTLED.format(settings=code("MIDDLEWARE ="), views=code("class SettledMixin"))
    command = [sys.executable, "-c", script, str(tmp_path / "shop.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
