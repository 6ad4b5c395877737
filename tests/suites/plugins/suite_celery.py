"""Makes `IdempotentTask` the class of every task of Celery's own suite, and counts the deliveries that it guards."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import celery
from celery import signals
from celery.app.base import Celery
from suite_counts import GUARDS, count


def is_built_in(name: str) -> bool:
    """Return whether Celery or the library brings the task, as ``celery.ping``; those are not guarded, by design."""
    return name.startswith(("celery.", "celery_idempotent."))


def count_run(task: Any = None, **_: Any) -> None:
    """Count a task that a tracer is about to run."""
    if not is_built_in(task.name):
        count("ran", task.name)


signals.task_prerun.connect(count_run, weak=False)

if GUARDS:
    from celery_idempotent import IdempotentTask
    from celery_idempotent.celery.delivery import CeleryDelivery

    Celery.task_cls = "celery_idempotent:IdempotentTask"  # as text, which Celery does not take for an app's own choice
    celery.Task = IdempotentTask  # for tasks that a suite declares as classes
    with suppress(ImportError):
        # Celery has this one for apps with Django; they combine the two.
        from celery.contrib.django import task as of_django

        of_django.DjangoTask = type("DjangoTask", (IdempotentTask, of_django.DjangoTask), {"abstract": True})

    answer = CeleryDelivery.answer

    def counted(self: CeleryDelivery) -> Any:
        count("guarded", self.task.name)
        return answer(self)

    CeleryDelivery.answer = counted  # type: ignore[method-assign]
