"""This library, on Django."""

from __future__ import annotations

import os

from django.urls import path

from benchmarks.http_apps.django_shop import application, serve

urlpatterns = [path("orders", serve), path("refunds", serve)]
app = application(
    __name__,
    MIDDLEWARE=["celery_idempotent.http.django.IdempotencyMiddleware"],
    IDEMPOTENCY_HTTP={
        "store": os.environ["STORE_URL"],
        "scope": lambda request: request.headers.get("Authorization"),
    },
)
