"""Version 12 of the functions on PostgreSQL."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from celery_idempotent.django.operations import ApplySchema


class Migration(migrations.Migration):
    """Bring them there."""

    dependencies: ClassVar[list[Any]] = [("celery_idempotent", "0007_postgresql_11")]
    operations: ClassVar[list[Any]] = [ApplySchema(postgresql=12, sqlite=1)]
