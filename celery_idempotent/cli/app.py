"""``celery -A proj idempotency``: the commands, with the stores and the tasks of an app.

Every command of Celery loads this module where the library is installed: ``celery inspect``, and a worker, also one
that has no idempotent task. So it is here that both learn of ``celery inspect idempotency``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..celery import inspect
from ..celery.app import TaskKeys, used_stores
from ..errors import ConfigurationError
from .common import CHECKUP, KEYS, STORES, Commands

if TYPE_CHECKING:
    from .doctor.findings import Section, Target


COMMANDS = ("doctor", "explain", "forget", "list", "purge", "release", "schema", "show", "stats", "watch", "web")

inspect.register()


@click.group(cls=Commands, modules=COMMANDS)
@click.pass_context
def idempotency(context: click.Context) -> None:
    """Look at what is remembered of idempotent tasks, in every store that they use."""
    app = context.obj.app
    context.meta[STORES] = partial(_loaded, used_stores, app)
    context.meta[KEYS] = partial(_loaded, TaskKeys, app)
    context.meta[CHECKUP] = partial(_checkup, app)
    if getattr(context.obj, "no_color", False):  # celery --no-color
        context.color = False


def _loaded(use: Callable[[Any], Any], app: Any) -> Any:
    """Return what a function makes of an app whose tasks are loaded."""
    _load(app)
    try:
        return use(app)
    except ConfigurationError as error:
        if app.main in (None, "default"):
            hint = "If your app has one, name the app: celery -A proj idempotency COMMAND"
            raise ConfigurationError(f"{error} {hint}") from error
        raise


def _checkup(app: Any) -> tuple[Section, list[Target]]:
    from .doctor.app import checkup

    return checkup(app, partial(_load, app))


def _load(app: Any) -> None:
    try:
        app.loader.import_default_modules()  # a worker does, and tasks may name stores of their own
    except ImportError as error:
        raise ConfigurationError(
            f"Expected the modules of the app's tasks to be there, as its imports and include name them, got: {error}"
        ) from error
    except SystemExit as error:  # else the command would end there, and with 0 as if all were well
        raise ConfigurationError(
            f"Expected the modules of the app's tasks to be imported, got: one called sys.exit({error.code!r}). Put "
            'what a script does under if __name__ == "__main__":.'
        ) from error
