"""What a first run and a replay cost, against bare SETs of the same client."""

from __future__ import annotations

from collections.abc import Callable

from celery_idempotent.stores import Claim

from .figure import Figure
from .sampling import interleave, ratio, timed
from .subject import HOUR, OUTCOME, Subject

__all__ = ["measure"]


def measure(subject: Subject, *, blocks: int, calls: int) -> list[Figure]:
    """Time the store's verbs alone, and the guard with all that a delivery needs.

    Without the guard, the claim is made before the clock starts. With it, the time includes the claim, its owner, the
    envelope of the result, the events and the heartbeat's list.
    """
    done = subject.first_run(subject.claim()).key
    day = int(24 * HOUR * 1000)
    client, payload = subject.client, OUTCOME.payload

    def sets(number: int) -> Callable[[], object]:
        def arm() -> float:
            key = subject.claim().key
            return timed(lambda: [client.set(key, payload, px=day) for _ in range(number)])

        return arm

    def verbs(key: str | None, call: Callable[[Claim], object]) -> Callable[[], object]:
        def arm() -> float:
            claim = subject.claim(key)
            return timed(lambda: call(claim))

        return arm

    arms: dict[str, Callable[[], object]] = {
        "2 SET": sets(2),
        "first run": verbs(None, subject.first_run),
        "first run, guard included": subject.guarded,
        "1 SET": sets(1),
        "replay": verbs(done, subject.store.acquire),
        "replay, guard included": lambda: subject.guarded(done),
    }
    samples = interleave(arms, blocks=blocks, calls=calls)
    figures = []
    for name, bare, reach in (
        ("first run", "2 SET", 1.15),
        ("first run, guard included", "2 SET", None),
        ("replay", "1 SET", 1.20),
        ("replay, guard included", "1 SET", None),
    ):
        value, spread = ratio(samples[name].medians, samples[bare].medians)
        note = f"{samples[name]}; {bare} {samples[bare]}"
        figures.append(Figure("latency", f"{name} / {bare}", value, "x", spread, reach, note=note))
    return figures
