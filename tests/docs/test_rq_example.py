"""The example for RQ, on a real worker: what a reader is told to do is done, and what they are told to see is seen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rq.job import Job

from tests.support import processes
from tests.support.docs.pages import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker

#: What `rq` is, wherever the environment's scripts are.
RQ = "import sys; from rq.cli import main; sys.exit(main())"


@pytest.fixture
def ledger(tmp_path: Path) -> Callable[[], list[str]]:
    path = tmp_path / "ledger.txt"
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def shop(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from examples import rq_shop

    monkeypatch.setattr(rq_shop, "URL", redis_url)
    return rq_shop


@pytest.fixture
def log(redis_url: str, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """What a worker writes, which is started as the example says."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LEDGER": str(tmp_path / "ledger.txt"), "SECONDS": "3"}
    [line] = re.findall(r"rq (worker .*)", (ROOT / "examples" / "rq_shop.py").read_text())
    path = tmp_path / "worker.log"
    with path.open("wb") as out:
        command = [sys.executable, "-u", "-c", RQ, *line.split(), "--url", redis_url]
        process = processes.spawn(command, env=env, cwd=ROOT, stdout=out, stderr=out)
    yield lambda: path.read_text(errors="replace")
    processes.end(process)


def charging(log: Callable[[], str]) -> list[int]:
    """Return the horses that have said that they charge, in their order."""
    return [int(pid) for pid in re.findall(r"process (\d+) charges", log())]


def ended(shop: ModuleType, job: Job, log: Callable[[], str]) -> str:
    wait_until(lambda: str(getattr(job.get_status(), "value", "")) in ("finished", "failed"), 60, log)
    return str(shop.wait(job))


@pytest.mark.nightly
def test_after_the_kill_of_its_horse_an_order_is_charged_once_and_a_duplicate_gets_the_receipt(
    shop: ModuleType, log: Callable[[], str], ledger: Callable[[], list[str]]
) -> None:
    job = shop.order("ORD-1", 999)
    [horse] = wait_until(lambda: charging(log), 60, log)
    os.kill(horse, signal.SIGKILL)
    assert ended(shop, job, log) == "finished, ran: receipt for ORD-1"
    assert len(charging(log)) == 2
    assert ended(shop, shop.order("ORD-1", 999), log) == "finished, replayed: receipt for ORD-1"
    assert ledger() == ["charged ORD-1 999"]


def test_a_declined_card_is_not_tried_again(
    shop: ModuleType, log: Callable[[], str], ledger: Callable[[], list[str]]
) -> None:
    for outcome in ("ran", "replayed"):
        job = shop.order("ORD-2", 200_000)
        assert ended(shop, job, log) == f"failed, {outcome}: None"
        assert "CardDeclined: ORD-2 is above the limit" in job.latest_result().exc_string
    assert ledger() == []


@pytest.mark.nightly
def test_what_the_example_tells_to_type_prints_how_the_job_has_ended(redis_url: str, log: Callable[[], str]) -> None:
    command = [sys.executable, "-m", "examples.rq_shop", "ORD-3", "999"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RQ_REDIS_URL": redis_url}
    printed = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == "finished, ran: receipt for ORD-3\n"
