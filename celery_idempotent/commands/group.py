"""A group of commands that are imported when they are asked for, and that end in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from ..errors import IdempotencyError
from .exits import Exit, status_of

__all__ = ["URL", "CommandFailed", "Commands"]

#: Where a command line keeps the URL of the store that it names, in the meta of click's context.
URL = "celery_idempotent.url"


class CommandFailed(click.ClickException):
    """An error as one line on standard error, and as the exit status that goes with it."""

    def __init__(self, error: IdempotencyError) -> None:
        super().__init__(" ".join(str(error).split()))
        setattr(self, "exit_code", status_of(error))  # noqa: B010 - click says that it is the class's


class Commands(click.Group):
    """Commands by name, each the ``command`` of the module of that name here.

    Arguments:
        modules: The names.
        attributes: What click's groups take.
    """

    def __init__(self, *args: Any, modules: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._modules = tuple(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, sorted."""
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, or None if there is none."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(f"{__package__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name, and suggest the one that was meant."""
        name = args[0] if args else ""
        if not name.startswith("-") and name not in self._modules:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There is {', '.join(map(repr, known))}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name; what is wrong with a store is an error in words."""
        try:
            return super().invoke(ctx)
        except IdempotencyError as error:
            raise CommandFailed(error) from error
        except (click.Abort, KeyboardInterrupt):
            ctx.exit(Exit.INTERRUPTED)
