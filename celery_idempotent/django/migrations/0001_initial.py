"""The tables of a store, and the unmanaged model by which the admin reads its records."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from celery_idempotent.django.operations import ApplySchema


class Migration(migrations.Migration):
    """Make them."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        ApplySchema(postgresql=4, sqlite=1),
        migrations.CreateModel(
            name="Record",
            fields=[
                ("key", models.TextField(primary_key=True, serialize=False)),
                ("state", models.TextField()),
                ("fence", models.BigIntegerField()),
                ("holder", models.TextField()),
                ("lease_end", models.BigIntegerField()),
                ("not_before", models.BigIntegerField()),
                ("crashes", models.BigIntegerField()),
                ("reason", models.TextField()),
                ("ended", models.BigIntegerField()),
                ("expires", models.BigIntegerField()),
            ],
            options={
                "managed": False,
                "base_manager_name": "objects",
                "ordering": ("key",),
                "default_permissions": ("view",),
            },
        ),
    ]
