"""The operation of migrations that makes and upgrades a store's tables."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from .databases import database_stores


class ApplySchema(Operation):
    """Bring the tables of the stores in a database to the versions that this library has.

    Each version of the tables adds a migration with this operation. In a new database the first one makes what the
    installed library needs, and those that follow find nothing to do. What an operator made with
    ``celery-idempotent --store URL schema --apply`` is left as it is. Backwards nothing is dropped: with the tables it
    would be forgotten which operations are done.

    Arguments:
        postgresql, sqlite: The versions which the migration is there for.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, *, postgresql: int, sqlite: int) -> None:
        self.postgresql, self.sqlite = postgresql, sqlite

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave the state of the models: those of the records are unmanaged."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Make or upgrade the tables of the stores in this database, if the routers allow it."""
        connection = schema_editor.connection
        if not router.allow_migrate(connection.alias, app_label, model_name="record"):
            return
        for store in database_stores():
            if store.alias == connection.alias:
                for statement in store.statements(None if schema_editor.collect_sql else connection):
                    schema_editor.execute(statement, None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop nothing."""

    def describe(self) -> str:
        """Return what ``migrate --plan`` prints."""
        return (
            "Make or upgrade the tables of idempotency stores in this database "
            f"(PostgreSQL: version {self.postgresql}, SQLite: version {self.sqlite}); backwards nothing is dropped"
        )
