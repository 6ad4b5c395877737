"""What it costs a process to keep its leases alive."""

from __future__ import annotations

from statistics import median
from time import monotonic, process_time

from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.stores import Lease

from .figure import Figure
from .subject import Subject

__all__ = ["measure"]


def measure(subject: Subject, *, leases: int, ticks: int) -> list[Figure]:
    """Beat for many leases at once, and share the processor time of a beat among the seconds until the next is due."""
    heartbeat = Heartbeat()
    for _ in range(leases):
        since = monotonic()
        lease = subject.store.acquire(subject.claim())
        assert isinstance(lease, Lease)
        heartbeat.watch(HeldLease(subject.store, lease, since))
    holdings = heartbeat.holdings()
    interval = holdings[0].due - since
    before, seconds, server = subject.commands(), [], []
    for _ in range(ticks):
        due = max(holding.due for holding in holdings)
        used, server_used = process_time(), _server_seconds(subject)
        heartbeat.beat(due)
        seconds.append(process_time() - used)
        server.append(_server_seconds(subject) - server_used)
    trips = (subject.commands()["evalsha"] - before["evalsha"]) / ticks
    assert not any(holding.lost for holding in holdings)
    for holding in holdings:
        heartbeat.forget(holding)
    share, server_share = (100 * median(sample) / interval for sample in (seconds, server))
    note = f"{median(seconds) * 1e3:.1f} ms of processor time every {interval:.0f} s"
    on_server = f"{median(server) * 1e3:.1f} ms of the server's one thread per tick"
    return [
        Figure("heartbeat", f"round trips per tick of {leases} leases", trips, "", reach=1),
        Figure("heartbeat", f"share of a core, {leases} leases", share, "%", reach=1.0, note=note),
        Figure("heartbeat", "share of the server's core", server_share, "%", note=on_server),
    ]


def _server_seconds(subject: Subject) -> float:
    used = subject.client.info("cpu")
    return float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])
