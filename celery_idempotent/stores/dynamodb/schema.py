"""The table itself: billed by request, and emptied by DynamoDB of what has expired."""

from __future__ import annotations

import time
from typing import Any

from ...errors import ConfigurationError, StoreRefused, StoreUnreachable
from .connections import Table, code

EXPIRES = "expires"
#: Seconds to wait for a new table; AWS takes some ten.
PATIENCE = 120.0
PAUSE = 1.0


def pending(table: Table) -> str:
    """Return what `apply` would do, as text for people; "" if there is nothing to do.

    Raises:
        ConfigurationError: there is such a table, and it is not made for records.
    """
    name = table.place.table
    forget = f"let DynamoDB delete the items of {name} whose time {EXPIRES!r} has passed (TTL)"
    if _described(table) is None:
        return f"create the table {name}, billed by request, with the key attribute 'key'\n{forget}"
    return "" if _forgets(table) else forget


def apply(table: Table) -> None:
    """Create the table if it is not there, and have it forget; safe to repeat, also at the same time.

    Raises:
        ConfigurationError: there is such a table, and it is not made for records.
        StoreUnreachable: the new table was not ready in time.
    """
    if _described(table) is None:
        _tolerate(
            table,
            "ResourceInUseException",  # another client was faster
            "create_table",
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
        )
    end = time.monotonic() + PATIENCE
    while (found := _described(table)) is None or found["TableStatus"] not in ("ACTIVE", "UPDATING"):
        if time.monotonic() > end:
            raise StoreUnreachable(f"The table of {table.place} is not ready {PATIENCE:.0f} s after it was created.")
        time.sleep(PAUSE)
    if not _forgets(table):
        wanted = {"Enabled": True, "AttributeName": EXPIRES}
        _tolerate(table, "ValidationException", "update_time_to_live", TimeToLiveSpecification=wanted)


def _described(table: Table) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = table.call("describe_table")["Table"]
    except StoreRefused as error:
        if code(error) != "ResourceNotFoundException":
            raise
        return None
    if found["KeySchema"] != [{"AttributeName": "key", "KeyType": "HASH"}] or not any(
        attribute == {"AttributeName": "key", "AttributeType": "S"} for attribute in found["AttributeDefinitions"]
    ):
        raise ConfigurationError(
            f"Expected the table of {table.place} to have the one key attribute 'key', a string, got "
            f"{found['KeySchema']}. Give the idempotency store a table of its own."
        )
    return found


def _forgets(table: Table) -> bool:
    reply = table.call("describe_time_to_live")["TimeToLiveDescription"]
    return reply.get("TimeToLiveStatus") in ("ENABLED", "ENABLING") and reply.get("AttributeName") == EXPIRES


def _tolerate(table: Table, known: str, operation: str, **request: Any) -> None:
    """Send a request; an error that another client did it at the same time counts as done."""
    try:
        table.call(operation, **request)
    except (StoreRefused, StoreUnreachable) as error:
        if code(error) != known:
            raise
