"""How long purging keeps others waiting."""

from __future__ import annotations

import threading

from celery_idempotent.stores import open_store
from celery_idempotent.stores.sqlite import SqliteStore

from .figure import Figure
from .filling import expire, fill
from .sampling import timed
from .subject import StoreSubject

__all__ = ["measure"]

#: Seconds that nobody shall wait for a purge.
LONGEST = 0.05


def measure(kind: str, url: str, *, records: int) -> list[Figure]:
    """Time first runs while nothing else happens, then while another connection purges so many expired records.

    Arguments:
        kind: Which kind of store.
        url: Of an empty place of this kind.
        records: How many have expired.
    """
    with StoreSubject(open_store(url)) as serving, StoreSubject(open_store(url)) as purging:
        model = purging.first_run(purging.claim()).key
        fill(url, model, records)
        expired = expire(url, f"{model[:-9]}-%")
        if isinstance(serving.store, SqliteStore):
            serving.store.purge_every = 0  # others shall purge
        for _ in range(50):
            serving.guarded()
        alone = sorted(timed(serving.guarded) for _ in range(500))
        removed: list[int] = []
        thread = threading.Thread(target=lambda: removed.append(purging.store.purge()))
        seconds: list[float] = []
        took = timed(lambda: _while(thread, lambda: seconds.append(timed(serving.guarded))))
    assert sum(removed) >= expired * 0.9, (removed, expired)
    seconds.sort()
    p99, worst = seconds[int(0.99 * (len(seconds) - 1))], seconds[-1]
    note = f"{len(seconds)} first runs beside it; alone p99 {alone[-6] * 1e3:.1f}, worst {alone[-1] * 1e3:.1f} ms"
    return [
        Figure("purging", f"{kind}, records removed a second", expired / took, "", note=f"{expired} records"),
        Figure("purging", f"{kind}, p99 of a first run meanwhile", p99 * 1e3, "ms", reach=LONGEST * 1e3, note=note),
        Figure("purging", f"{kind}, worst first run meanwhile", worst * 1e3, "ms"),
    ]


def _while(thread: threading.Thread, call: object) -> None:
    thread.start()
    call()  # type: ignore[operator]  # a short purge may have ended by now, and had no run beside it
    while thread.is_alive():
        call()  # type: ignore[operator]
    thread.join()
