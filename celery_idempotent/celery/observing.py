"""What a worker shows of itself: a section of its statistics, and news for its monitors."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from . import counts, leases, news

__all__ = ["SECTION", "ObservingStep", "prepare"]

#: The section of ``celery inspect stats``.
SECTION = "idempotency"


def prepare(*, children: bool) -> None:
    """Make what the worker shares with its children, before they are forked.

    Arguments:
        children: Whether its pool forks them.
    """
    counts.prepare()
    leases.prepare()
    news.prepare(children=children)


class ObservingStep(bootsteps.StartStopStep):
    """Let monitors see what a worker's deliveries have come to."""

    name = "celery_idempotent.observing"
    requires = ("celery.worker.consumer.events:Events",)

    def start(self, c: Any) -> None:
        """Begin with the event dispatcher of a new connection."""
        news.attach(c)

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Have the event loop send what children tell."""
        reader = news.reader()
        if reader is not None:
            hub.add_reader(reader, news.drain)

    def stop(self, c: Any) -> None:
        """Go on: bodies that still run have something to tell."""

    def info(self, c: Any) -> dict[str, dict[str, int]]:
        """Return the section of the worker's statistics: live leases, then events by kind since it started."""
        return {SECTION: {"leases": len(leases.leases()), **counts.counts()}}
