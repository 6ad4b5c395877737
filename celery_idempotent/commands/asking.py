"""The person at the command line: what they confirm, and the trace that they leave."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING

import click

from ..notes import Note, text_of_operator
from .filters import task_of

if TYPE_CHECKING:
    from ..errors import StoreError
    from ..records import Record
    from ..stores.forgetting import Trace
    from ..stores.used import UsedStore

__all__ = ["confirmed", "operator", "trace_of"]

#: Seconds to keep what an operator did where the task's options are not known: the default of `result_ttl`.
KEEP = 86400.0


def operator() -> str:
    """Return user@host of whoever typed the command; behind sudo that is the user who called it."""
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def trace_of(event: str, used: UsedStore, record: Record) -> Trace:
    """Return the entry that says what an operator did to a record.

    Arguments:
        event: What they did, see `notes.OPERATORS`.
        used: The store.
        record: The record as it was.
    """
    from ..stores.forgetting import Trace

    def failed(error: StoreError) -> None:
        reason = " ".join(str(error).split())
        click.echo(f"What was done to {record.key} could not be noted in its history: {reason}", err=True)

    forgotten = event == "ForgottenByOperator"
    facts = {"state": str(record.state) if forgotten else "", "holder": record.holder, "task_id": record.task_id}
    keep = used.keep_ttls.get(task_of(record.key), KEEP)
    return Trace(Note(record.key, text_of_operator(event, operator(), **facts), 0.0, keep), failed)


def confirmed(question: str, *, yes: bool, verb: str) -> bool:
    """Ask on standard error, unless nobody wants to be asked; where nobody is there to answer, that is no.

    Arguments:
        question: What to ask.
        yes: Whether it is answered already.
        verb: What ``--yes`` does without asking, as in "forgets".
    """
    try:
        return yes or click.confirm(question, err=True)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            click.echo(f"\nNobody answered; --yes {verb} without asking.", err=True)
            return False
        raise
