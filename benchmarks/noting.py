"""What it costs to note things in the history of their keys: a first run, a replay, and the room that it takes."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from celery_idempotent.core.history import DeliveryEvents, History, text_of
from celery_idempotent.events import Event, Replayed, TakenOver
from celery_idempotent.stores import HistoryEntry
from celery_idempotent.stores.records import HISTORY_LIMIT
from celery_idempotent.stores.redis.store import history_key

from .figure import Figure
from .sampling import interleave, ratio, timed
from .subject import HOUR, NoDelivery, Subject

__all__ = ["measure"]


def measure(subject: Subject, *, blocks: int, calls: int, replays: int) -> list[Figure]:
    """Have the guard answer deliveries as a task's binding does, with their events noted and without.

    The replays of a call are timed until the last of them is noted, once all of one key and once each of its own.

    Arguments:
        subject: What answers.
        blocks: Blocks per case.
        calls: Calls per block.
        replays: Replays in one call.
    """
    history = History()
    done = [subject.first_run(subject.claim()).key for _ in range(replays)]

    def note(event: Event) -> None:
        history.note(subject.store, event, 24 * HOUR)

    def answer(key: str | None, *, noting: bool) -> None:
        claim = subject.claim(key, "another" if key else "")
        events = DeliveryEvents(claim, "shop.charge", claim.task_id, note if noting else None)
        subject.guard.run(NoDelivery(events))

    def replay(keys: list[str], *, noting: bool) -> Callable[[], object]:
        def work() -> None:
            for key in keys:
                answer(key, noting=noting)
            history.flush(10)

        return lambda: timed(work) / replays

    arms: dict[str, Callable[[], object]] = {
        "first run, noting": lambda: answer(None, noting=True),
        "first run": lambda: answer(None, noting=False),
    }
    storms = {}
    for name, keys in (("replay", done), ("replay of one key", done[:1] * replays)):
        storms |= {f"{name}, noting": replay(keys, noting=True), name: replay(keys, noting=False)}
    samples = interleave(arms, blocks=blocks, calls=calls)
    samples |= interleave(storms, blocks=max(3, blocks // 10), calls=1)
    figures = []
    for name in ("first run", "replay", "replay of one key"):
        value, spread = ratio(samples[f"{name}, noting"].medians, samples[name].medians)
        said = f"{samples[f'{name}, noting']}; without {samples[name]}"
        figures.append(Figure("history", f"{name}, noted / not noted", value, "x", spread, note=said))
    return [*figures, *_sizes(subject)]


def _sizes(subject: Subject) -> list[Figure]:
    key, ids = "idem:shop.charge::ORD-1234567", {"task_id": str(uuid.uuid4()), "holder": "worker-7.example.org:4711"}
    found = []
    for number, event in (
        (1, TakenOver(key, fence=1, crashes=1, **ids)),
        (HISTORY_LIMIT, Replayed(key, age=3.5, **ids)),
    ):
        subject.client.delete(history_key(key))
        subject.store.append_history([HistoryEntry(key, text_of(event), 0, 24 * HOUR)] * number)
        size = float(subject.client.memory_usage(history_key(key), samples=0) or 0)
        found.append(Figure("history", f"history of {number} note{'s' * (number > 1)}", size, "bytes"))
    return found
