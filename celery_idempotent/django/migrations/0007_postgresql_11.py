"""Version 11 of the functions on PostgreSQL."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from celery_idempotent.django.operations import ApplySchema


class Migration(migrations.Migration):
    """Bring them there."""

    dependencies: ClassVar[list[Any]] = [("celery_idempotent", "0006_postgresql_10")]
    operations: ClassVar[list[Any]] = [ApplySchema(postgresql=11, sqlite=1)]
