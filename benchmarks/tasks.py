"""The tasks of the benchmark's app, as a publisher sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

__all__ = ["Publish", "publishers"]

Publish = Callable[[int], None]
_numbers = count()


def publishers(tasks: Mapping[str, Any], **options: Any) -> dict[str, Publish]:
    """Return what publishes a number of messages of each task, no two with the same argument.

    Arguments:
        tasks: Tasks of one argument, by the name of their arm.
        options: Of `apply_async`.
    """

    def publisher(task: Any) -> Publish:
        def publish(messages: int) -> None:
            for _ in range(messages):
                task.apply_async((next(_numbers),), **options)

        return publish

    return {name: publisher(task) for name, task in tasks.items()}
