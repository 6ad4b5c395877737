"""Every command of the runbook is typed, in the situation of its section, and prints what the page shows, all of it."""

from __future__ import annotations

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
from celery_idempotent.stores import Claim, Lease, Reason, Record, Release, Store, open_store
from tests.cli.conftest import by_app
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.docs.pages import FENCE, ROOT
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.thorough]

APP = "tests.support.docs.runbook_app"
TASK = "idem:shop.charge::"
PAGES = "\n".join(
    (ROOT / "docs/guides" / page).read_text(encoding="utf-8") for page in ("runbook.md", "runbook-stores.md")
)
#: The sections with commands; the others are prose.
SECTIONS = {
    title: text
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^##? |\Z)", PAGES, re.MULTILINE | re.DOTALL)
    if "```console" in text
}
#: What is another one in each run, and what stands for it.
VARIABLE = (
    (r"\d\d:\d\d:\d\d", "TIME"),
    (r"celery@[\w.-]+|worker1@[\w.-]+", "NODE"),
    (r"redis://[\w.]+:\d+/\d+", "STORE"),
    (r"connecting to [\w.]+:\d+", "connecting to HOST"),
    (r"[\w.-]+@[\w.-]+(?= \()", "OPERATOR"),
    (r"\((celery )?idempotency (?=release|forget)", "(celery idempotency "),
    (r"[\w.-]+:\d{1,7}\b", "HOLDER"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8}\.\.\.", "ID"),
    (r"\b\d{16}\b", "FENCE"),
    (r"'(age|trusted_for|renewals)': [\d.e-]+", r"'\1': NUMBER"),
    (r"\b\d[\d.]* ?(s|min|m|h)\b", "TIME"),
    (r"\b\d[\d.]* ([KM]i)?B\b", "SIZE"),
)


def normalised(text: str) -> str:
    """Return an output without what is another one in each run, and without where its lines end."""
    for pattern, word in VARIABLE:
        text = re.sub(pattern, word, text)
    return " ".join(text.split())


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

    def record(self, order: str) -> Record:
        """Return the record of an order."""
        record = self.store.get(f"{TASK}{order}")
        assert record is not None
        return record

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
    wait_until(lambda: not night.record("ORD-2").remaining)  # else the next one is deferred, once or more often
    night.start_worker(APP, concurrency=1, env={"LEASE_TTL": "2"})
    for _ in range(2):
        assert charge.delay("ORD-2").get(timeout=60) == "charged ORD-2"
    # A history is written a moment after what it shows.
    wait_until(lambda: any("Replayed" in noted.text for noted in night.store.history(f"{TASK}ORD-2")))


def a_record_of_a_run_that_could_not_settle(night: Night) -> None:
    night.hold("ORD-3")


def a_crash_loop(night: Night) -> None:
    for number in range(5):
        night.store.release(night.hold("ORD-4", owner=f"owner {number}", redelivered=True), Release(Reason.CRASHED))
    claim = Claim(f"{TASK}ORD-4", "another", 60.0, 600.0, task_id="T1", redelivered=True, max_crashes=5)
    assert not isinstance(night.store.acquire(claim), Lease)


def two_orders(night: Night) -> None:
    for order in ("ORD-5", "ORD-8"):
        night.charge(order)


def no_store(night: Night) -> None:
    night.app.conf.idempotency_store = f"redis://127.0.0.1:{free_port()}/0"


SITUATIONS: dict[str, Callable[[Night], None]] = {
    "An operation hangs": a_living_holder,
    "Something happened twice": a_worker_was_killed,
    "The store is back": lambda night: night.charge("ORD-9"),
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
def test_what_a_section_types_prints_what_it_shows(night: Night, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    SITUATIONS[title](night)
    for command, expected in typed(SECTIONS[title]):
        status, said = answered(night, command)
        wanted = {Exit.UNREACHABLE} if title == "The store does not answer" else {Exit.OK}
        assert status in wanted, f"{command}: {said}"
        assert normalised(said) == normalised(expected), f"$ {command}\n{said}\n-- the page shows\n{expected}"


def test_no_output_is_elided() -> None:
    shown = [output for text in SECTIONS.values() for _, output in typed(text)]
    assert all(shown)
    assert not any(line.strip() == "..." for output in shown for line in output.splitlines())
