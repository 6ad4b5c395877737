"""The errors of the library, in one tree.

::

    IdempotencyError
    ├── ConfigurationError       an option, a store URL or a declaration is wrong (also a ValueError)
    ├── MissingKey               a call gives no key, or arguments that cannot be compared: it fails before it runs
    ├── AlreadyPublished         a message that will do the work of this call is waiting; nothing was published
    ├── KeyReused                the same key came with other arguments
    ├── Conflict                 the operation is being done right now, and this caller may not wait
    ├── CrashLoop                the operation killed its worker too many times in a row
    ├── LeaseLost                another delivery took the operation over; this run has become a duplicate
    ├── NoLease                  a lease was read where no delivery is running (also an AttributeError)
    ├── SettleNotCommitted       the body settled within its own transaction, and that was not committed
    ├── ResultUnavailable        the operation is done, its value was not kept
    ├── PreviouslyFailed         the operation failed for good, and its exception cannot be rebuilt
    └── StoreError               the store did not carry out a request
        ├── StoreUnreachable     it did not reply, or replied that it cannot serve now: try again later
        ├── StoreRefused         it rejected the client: wrong password, missing rights
        └── RecordUnreadable     the record is damaged, or was written by a newer version

Every message names what was expected, what was got, and what to do. An error is built from its message alone, so that
it survives pickling and result backends.
"""

from __future__ import annotations

__all__ = [
    "AlreadyPublished",
    "ConfigurationError",
    "Conflict",
    "CrashLoop",
    "IdempotencyError",
    "KeyReused",
    "LeaseLost",
    "MissingKey",
    "NoLease",
    "PreviouslyFailed",
    "RecordUnreadable",
    "ResultUnavailable",
    "SettleNotCommitted",
    "StoreError",
    "StoreRefused",
    "StoreUnreachable",
]


class IdempotencyError(Exception):
    """Base of every error that this library raises."""


class ConfigurationError(IdempotencyError, ValueError):
    """Raised when an option, a store URL or the declaration of a task is wrong."""


class MissingKey(IdempotencyError):
    """Raised when a call gives no key, or arguments that cannot be compared; the task fails before its body runs."""


class KeyReused(IdempotencyError):
    """Raised when a key that is known comes with other arguments; nothing runs and nothing is retried."""


class AlreadyPublished(IdempotencyError):
    """Raised to a publisher, with ``unique={"on_duplicate": "raise"}``, when a message that will do the work waits."""

    #: the id of that message
    task_id: str = ""
    #: seconds for which it has been waiting
    age: float = 0.0


class Conflict(IdempotencyError):
    """Raised when a duplicate meets a live lease and may neither be deferred nor wait."""

    #: seconds until that lease runs out unless it is renewed; 0 where it is not known
    remaining: float = 0.0


class CrashLoop(IdempotencyError):
    """Raised instead of running an operation whose holders died ``max_crashes`` times in a row."""


class LeaseLost(IdempotencyError):
    """Raised when this run no longer holds the lease; what it does from now on is the work of a duplicate."""


class NoLease(IdempotencyError, AttributeError):
    """Raised where ``self.lease`` is read and no delivery of the task is running, as in a direct call of it."""


class SettleNotCommitted(IdempotencyError):
    """Raised when the body settled within its own transaction, returned, and the transaction was not committed."""


class ResultUnavailable(IdempotencyError):
    """Raised when a duplicate needs the value of an operation that is done, and the value was not kept."""


class PreviouslyFailed(IdempotencyError):
    """Raised for a duplicate of a remembered failure whose exception class is not one that may be rebuilt."""


class StoreError(IdempotencyError):
    """Base of the errors of a store."""


class StoreUnreachable(StoreError):
    """Raised when the store does not reply, or replies that it cannot serve now."""


class StoreRefused(StoreError):
    """Raised when the store rejects the client: a wrong password, a missing right, a wrong database."""


class RecordUnreadable(StoreError):
    """Raised when a record is damaged, or was written by another program or a newer version of this library."""
