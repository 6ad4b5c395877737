"""`doctor --rq`: what it finds in RQ's queues, with jobs and workers as RQ leaves them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis
from rq import Queue, Retry
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import SimpleWorker

from celery_idempotent.cli import cli
from celery_idempotent.cli.common import Exit
from celery_idempotent.cli.doctor.rq import CHECKS, _set_up_django
from celery_idempotent.rq import idempotent
from tests.support.servers import free_port, open_client


def plain(order_id: str) -> None:
    """Do what a job does."""


@idempotent(key="order_id")
def charge(order_id: str) -> str:
    return f"charged {order_id}"


@idempotent(key="order_id", lease_ttl=2, result_ttl=1000, max_lease=30, store_result=False)
def hasty(order_id: str) -> None:
    """Do what a job does."""


@idempotent(key="order_id", lease_ttl=3600)
def lengthy(order_id: str) -> None:
    """Do what a job does."""


@idempotent(key="order_id", store="memory://")
def forgetful(order_id: str) -> None:
    """Do what a job does."""


@idempotent(key="order_id", store="redis://localhost/1?sokcet_timeout=3")
def misspelled(order_id: str) -> None:
    """Do what a job does."""


@pytest.fixture
def connection(redis_url: str) -> Iterator[Redis]:
    with open_client(redis_url) as client:
        yield client


@pytest.fixture
def queue(connection: Redis) -> Queue:
    return Queue(connection=connection)


@pytest.fixture
def found(redis_url: str) -> Callable[[], dict[str, str]]:
    """A function that returns the severity of each finding about the queues that is not ok, by its code."""

    def examine() -> dict[str, str]:
        result = CliRunner().invoke(cli, ["doctor", "--rq", redis_url, "--json"])
        queues, *_ = json.loads(result.stdout)["sections"]
        assert queues["name"] == f"RQ queues in {redis_url}"
        return {each["code"]: each["severity"] for each in queues["findings"] if each["severity"] != "ok"}

    return examine


def served(queue: Queue) -> SimpleWorker:
    """Register a worker of a queue, and a scheduler."""
    worker = SimpleWorker([queue], connection=queue.connection)
    worker.register_birth()
    queue.connection.set(f"rq:scheduler-lock:{queue.name}", 1, ex=60)
    return worker


def test_jobs_that_are_retried_by_workers_with_a_scheduler_are_well(
    queue: Queue, found: Callable[[], dict[str, str]]
) -> None:
    queue.enqueue(charge, "ORD-1", retry=Retry(max=3))
    served(queue)
    assert found() == {}


def test_jobs_that_are_partials_or_written_as_json_are_found_guarded(
    queue: Queue, found: Callable[[], dict[str, str]]
) -> None:
    written = Queue(connection=queue.connection, serializer=JSONSerializer)
    for each, function in ((queue, functools.partial(charge)), (written, charge)):
        each.enqueue(function, "ORD-1", retry=Retry(max=3))
    served(queue)
    assert found() == {}


def unserved(queue: Queue) -> None:
    queue.enqueue(charge, "ORD-1", retry=Retry(max=3))


def unscheduled(queue: Queue) -> None:
    unserved(queue)
    served(queue)
    queue.connection.delete(f"rq:scheduler-lock:{queue.name}")


def with_jobs(*jobs: tuple[Any, dict[str, Any]]) -> Callable[[Queue], object]:
    def enqueue(queue: Queue) -> None:
        served(queue)
        for function, options in jobs:
            queue.enqueue(function, "ORD-1", **options)

    return enqueue


def stalled(queue: Queue) -> None:
    job = queue.enqueue(charge, "ORD-1", retry=Retry(max=3))
    queue.connection.zadd(StartedJobRegistry(queue=queue).key, {f"{job.id}:x": 1})
    served(queue)


RETRIED = {"retry": Retry(max=3)}
CASES: dict[str, tuple[Callable[[Queue], object], dict[str, str]]] = {
    "no jobs": (served, {"no-jobs": "info"}),
    "no worker": (unserved, {"no-workers": "warning"}),
    "no scheduler": (unscheduled, {"no-scheduler": "warning"}),
    "a plain job": (with_jobs((plain, {})), {"plain-jobs": "info"}),
    "a store of one process": (with_jobs((forgetful, RETRIED)), {"job-store-unfit": "error"}),
    "a store that is none": (with_jobs((misspelled, RETRIED)), {"job-store-unfit": "error"}),
    "a job of another place": (with_jobs(("gone.away", {})), {"function-not-importable": "info"}),
    "a job without a retry": (with_jobs((charge, {})), {"job-not-retried": "warning"}),
    "a job without a time limit": (
        with_jobs((charge, {**RETRIED, "job_timeout": -1})),
        {"job-unbounded": "info"},
    ),
    "options that do not fit RQ": (
        with_jobs((hasty, {**RETRIED, "job_timeout": 600})),
        {
            "lease-out-of-range": "warning",
            "lease-ends-before-limit": "warning",
            "result-ttl-short": "error",
            "results-not-kept": "info",
        },
    ),
    "a long lease": (with_jobs((lengthy, RETRIED)), {"lease-out-of-range": "warning"}),
    "a killed worker": (stalled, {"jobs-stalled": "info"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_queues_is_found(case: str, queue: Queue, found: Callable[[], dict[str, str]]) -> None:
    arrange, expected = CASES[case]
    arrange(queue)
    assert found() == expected


def test_a_job_whose_horse_was_killed_and_that_nothing_runs_again_is_found(
    queue: Queue, found: Callable[[], dict[str, str]]
) -> None:
    served(queue)
    job = queue.enqueue(charge, "ORD-1")
    worker = SimpleWorker([queue], connection=queue.connection)
    worker.handle_job_failure(job, queue, exc_string="Work-horse terminated unexpectedly; waitpid returned 9")
    assert Job.fetch(job.id, connection=queue.connection).is_failed
    assert found()["jobs-abandoned"] == "warning"


def test_a_module_that_ends_the_process_where_it_is_imported_is_one_that_cannot_be_imported(
    queue: Queue, found: Callable[[], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_that_exits.py").write_text("import sys\ndef main(order_id): ...\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with_jobs((charge, RETRIED), ("script_that_exits.main", {}))(queue)
    assert found() == {"function-not-importable": "info"}


def test_what_a_module_cannot_be_imported_for_is_said(
    queue: Queue, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_fails.py").write_text("raise RuntimeError('no settings\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    queue.enqueue("module_that_fails.charge", "ORD-1")
    words = " ".join(CliRunner().invoke(cli, ["doctor", "--rq", redis_url]).output.split())
    assert "module_that_fails.charge cannot be imported here (RuntimeError: no settings): whether" in words


@pytest.fixture
def needs_django(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a job whose module imports a model, and of its settings."""
    (tmp_path / "site_settings.py").write_text("INSTALLED_APPS = ['django.contrib.contenttypes']\n")
    (tmp_path / "site_tasks.py").write_text(
        "from django.contrib.contenttypes.models import ContentType\n"
        "from celery_idempotent.rq import idempotent\n"
        "@idempotent(key='order_id')\n"
        "def charge(order_id): ...\n"
    )
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "site_settings")
    _set_up_django.cache_clear()
    yield tmp_path
    _set_up_django.cache_clear()


@pytest.mark.nightly
def test_jobs_of_django_rq_are_imported_with_django_set_up_as_in_its_workers(
    queue: Queue, redis_url: str, needs_django: Path
) -> None:
    queue.enqueue("site_tasks.charge", "ORD-1", retry=Retry(max=3))
    served(queue)
    command = [sys.executable, "-m", "celery_idempotent.cli", "doctor", "--rq", redis_url, "--json"]
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        command,
        cwd=needs_django,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    queues, *_ = json.loads(result.stdout)["sections"]
    assert [each["found"] for each in queues["findings"] if each["severity"] != "ok"] == []


def test_django_is_set_up_once_where_its_settings_are_named(
    queue: Queue, found: Callable[[], dict[str, str]], needs_django: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr("django.setup", lambda: calls.append(needs_django))
    with_jobs((charge, RETRIED), (charge, RETRIED))(queue)
    assert found() == {}
    assert calls == [needs_django]


def test_what_django_cannot_be_set_up_for_is_said(
    queue: Queue, redis_url: str, needs_django: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup() -> None:
        raise ModuleNotFoundError("No module named 'gone'")

    monkeypatch.setattr("django.setup", setup)
    queue.enqueue("site_tasks.charge", "ORD-1")
    words = " ".join(CliRunner().invoke(cli, ["doctor", "--rq", redis_url]).output.split())
    assert "site_tasks.charge cannot be imported here (ModuleNotFoundError: No module named 'gone')" in words


def test_every_check_has_a_case() -> None:
    seen = {code for _, expected in CASES.values() for code in expected} | {"jobs-abandoned"}
    assert seen == {check.code for check in CHECKS}


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("redis://127.0.0.1:PORT/0", Exit.UNREACHABLE, "store-unreachable"),
        ("sqlite:///queue.db", Exit.USAGE, "Expected the URL of RQ's Redis, as redis://localhost/0, got"),
        ("localhost", Exit.USAGE, "Did you mean redis://localhost?"),
        ("--store", Exit.USAGE, "expected the URL of RQ's Redis, as redis://localhost/0, got '--store'."),
    ],
)
def test_queues_that_cannot_be_read_are_an_error_in_words(url: str, status: Exit, words: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--rq", url.replace("PORT", str(free_port()))])
    assert result.exit_code == status
    assert words in result.output
