"""The tests of Celery's and RQ's own suites that end differently when everything is guarded, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

#: The kinds of difference that are accepted, in the words of the report. docs/celery-suite.md explains them.
KINDS = {
    "acks_late": "guarded tasks are acknowledged after they ran, as with Celery's own task_acks_late",
    "same ids": "messages are sent twice with the same task ids: that is the same operation, which runs once",
    "no Redis": "the test's app has no Redis anywhere and names no store, so that there is nothing to keep records in",
    "unreadable meta": "the key of the job may be in a meta that its worker cannot read, so that it does not run",
}


@dataclass(frozen=True)
class Expected:
    """Why a test differs: one of `KINDS`, and the brokers with which it does."""

    kind: str
    brokers: tuple[str, ...] = ("redis", "rabbitmq")


EXPECTED: dict[str, dict[str, Expected]] = {
    "celery": {
        "test_canvas.py::test_chord::test_reapplying_frozen_chord_dispatches_body_again": Expected("same ids"),
        (
            "test_canvas.py::test_chain::test_chord_header_id_duplicated_on_rabbitmq_msg_duplication[redis-group-ids]"
        ): Expected("same ids", brokers=("rabbitmq",)),
        "test_inspect.py::test_Inspect::test_active": Expected("acks_late"),
        "test_inspect.py::test_Inspect::test_query_task": Expected("acks_late"),
        # The suite waits without a limit, until pytest-timeout ends it after 300 s.
        "test_tasks.py::test_tasks::test_expired": Expected("acks_late", brokers=("rabbitmq",)),
        "test_worker.py::test_django_fixup_direct_worker": Expected("no Redis"),
        "test_worker.py::test_django_fixup_signals_only_handled_by_own_app": Expected("no Redis"),
    },
    "rq": {
        "test_worker.py::TestWorker::test_retry_keeps_unreadable_meta": Expected("unreadable meta"),
    },
}
