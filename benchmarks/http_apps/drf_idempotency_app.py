"""drf-idempotency, on Redis."""

from __future__ import annotations

import os

from django.urls import path

from benchmarks.http_apps.django_shop import application, serve

urlpatterns = [path("orders", serve), path("refunds", serve)]
app = application(
    __name__,
    INSTALLED_APPS=["drf_idempotency"],
    MIDDLEWARE=["drf_idempotency.middleware.IdempotencyMiddleware"],
    IDEMPOTENCY={
        "BACKEND": "drf_idempotency.backends.redis.RedisBackend",
        "BACKEND_OPTIONS": {"url": os.environ["STORE_URL"]},
    },
)
