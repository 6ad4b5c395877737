"""Keys of signatures: one key names one operation, so that none is for a group; and none is called by another name."""

from __future__ import annotations

import functools
from typing import Any

from celery.canvas import Signature, _basemap, _chord, chunks, group

from ..errors import ConfigurationError
from .declarations import refuse_mistakes
from .identity import KEY

__all__ = ["refuse_keys"]


def refuse_keys() -> None:
    """Have Celery's canvas refuse a key for several tasks, and a slip for a key; to call twice is the same as once.

    Celery hands the options of a group to each of its members, and those of a chord to its body too. A receiver of
    ``before_task_publish`` can neither tell that from a key of each member's own, nor refuse: Celery logs what a
    receiver raises, and publishes.
    """
    if not hasattr(Signature.set, "refuses_mistakes"):
        setattr(Signature, "set", _checking(Signature.set))  # noqa: B010 - mypy knows no other way
    for kind in (group, _chord, _basemap, chunks):
        for name in ("set", "apply_async", "apply"):
            method = getattr(kind, name)
            if not hasattr(method, "refuses_keys"):
                setattr(kind, name, _refusing(method))


def _checking(method: Any) -> Any:
    @functools.wraps(method)
    def checking(self: Any, immutable: Any = None, **options: Any) -> Any:
        refuse_mistakes(f"a signature of {self.task}", options, guarded=False)  # any task's
        return method(self, immutable, **options)

    checking.refuses_mistakes = True  # type: ignore[attr-defined]
    return checking


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
