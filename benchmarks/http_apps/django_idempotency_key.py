"""django-idempotency-key, with its storage and its lock for several processes."""

from __future__ import annotations

import os

from django.urls import path

from benchmarks.http_apps.django_shop import application, serve

urlpatterns = [path("orders", serve), path("refunds", serve)]
app = application(
    __name__,
    MIDDLEWARE=["idempotency_key.middleware.IdempotencyKeyMiddleware"],
    CACHES={"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": os.environ["STORE_URL"]}},
    IDEMPOTENCY_KEY={
        "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage", "CACHE_NAME": "default"},
        "LOCK": {"CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock", "LOCATION": os.environ["STORE_URL"]},
    },
)
