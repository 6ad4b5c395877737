"""RQ's worker beside ours; and both held up where they have taken a job which RQ does not know yet that they begin."""

from __future__ import annotations

from typing import Any

from rq import Worker

from celery_idempotent.rq import IdempotentWorker
from tests.support.celery.gates import Gates


class WarmWorker(Worker):
    """RQ's, which has imported as much as ours: a horse that has to import the library takes that much longer."""


class _Held:
    def execute_job(self, *args: Any) -> None:
        """Come to the gate `taken` first."""
        Gates.from_env().wait("taken")
        super().execute_job(*args)  # type: ignore[misc]


class HeldWorker(_Held, Worker):
    """RQ's."""


class HeldIdempotentWorker(_Held, IdempotentWorker):
    """Ours."""
