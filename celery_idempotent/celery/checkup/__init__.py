"""What is wrong with the configuration of an app and its tasks, and what to do about it.

Nothing is asked of a server here: the checks read what the app says. A check is a small function that looks at one
thing; its name is the code of what it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...doctor.examination import Check, examined, failed
from ...doctor.finding import Section
from ...errors import ConfigurationError
from ...stores import hide_password
from ...stores.used import UsedStore
from ..binding import default_namespace, store_of
from ..purging import PURGE
from ..used import used_stores
from . import brokers, declarations, durations, places, results, visibility
from .facts import Facts

__all__ = ["CHECKS", "Checkup", "checkup"]

CHECKS: tuple[Check, ...] = (
    *declarations.CHECKS,
    *durations.CHECKS,
    *visibility.CHECKS,
    *brokers.CHECKS,
    *results.CHECKS,
    *places.CHECKS,
)


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found of an app, and what else is to be examined.

    Arguments:
        section: What was found.
        stores: The stores that the app uses, as far as they can be told.
        purged: Whether beat purges them.
    """

    section: Section
    stores: list[UsedStore]
    purged: bool


def checkup(app: Any, load: Callable[[], object] = lambda: None) -> Checkup:
    """Look at an app.

    Arguments:
        app: A Celery app.
        load: Imports the modules of its tasks.
    """
    section = Section(f"app {app.main or '(without a name)'}")
    try:
        load()
        facts = Facts(app)
        section.findings += examined(CHECKS, facts)
        stores = used_stores(app)
    except ConfigurationError as error:
        if not any(found.error for found in section.findings):
            section.findings.append(failed(error))
        return Checkup(section, _own_store(app), False)
    return Checkup(section, stores, any(entry["task"] == PURGE for entry in facts.scheduled.values()))


def _own_store(app: Any) -> list[UsedStore]:
    """Return the store that the app names, where its tasks do not let us see which they use."""
    wanted = app.conf.get("idempotency_store")
    if not wanted:
        return []
    try:
        store = store_of(app, wanted)
    except ConfigurationError:
        return []
    name = hide_password(wanted) if isinstance(wanted, str) else type(store).__name__
    return [UsedStore(name, store, (default_namespace(app, None),))]
