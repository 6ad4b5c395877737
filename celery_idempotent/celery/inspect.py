"""``celery inspect idempotency``: the leases that workers hold, by remote control."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import IdempotencyError
from . import pool

__all__ = ["COMMAND", "LiveLease", "NoReply", "leases", "register"]


#: The remote control command.
COMMAND = "idempotency"


def register() -> None:
    """Let workers know the command, and ``celery inspect`` as well, which looks it up in its own process."""
    from celery.worker.control import inspect_command

    inspect_command(name=COMMAND, help="Leases that the worker's deliveries hold: key, task, holder, age.")(_reply)


class NoReply(IdempotencyError):
    """Raised when a worker did not reply to the request for its leases in time, or replied with an error."""


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A lease that a delivery of a worker holds.

    Arguments:
        key: The operation; texts longer than some hundred characters are cut off.
        task, task_id: The task that runs, and its message's id.
        holder: Host and process.
        fence: Its fencing token.
        age: Seconds since it was granted.
        renewals: How often it was renewed.
        trusted_for: Seconds for which the holder may rely on it without a call to the store; 0 where it is in doubt.
    """

    key: str
    task: str
    task_id: str
    holder: str
    fence: int
    age: float
    renewals: int
    trusted_for: float


def leases(app: Any, destination: Iterable[str] | None = None, timeout: float = 1.0) -> dict[str, list[LiveLease]]:
    """Return the leases that workers hold right now, by the worker's name, the oldest first.

    Arguments:
        app: The Celery app of the workers.
        destination: Names of the workers to query (default: all that there are).
        timeout: Seconds to wait for replies. Without ``destination`` it always waits so long, since the
            number of workers is not known.

    Raises:
        NoReply: a worker of ``destination`` did not reply in time, or no worker at all did; or one replied an error.
    """
    wanted = None if destination is None else sorted(set(destination))
    limit = None if wanted is None else len(wanted)
    answers = app.control.broadcast(COMMAND, destination=wanted, reply=True, timeout=timeout, limit=limit) or []
    replies = {name: reply for answer in answers for name, reply in answer.items()}
    silent = [name for name in wanted or () if name not in replies]
    if silent or not replies:
        raise NoReply(
            f"Expected a reply within {timeout:g} s from {', '.join(silent) or 'at least one worker'}, got none. "
            "Check that it runs (celery status) and whether its main process is busy, or wait longer: timeout=5."
        )
    return {name: _read(name, reply) for name, reply in sorted(replies.items())}


def _read(name: str, reply: Any) -> list[LiveLease]:
    try:
        return [LiveLease(**lease) for lease in reply]
    except TypeError:  # an error, or leases with other fields
        raise NoReply(
            f"Expected the leases of {name}, got {reply!r}. A worker without this library, or with "
            "another version of it, does not know the command: name the workers to query with destination=[...]."
        ) from None


def _reply(state: Any, **_: Any) -> list[dict[str, Any]]:
    return pool.leases()
