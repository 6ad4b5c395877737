"""The records of a store in a database of Django, for reading."""

from __future__ import annotations

import time
from typing import Any

from django.db import models

from ..errors import ConfigurationError
from ..stores.rules import SECOND
from .databases import database_stores


class RecordManager(models.Manager):
    """Read the records of the first store that is in a database of Django: the app's, or else the middleware's.

    Raises:
        ConfigurationError: there is no such store.
    """

    def get_queryset(self) -> Any:
        """Return what has not expired, in the order of the keys."""
        store = next(database_stores(), None)
        if store is None:
            raise ConfigurationError(
                "Expected a store in a database of Django, and none of the settings names one. Set "
                'CELERY_IDEMPOTENCY_STORE = "django://default".'
            )
        # Unmanaged, so not in the state of the migrations: which table it is, the URL of the store decides.
        self.model._meta.db_table = store.table
        return super().get_queryset().using(store.alias).filter(expires__gt=int(time.time() * SECOND))

    def using(self, alias: str | None) -> Any:
        """Return nothing: `dumpdata` asks so, for what `loaddata` could not load. The store decides on the database."""
        return models.QuerySet(self.model).none()


class Record(models.Model):
    """What a store remembers of one operation, without its result; times are microseconds since 1970."""

    key = models.TextField(primary_key=True)
    state = models.TextField()
    fence = models.BigIntegerField()
    holder = models.TextField()
    lease_end = models.BigIntegerField()
    not_before = models.BigIntegerField()
    crashes = models.BigIntegerField()
    reason = models.TextField()
    ended = models.BigIntegerField()
    expires = models.BigIntegerField()

    objects = RecordManager()

    class Meta:
        """What Django is to know of it."""

        managed = False
        base_manager_name = "objects"
        ordering = ("key",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        """Return the key."""
        return str(self.key)
