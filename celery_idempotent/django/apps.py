"""The app's configuration, which Django finds by itself."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class IdempotencyConfig(AppConfig):
    """Know the app as ``celery_idempotent``, and register its checks."""

    name = "celery_idempotent.django"
    label = "celery_idempotent"
    verbose_name = "Idempotency"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks of ``manage.py check``."""
        from . import checks as own

        checks.register(own.check_settings, own.TAG)
        checks.register(own.check_middleware, own.TAG)
        checks.register(own.check_production, own.TAG, deploy=True)
        checks.register(own.check_tables, checks.Tags.database)  # and not by the other, which is to connect to nothing
