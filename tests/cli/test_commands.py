"""`celery -A proj idempotency ...`, as Celery's own command line loads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import open_store
from celery_idempotent.celery.app import store_of
from celery_idempotent.cli.app import idempotency
from celery_idempotent.cli.common import Exit
from celery_idempotent.stores import Claim, Lease, Outcome, State
from celery_idempotent.stores.redis import RedisStore

KEY = "idem:shop.charge::ORD-1"
Run = Callable[..., Result]


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(redis_url)
    yield store
    store.close()


@pytest.fixture
def run(redis_url: str) -> Iterator[Run]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = redis_url

    def run(*arguments: str, answer: str | None = None) -> Result:
        return CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app), input=answer)

    yield run
    store_of(app).close()


def take(store: RedisStore) -> Lease:
    lease = store.acquire(Claim(KEY, "owner", 60, 600, task_id="T1", holder="host:1"))
    assert isinstance(lease, Lease)
    return lease


def test_a_live_lease_is_shown_with_its_holder(run: Run, store: RedisStore) -> None:
    lease = take(store)
    result = run("show", KEY)
    assert result.exit_code == 0
    assert {"in_progress", "host:1", "T1", str(lease.fence)} <= set(result.output.split())


def test_a_result_is_shown_as_json_with_its_size_and_beginning(run: Run, store: RedisStore) -> None:
    payload = b'json:"' + b"x" * 100 + b'"'
    store.settle(take(store), Outcome(State.COMPLETED, payload), ttl=60)
    shown = json.loads(run("show", KEY, "--json").output)
    assert (shown["state"], shown["payload_bytes"]) == ("completed", len(payload))
    assert shown["payload"].startswith('json:"xxx')


def test_an_unknown_key_is_said_and_told_by_the_exit_status(run: Run) -> None:
    for command in ("show", "forget"):
        result = run(command, KEY)
        assert result.exit_code == 1
        assert KEY in result.output


def test_a_live_lease_is_forgotten_only_if_a_person_says_so(run: Run, store: RedisStore) -> None:
    take(store)
    refused = run("forget", KEY, answer="n\n")
    assert refused.exit_code == 1
    assert "host:1" in refused.output
    assert store.get(KEY) is not None
    assert run("forget", KEY, "--yes").exit_code == 0
    assert store.get(KEY) is None


def test_a_store_that_cannot_be_asked_is_an_error_in_words() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = "redis://127.0.0.1:1/0"
    result = CliRunner().invoke(idempotency, ["show", KEY], obj=SimpleNamespace(app=app))
    assert result.exit_code == Exit.UNREACHABLE
    assert "cannot serve" in result.output
    assert "Traceback" not in result.output


@pytest.mark.worker
@pytest.mark.smoke
def test_celery_knows_the_command(store: RedisStore, redis_url: str) -> None:
    take(store)
    command = [sys.executable, "-m", "celery", "-A", "tests.support.celery.shop", "idempotency", "show", KEY]
    env = {**os.environ, "STORE_URL": redis_url, "BROKER_URL": "memory://", "RESULT_URL": "cache+memory://"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    if "No such command" in done.stderr + done.stdout:
        pytest.fail("the package is not installed with its entry points: pip install -e .")
    assert "host:1" in done.stdout, done.stderr


def test_an_output_that_cannot_be_written_is_an_error_in_words() -> None:
    command = [sys.executable, "-c", "from celery_idempotent.cli import main; main(['--help'])"]
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == Exit.NO
    assert done.stderr.startswith("Error: Expected to write the output, got [Errno 28]")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["show", "explain", "release"])
def test_letters_that_the_output_cannot_have_are_escaped(store: RedisStore, redis_url: str, command: str) -> None:
    lease = store.acquire(Claim(KEY, "owner", 60, 600, task_id="T-\N{SNOWMAN}", holder="\N{SNOWMAN}:1"))
    assert isinstance(lease, Lease)
    options = [KEY, "--yes"] if command == "release" else [KEY]
    done = subprocess.run(
        [sys.executable, "-m", "celery_idempotent.cli", command, *options, "--store", redis_url],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == Exit.OK, done.stderr
    assert b"\\u2603:1" in done.stdout


ODD = "idem:\udcff"  # as Python reads the byte 0xff of a command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", ODD],
        ["explain", ODD],
        ["forget", ODD, "--yes"],
        ["release", ODD],
        ["list", "--prefix", ODD],
        ["forget", "--prefix", ODD, "--json"],
    ],
)
def test_a_key_that_is_no_text_is_an_error_in_words(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == Exit.USAGE
    assert r"Expected text, which UTF-8 can encode, got 'idem:\udcff" in result.output


def test_a_key_that_is_no_text_is_one_to_sqlite_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    with closing(open_store(url)) as store:
        store.get(KEY)
    command = [sys.executable, "-m", "celery_idempotent.cli", "show", b"idem:\xff", "--store", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == Exit.USAGE
    assert r"Expected text, which UTF-8 can encode, got 'idem:\udcff'." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_standard_error_is_no_terminal_either() -> None:
    script = "from celery_idempotent.cli import main; main(['stats', '--store', 'memory://'])"
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "records  0" in done.stdout


def test_a_closed_output_is_no_terminal() -> None:
    script = "from celery_idempotent.cli import main; main(['watch', '--store', 'memory://'])"
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, script]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == Exit.USAGE
    assert "Error: Expected standard output to be a terminal" in done.stderr
