"""Ask a person, where there is one."""

from __future__ import annotations

import click

__all__ = ["confirmed"]


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
