"""djangorestframework-idempotency-key, on PostgreSQL; its one setting has no default."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from django.urls import path

from benchmarks.http_apps.django_shop import application
from benchmarks.http_apps.shop import order

database = urlsplit(os.environ["STORE_URL"])
urlpatterns: list[Any] = []
app = application(
    __name__,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework_idempotency_key"],
    MIDDLEWARE=["rest_framework_idempotency_key.middleware.IdempotencyKeyMiddleware"],
    IDEMPOTENCY_KEY_LOCK_TIMEOUT=30,
    REST_FRAMEWORK={"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []},
    USE_TZ=True,
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database.path.strip("/"),
            "USER": database.username,
            "HOST": database.hostname,
            "PORT": database.port,
        }
    },
)

from rest_framework.response import Response  # noqa: E402 - the settings come first
from rest_framework.views import APIView  # noqa: E402
from rest_framework_idempotency_key.decorators import simple_idempotency_key_method  # noqa: E402


class Orders(APIView):
    """Orders, of which each is taken in a transaction of the database."""

    @simple_idempotency_key_method
    def post(self, request: Any) -> Any:
        """Take an order."""
        status, content = order(request.query_params, request.path)
        return Response(content, status)


urlpatterns += [path("orders", Orders.as_view()), path("refunds", Orders.as_view())]
