"""What settling within a task's own transaction adds to that transaction."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from celery_idempotent.stores import Lease, open_store
from tests.support.celery.business import Business

from .figure import Figure
from .sampling import interleave, ratio, timed
from .subject import HOUR, OUTCOME, StoreSubject

__all__ = ["measure"]


def measure(kind: str, url: str, *, blocks: int, calls: int) -> list[Figure]:
    """Time a transaction of one INSERT, without and with a settle in it, and with one in a transaction after it.

    The claim is made before the clock starts.

    Arguments:
        kind: Which kind of store.
        url: Of an empty place of this kind.
        blocks: Blocks per case.
        calls: Calls per block.
    """
    business = Business(url)
    business.create()
    connection = business.connect()
    with StoreSubject(open_store(url)) as subject:

        def insert() -> None:
            business.charge(connection, "ORD-1", uuid.uuid4().hex)

        def bare(lease: Lease) -> None:
            insert()
            connection.commit()

        def within(lease: Lease) -> None:
            insert()
            subject.store.settle_within(lease, OUTCOME, ttl=24 * HOUR, using=connection)
            connection.commit()

        def apart(lease: Lease) -> None:
            bare(lease)
            subject.store.settle(lease, OUTCOME, ttl=24 * HOUR)

        def arm(work: Callable[[Lease], None]) -> Callable[[], object]:
            def run() -> float:
                lease = subject.store.acquire(subject.claim())
                assert isinstance(lease, Lease)
                return timed(lambda: work(lease))

            return run

        arms = {"bare": arm(bare), "within": arm(within), "apart": arm(apart)}
        samples = interleave(arms, blocks=blocks, calls=calls)
    connection.close()
    figures = []
    for name, words in (("within", "with a settle in it"), ("apart", "and a settle after it")):
        value, spread = ratio(samples[name].medians, samples["bare"].medians)
        note = f"{samples[name]}; bare {samples['bare']}"
        figures.append(Figure("within", f"{kind}, transaction {words} / bare", value, "x", spread, note=note))
    return figures
