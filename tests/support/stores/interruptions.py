"""Connections of redis-py whose opening is interrupted, as by a soft time limit."""

from __future__ import annotations

from typing import Any

import redis

__all__ = ["HalfMade", "Interrupted", "Interruption"]


class Interruption(Exception):
    """What a signal raises, as a soft time limit does."""


class Interrupted(redis.Connection):
    """A connection that is interrupted once, when it has said hello and is about to read the reply."""

    due = True

    def read_response(self, *args: Any, **options: Any) -> Any:
        if self.due:
            self.due = False
            raise Interruption
        return super().read_response(*args, **options)


class HalfMade(redis.Connection):
    """A connection that is interrupted once, when it has a socket and nothing to read it with."""

    due = True

    def on_connect(self) -> None:  # redis-py 5
        self.interrupt()
        super().on_connect()  # type: ignore[no-untyped-call]

    def on_connect_check_health(self, *args: Any, **options: Any) -> None:
        self.interrupt()
        super().on_connect_check_health(*args, **options)

    def interrupt(self) -> None:
        if self.due:
            self.due = False
            raise Interruption
