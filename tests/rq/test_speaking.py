"""What a worker says of its horse's lease where the store cannot be asked, and where it is not to be."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_idempotent.rq.horse import HorseClaim
from celery_idempotent.rq.worker import _Leases
from tests.support.servers import free_port


def worker_of(held: HorseClaim) -> Any:
    worker = _Leases()
    worker.connection = None  # the store has a URL of its own
    worker._offer = cast(Any, SimpleNamespace(held=lambda: held, owner="me"))
    return worker


def held(max_lease: float | None = None, store: str | None = "") -> HorseClaim:
    url = f"redis://127.0.0.1:{free_port()}/0" if store == "" else store
    return HorseClaim("idem:f:k", 60.0, 60.0, max_lease, url, True, "f", "id")


@pytest.mark.parametrize(("done", "speak"), [("renewed", "_renew"), ("released", "_release")])
def test_a_store_that_is_away_is_told_and_hurts_no_worker(
    done: str, speak: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(held())
    worker._speak(done, getattr(worker, speak))
    assert f"The lease on idem:f:k could not be {done} for its horse" in caplog.text


def test_a_store_that_it_does_not_know_is_told_once_for_each_horse(caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(held(store=None))
    for done, speak in (("renewed", worker._renew), ("renewed", worker._renew), ("released", worker._release)):
        worker._speak(done, speak)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["The lease on idem"]
    assert "can be neither renewed nor released for its horse: the store of f is an object" in caplog.text


def test_a_lease_is_not_renewed_beyond_its_longest(caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(held(max_lease=1.0))
    worker._began = monotonic() - 2.0
    worker._speak("renewed", worker._renew)
    assert caplog.text == ""
