"""Where the results of one task go that are too large for their records: Celery's result backend, or files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from kombu.exceptions import ContentDisallowed, DecodeError

from ..binding import BACKEND
from ..errors import StoreUnreachable
from ..files import FileAnnex
from ..payloads import Kind, Payload
from ..references import TASK, Annex, Origin, Unkept
from . import fanout

__all__ = ["TaskAnnex", "is_published", "is_shared"]

#: Seconds in which a run that has settled surely hands its result to the backend, if it lives.
HANDOVER = 60.0


class TaskAnnex(Annex):
    """Keeps the large results of one task where its policy says, and reads them wherever they were left.

    Arguments:
        task: The task.
        wanted: Its option ``large_results``.
    """

    def __init__(self, task: Any, wanted: str | None) -> None:
        self._task = task
        self._wanted = wanted
        self._files = None if wanted in (None, BACKEND) else FileAnnex(str(wanted))

    def keep(self, content: bytes, origin: Origin) -> str:
        """Keep a payload where the policy says; Celery itself will give the backend what the backend keeps."""
        if self._files is not None:
            return self._files.keep(content, origin)
        if self._wanted is None:
            raise Unkept
        if not origin.published:
            raise Unkept(
                "the result backend does not keep it (no backend, rpc://, ignore_result, or a call of apply())"
            )
        return f"{TASK}{origin.task_id}"

    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        """Read a result from the backend or from its file."""
        if reference.startswith(TASK):
            return self._left_in_backend(reference[len(TASK) :], age)
        if self._files is not None:
            return self._files.read(reference, decode, age)
        return Payload(Kind.UNAVAILABLE, reason=f"it is at {reference}, and large_results names no place of files")

    def _left_in_backend(self, task_id: str, age: float) -> Payload:
        if not is_shared(self._task.backend):
            return Payload(Kind.UNAVAILABLE, reason=f"it was left to a result backend as task {task_id}; here is none")
        try:
            meta = self._task.backend.get_task_meta(task_id, cache=False)  # it is large, and nobody asks twice
        except (ContentDisallowed, DecodeError) as error:
            return Payload(Kind.UNAVAILABLE, reason=f"the result backend has it and cannot read it: {error}")
        except Exception as error:
            raise StoreUnreachable(
                f"Expected the result of task {task_id} from the result backend, got {type(error).__name__}: the "
                "operation is done, and its result will be read once the backend answers"
            ) from error
        if meta["status"] == states.SUCCESS:
            return Payload(Kind.VALUE, meta["result"])
        if meta["status"] in states.UNREADY_STATES and age < HANDOVER:
            raise StoreUnreachable(
                f"Expected the result of task {task_id} in the result backend, got {meta['status']}: it was settled "
                f"{age:.0f} s ago and is on its way there"
            )
        return Payload(
            Kind.UNAVAILABLE,
            reason=f"the result backend was to have it as task {task_id}, and says {meta['status']}: it has expired or "
            "was removed there, or its worker died before it got there",
        )


def is_published(task: Any, request: Any) -> bool:
    """Tell whether Celery will keep the result of a delivery in a backend where others can read it."""
    # Releases of Celery differ in whether a message may overrule a task that ignores its results.
    if task.ignore_result or fanout.ignores_result(task, request) or (request.is_eager and not task.store_eager_result):
        return False
    return is_shared(task.backend)


def is_shared(backend: Any) -> bool:
    """Tell whether a result in this backend is there for everybody; that of rpc:// is a message to one caller."""
    return not isinstance(backend, (DisabledBackend, RPCBackend))
