"""What the exit status of a command says."""

from __future__ import annotations

from enum import IntEnum

from ..errors import ConfigurationError, IdempotencyError, RecordUnreadable, StoreRefused, StoreUnreachable

__all__ = ["Exit", "status_of"]


class Exit(IntEnum):
    """The exit status of a command, the same in every command."""

    #: Done.
    OK = 0
    #: The answer is no: nothing is known of the key, something is pending or was left alone, a person said no.
    NO = 1
    #: The command was typed wrongly, or an option of the app or of a task is wrong.
    USAGE = 2
    #: The store cannot serve now; try again later.
    UNREACHABLE = 3
    #: The store will not serve us: a wrong password, a missing right.
    REFUSED = 4
    #: What the store holds under the key is no record, or one of a newer version.
    UNREADABLE = 5
    #: Interrupted, as shells say it: 128 and the number of the signal.
    INTERRUPTED = 130


_STATUS: dict[type[IdempotencyError], Exit] = {
    ConfigurationError: Exit.USAGE,
    StoreUnreachable: Exit.UNREACHABLE,
    StoreRefused: Exit.REFUSED,
    RecordUnreadable: Exit.UNREADABLE,
}


def status_of(error: IdempotencyError) -> Exit:
    """Return the exit status that says what an error says."""
    return next((status for cls, status in _STATUS.items() if isinstance(error, cls)), Exit.NO)
