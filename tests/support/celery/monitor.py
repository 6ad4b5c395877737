"""What a monitor such as Flower is told: the events of a broker, and the state that Celery makes of them."""

from __future__ import annotations

import threading
from typing import Any

from celery import Celery
from celery.events.state import State

from tests.support.waiting import wait_until

READY = "monitor-ready"


class Monitor:
    """Receives the events of an app's workers, in a thread."""

    def __init__(self, app: Celery) -> None:
        self.events: list[dict[str, Any]] = []
        self.state = State()
        self._app = app
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(self._connection, handlers={"*": self._hear})
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        with self._app.connection_for_write() as connection:
            dispatcher = self._app.events.Dispatcher(connection)

            def heard() -> bool:
                dispatcher.send(READY)
                return any(event["type"] == READY for event in list(self.events))

            wait_until(heard, message="the monitor to hear its own event")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(10)
        self._connection.release()

    def types(self, task_id: str) -> list[str]:
        """Return the types of the events of a task, in their order, without ``task-``."""
        return [event["type"].removeprefix("task-") for event in self.of(task_id)]

    def of(self, task_id: str) -> list[dict[str, Any]]:
        """Return the events of a task."""
        return [event for event in list(self.events) if event.get("uuid") == task_id]

    def facts(self, task_id: str, kind: str) -> dict[str, Any]:
        """Return what the one event of this type says."""
        (event,) = [event for event in self.of(task_id) if event["type"] == f"task-{kind}"]
        return dict(event["idempotency"])

    def wait_for(self, task_id: str, kind: str, timeout: float = 20.0) -> None:
        """Wait until a task has had an event of this type."""
        wait_until(
            lambda: kind in self.types(task_id), timeout, lambda: f"task-{kind}; there were {self.types(task_id)}"
        )

    def task(self, task_id: str) -> Any:
        """Return the task as Celery's own state has it."""
        return self.state.tasks.get(task_id)

    def _hear(self, event: dict[str, Any]) -> None:
        if event["type"] != READY:
            self.state.event(dict(event))
        self.events.append(event)  # last: a test that sees it looks at the state next

    def _receive(self) -> None:
        try:
            self._receiver.capture(limit=None, timeout=None, wakeup=False)
        except Exception:
            if not self._receiver.should_stop:
                raise
