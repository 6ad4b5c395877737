"""Settings of a site: Celery's stand among them and begin with CELERY_, as Django projects have it."""

import os

DEBUG = False

CELERY_BROKER_URL = os.environ.get("BROKER_URL", "redis://localhost/0")
CELERY_RESULT_BACKEND = os.environ.get("RESULT_URL", "redis://localhost/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

CELERY_IDEMPOTENCY_STORE = os.environ.get("STORE_URL", "redis://localhost/1")
CELERY_IDEMPOTENCY_NAMESPACE = "site"
CELERY_IDEMPOTENCY = {"lease_ttl": "30s", "result_ttl": "7d"}
