"""Every command of the runbook is typed, in the situation that its section speaks of, and answers as the page says."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from celery import Celery

from celery_idempotent.cli.common import Exit
from celery_idempotent.stores import Claim, Lease, Reason, Release, Store, open_store
from tests.cli.conftest import by_app
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.docs.pages import FENCE, ROOT
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.thorough]

APP = "tests.support.docs.runbook_app"
TASK = "idem:shop.charge::"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PAGE = (ROOT / "docs/guides/runbook.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
TYPED = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass
class Night:
    """Who is on call, and what there is to see.

    Arguments:
        app: The shop, as its command line loads it.
        store: Its store.
        start_worker, gates, env: See the fixtures of workers.
    """

    app: Celery
    store: Store
    start_worker: StartWorker
    gates: Gates
    env: dict[str, str]

    def charge(self, order: str) -> None:
        """Have an order charged, in this process."""
        self.app.tasks["shop.charge"].apply((order,)).get()

    def hold(self, order: str, **claim: object) -> Lease:
        """Be the holder of an order's key, who does nothing."""
        options = {"owner": f"owner of {order}", "lease_ttl": 60.0, "keep_ttl": 600.0, "task_id": "T1", **claim}
        lease = self.store.acquire(Claim(f"{TASK}{order}", holder="worker-1:4711", **options))  # type: ignore[arg-type]
        assert isinstance(lease, Lease)
        return lease


@pytest.fixture
def night(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    gates: Gates,
    worker_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Night]:
    monkeypatch.setenv("GATES", worker_env["GATES"])
    store = open_store(worker_env["STORE_URL"])
    yield Night(client_app(APP), store, start_worker, gates, worker_env)
    store.close()


def a_living_holder(night: Night) -> None:
    gate = night.gates.close("charging ORD-1")
    night.start_worker(APP, concurrency=1)
    night.app.tasks["shop.charge"].delay("ORD-1")
    gate.reached()


def a_worker_was_killed(night: Night) -> None:
    night.charge("ORD-2b")
    gate = night.gates.close("charging ORD-2")
    first = night.start_worker(APP, concurrency=1, env={"LEASE_TTL": "2"})
    charge = night.app.tasks["shop.charge"]
    charge.delay("ORD-2")
    gate.reached()
    first.kill()
    gate.open()
    night.start_worker(APP, concurrency=1, env={"LEASE_TTL": "2"})
    assert charge.delay("ORD-2").get(timeout=60) == "charged ORD-2"
    # A history is written a moment after what it tells.
    wait_until(lambda: any("Completed" in noted.text for noted in night.store.history(f"{TASK}ORD-2")))


def a_record_of_a_run_that_could_not_settle(night: Night) -> None:
    night.hold("ORD-3")


def a_crash_loop(night: Night) -> None:
    night.store.release(night.hold("ORD-4"), Release(Reason.CRASHED))
    claim = Claim(f"{TASK}ORD-4", "another", 60.0, 600.0, task_id="T1", redelivered=True, max_crashes=1)
    assert not isinstance(night.store.acquire(claim), Lease)


def two_orders(night: Night) -> None:
    night.charge("ORD-5")
    night.charge("ORD-8")


def no_store(night: Night) -> None:
    night.app.conf.idempotency_store = f"redis://127.0.0.1:{free_port()}/0"


SITUATIONS: dict[str, Callable[[Night], None]] = {
    "A key is stuck": a_living_holder,
    "Duplicates are reported": a_worker_was_killed,
    "Redis was restarted": lambda night: night.charge("ORD-9"),
    "An effect is not recorded": a_record_of_a_run_that_could_not_settle,
    "A task crash-loops": a_crash_loop,
    "An operation was done wrongly": two_orders,
    "The store does not answer": no_store,
    "The store is full": lambda night: night.charge("ORD-6"),
}


def test_every_section_has_its_situation() -> None:
    assert set(SECTIONS) == set(SITUATIONS)
    assert all(typed(text) for text in SECTIONS.values())


def typed(text: str) -> list[tuple[str, str]]:
    """Return what a section has typed, with what it says that is answered."""
    consoles = [match["text"] for match in FENCE.finditer(text) if match["language"].strip() == "console"]
    return [
        found for console in consoles for found in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)
    ]


def answered(night: Night, command: str) -> tuple[int, str]:
    """Type a command, and return its status with all that it prints."""
    words = shlex.split(command)
    assert words[:3] == ["celery", "-A", "proj"]
    if words[3] == "idempotency":
        said = by_app(night.app, *words[4:])
        return said.status, said.out + said.err
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, *words[3:]],
        env={**os.environ, **night.env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize("title", SITUATIONS)
def test_what_a_section_types_answers_as_it_says(night: Night, title: str) -> None:
    SITUATIONS[title](night)
    for command, expected in typed(SECTIONS[title]):
        status, said = answered(night, command)
        wanted = {Exit.UNREACHABLE} if title == "The store does not answer" else {Exit.OK}
        assert status in (wanted | {Exit.NO} if command.endswith("doctor") else wanted), f"{command}: {said}"
        any_lines = re.sub(r"^\.\.\.\n", "...", expected, flags=re.MULTILINE)  # also none
        shown = doctest.OutputChecker().check_output(any_lines, said, FLAGS)
        assert shown, f"$ {command}\n{said}\n-- the page says\n{expected}"
