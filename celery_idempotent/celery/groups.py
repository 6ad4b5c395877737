"""One key names one operation: a key given to a group, or to a chord, would name several, and is refused."""

from __future__ import annotations

import functools
from typing import Any

from celery.canvas import _basemap, _chord, chunks, group

from ..errors import ConfigurationError
from .identity import KEY

__all__ = ["refuse_keys"]


def refuse_keys() -> None:
    """Have Celery's canvas refuse a key that would be given to several tasks; to ask twice is the same as once.

    Celery hands the options of a group to each of its members, and those of a chord to its body too. A receiver of
    ``before_task_publish`` can neither tell that from a key of each member's own, nor refuse: Celery logs what a
    receiver raises, and publishes.
    """
    for kind in (group, _chord, _basemap, chunks):
        for name in ("set", "apply_async", "apply"):
            method = getattr(kind, name)
            if not hasattr(method, "refuses_keys"):
                setattr(kind, name, _refusing(method))


def _refusing(method: Any) -> Any:
    @functools.wraps(method)
    def refusing(self: Any, *args: Any, **options: Any) -> Any:
        if options.get(KEY, self.options.get(KEY)) is not None:
            what = self.task.removeprefix("celery.")
            raise ConfigurationError(
                f"Expected {KEY} to name one operation, got one for a {what}, which is several. Give each task a key "
                f"of its own, as in group(charge.s(order).set({KEY}=order) for order in orders)."
            )
        return method(self, *args, **options)

    refusing.refuses_keys = True  # type: ignore[attr-defined]
    return refusing
