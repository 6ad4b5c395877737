"""Every command line that is printed anywhere is typed literally, on real servers, and does not fail.

Where it names a host, a port or a path that is a reader's own, `OURS` has what stands for it here. A command that no
test below takes, and that is not in `NOT_TYPED` with the reason, makes `test_every_command_line_is_typed` red.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.parts import chosen
from celery_idempotent import open_store
from celery_idempotent.stores import Store
from tests.support import processes
from tests.support.cli.shelf import hold, settle
from tests.support.cli.terminal import CTRL_C, Terminal
from tests.support.docs.command_lines import CommandLine, command_lines
from tests.support.docs.pages import PYTHON, ROOT, blocks
from tests.support.flower.watching import serves
from tests.support.rq.nodes import asks_for_jobs
from tests.support.servers import RedisServer, free_port, open_client, redis_binary
from tests.support.waiting import wait_until

SCRIPTS = Path(sys.executable).parent
LINES = command_lines()

#: What is not typed, and why.
NOT_TYPED = {
    r"(\S*/)?pip install|python -m pip install|(apt|brew) install|python3 -m venv \.venv|source ": "it installs",
    r"([A-Z_]+=\S+ )*((\.venv/bin/)?pytest|tox)|sphinx-build|cosmic-ray|cr-filter|python \.ci/": "it runs these tests",
    r"python -m benchmarks|(\.venv/bin/)?python -m tests\.": "it runs for minutes; its names are checked below",
    r"celery-idempotent demo": "tests/cli/test_demo.py runs it",
    r"celery -A celery_idempotent\.cli\.demo\.shop|python -m celery_idempotent\.cli\.demo\.gateway": "the demo runs it",
    r"redis-cli --cluster fix": "it mends a cluster that is broken",
    r"aws ": "it needs AWS",
    r"ssh |kubectl ": "it needs another machine",
    r"(python -m|celery -A|uvicorn) examples\.shop_api\.|curl -i ": "tests/docs/test_shop_api.py starts and calls it",
    r"python manage\.py ": "tests/docs/test_django_page.py runs it",
    r"kill -9 (\d+|PID)$": "tests/docs/test_examples.py does it, to the process that the page names",
}
#: What stands where a synopsis leaves something open.
OPEN = {
    "[the options of list but --json]": "[--state STATE] [--task NAME] [--older D] [--held] [--limit N]",
    "[the same options]": "[--state STATE] [--task NAME] [--json]",
    "NAME=VALUE": "order_id=ORD-1",
    "KEY...": "KEY",
    "KEY": "idem:shop.charge::ORD-1",
    "PREFIX": "idem:shop.charge:",
    "STATE": "completed",
    "NAME": "shop.charge",
    "COMMAND": "list",
    "{self.name}": "list",
    "HOST": "worker-1:4711",
    "D": "1s",
    "N": "10",
    "PORT": "0",
}
#: What stands for the hosts, ports and paths of a reader: names of fixtures, each with an empty database or port.
REDIS = re.compile(r"redis://localhost(?:/\d+)?")
SQL = re.compile(r"postgresql://app@db/shop")
DYNAMODB = re.compile(r"dynamodb://idempotency\?region=eu-west-1")

STORES = r"celery -A (proj|shop) idempotency .*|celery-idempotent (?!demo).*"
WATCH = r".* watch\b.*"
WEB = r".* web\b.*"
REMOTE = r"celery -A (proj|shop) (inspect|control) .*"
MENTIONED = r"celery -A proj( idempotency)?"
WORKER = (
    r"(/srv/shop/bin/)?celery -A (?!celery_idempotent|examples\.shop_api)\S+ (worker|flower)( .*)?"
    r"|rq worker(-pool)?( .*)?"
)
SERVER = r"redis-server .*"
TO_REDIS = r"redis-cli -n \d .*|CONFIG SET .*|ACL SETUSER .*"
PYTHON_LINE = r"python -c .*|python -m examples\.(?!shop_api).*"
CONSUMER = r"python -m examples\.\w+ work"
KILL = r"pkill .*"

SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env

app = from_env(Celery("shop", set_as_current=False))


@app.task(name="shop.charge", base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id, cents=0):
    return f"charged {order_id}"
"""


def matching(pattern: str, *, but: str = r"(?!)") -> list[Any]:
    """Return the command lines of a kind, as parameters."""
    found = [line for line in LINES if re.fullmatch(pattern, line.text) and not re.fullmatch(but, line.text)]
    assert found, f"no command line is like {pattern}"
    return [pytest.param(line, id=f"{line.where.rpartition('/')[2]} {line.text}") for line in found]


def test_every_command_line_is_typed() -> None:
    kinds = [STORES, REMOTE, MENTIONED, WORKER, SERVER, TO_REDIS, PYTHON_LINE, KILL]
    left = [
        f"{line.where}: {line.text}"
        for line in LINES
        if not any(re.fullmatch(kind, line.text) for kind in kinds)
        and not any(re.match(pattern, line.text) for pattern in NOT_TYPED)
    ]
    assert not left, "no test types these"
    assert len(LINES) > 100


def test_a_reason_is_given_for_nothing_that_is_not_printed() -> None:
    for pattern in NOT_TYPED:
        assert any(re.match(pattern, line.text) for line in LINES), f"{pattern} stands for no command any more"


@pytest.mark.parametrize("line", matching(r".*pip install.*\[.*"))
def test_what_pip_is_to_install_is_an_extra_of_ours(line: CommandLine) -> None:
    extras = {name.strip() for found in re.findall(r"\[([^\]]+)\]", line.text) for name in found.split(",")}
    known = {*(metadata("celery-idempotent").get_all("Provides-Extra") or ()), "{extra}"}
    assert extras <= known


@pytest.mark.parametrize("line", matching(r"python -m benchmarks --only .*"))
def test_what_the_benchmarks_are_to_measure_is_measured(line: CommandLine) -> None:
    assert chosen(line.text.rpartition(" ")[2], quick=False)


# -- the stage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, worker_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which commands are typed: it has the modules that they name."""
    stage = tmp_path / "stage"
    stage.mkdir()
    (stage / "shop.py").write_text(SHOP)
    (stage / "proj.py").write_text("from shop import app\n")
    for page, name in (
        ("docs/guides/flower.md", "flowerconfig.py"),
        ("docs/guides/rq.md", "quick.py"),
        ("docs/guides/rq-operating.md", "workers.py"),
    ):
        [text] = [block.text for block in blocks(page) if block.language == PYTHON and f"# {name}\n" in block.text]
        (stage / name).write_text(text)
    path = os.pathsep.join([str(stage), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, value in {
        **worker_env,
        "PYTHONPATH": path,
        "PATH": os.pathsep.join([str(SCRIPTS), os.environ["PATH"]]),
        "RQ_REDIS_URL": worker_env["BROKER_URL"],
        "FLOWER_PORT": str(free_port()),
        "FLOWER_ADDRESS": "127.0.0.1",
        "SECONDS": "0.5",
        "PYTHONUNBUFFERED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CELERY_IDEMPOTENT_STORE", raising=False)
    monkeypatch.syspath_prepend(str(stage))
    monkeypatch.chdir(stage)
    yield stage
    for name in ("shop", "proj"):
        sys.modules.pop(name, None)


@pytest.fixture
def ours(request: pytest.FixtureRequest, store_url: str) -> Callable[[str], str]:
    """A function that has a command speak to servers of the tests."""

    def move(text: str) -> str:
        text = REDIS.sub(store_url, text)
        if DYNAMODB.search(text):
            server, table = request.getfixturevalue("dynamodb_server"), request.getfixturevalue("fresh_table")
            text = DYNAMODB.sub(lambda _: server.url(table), text)
        if SQL.search(text) or (re.search(r" (schema|purge)\b", text) and re.search(r"\bURL\b", text)):
            url: str = request.getfixturevalue("postgres_url")
            text = re.sub(r"\bURL\b", lambda _: url, SQL.sub(lambda _: url, text))
        return re.sub(r"\bURL\b", lambda _: store_url, text)

    return move


def filled(text: str) -> str:
    """Return a command with what it leaves open filled in."""
    for name, value in OPEN.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?!\w)", lambda _, value=value: value, text)  # type: ignore[misc]
    return text


def variants(text: str) -> list[str]:
    """Return a command without its optional parts, and with each of them."""
    for name in ("[the options of list but --json]", "[the same options]"):
        text = text.replace(name, OPEN[name])
    optional = re.compile(r" \[(-[^\]]+)\](?:\.\.\.)?")
    bare = optional.sub("", text)
    return [filled(bare), *(filled(f"{bare} {option}") for option in optional.findall(text))]


# -- what looks into stores --------------------------------------------------------------------------------------------


def type_here(words: list[str], answer: str = "y\n") -> tuple[int, str]:
    """Run a command in this process, as its program does; return its status and what it printed."""
    if words[0] == "celery":
        from celery.bin.celery import celery as program
    else:
        from celery_idempotent.cli import cli as program
    with mock.patch.dict(os.environ):  # Celery's command line leaves the broker of its app there
        result = CliRunner().invoke(program, words[1:], input=answer, standalone_mode=True)
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)
    return result.exit_code, result.output


def put(store: Store, command: str) -> None:
    """Put the records into a store that a command is about."""
    if store.pending_schema():
        return
    by_argument = {f"idem:shop.charge::{order}" for order in re.findall(r"order_id=(\S+)", command)}
    for key in {
        *re.findall(r"idem:\S*::\S+", command),
        *by_argument,
        "idem:shop.charge::ORD-1",
        "idem:shop.invoice:acme:7",
    }:
        store.delete(key)
        hold(store, key) if " release " in command else settle(store, key)
    if ":~unique:" in command:
        store.delete("idem:~unique:shop.reindex::7")
        hold(store, "idem:~unique:shop.reindex::7")


def wanted_of(command: str) -> set[int]:
    """Return the statuses with which a command may end."""
    pending = re.search(r" schema\b(?!.*--apply)", command)  # 1: something is to be done
    return {0, 1} if pending or " doctor" in command else {0}


@pytest.mark.thorough
@pytest.mark.parametrize("line", matching(STORES, but=f"{WATCH}|{WEB}"))
def test_a_command_on_stores_does_what_it_says(
    line: CommandLine, folder: Path, ours: Callable[[str], str], store_url: str
) -> None:
    for text in variants(line.text):
        command = ours(text)
        words = shlex.split(command)
        url = words[words.index("--store") + 1] if "--store" in words else store_url
        store = open_store(url)
        try:
            put(store, command)
        finally:
            store.close()
        status, said = type_here(words)
        assert status in wanted_of(command), f"{line.where}: {command}\n{said}"


@pytest.mark.parametrize("line", matching(MENTIONED))
def test_a_command_that_is_only_mentioned_has_a_help(line: CommandLine, folder: Path) -> None:
    status, said = type_here([*shlex.split(line.text), "--help"])
    assert status == 0, said


@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("line", matching(WATCH))
def test_what_shows_a_table_until_ctrl_c_shows_it(
    line: CommandLine, folder: Path, ours: Callable[[str], str], store_url: str
) -> None:
    """With all its options at once: without any, `tests/cli/test_watch.py` has both programs show it."""
    module = {"celery": "celery", "celery-idempotent": "celery_idempotent.cli"}
    bare, *others = variants(line.text)
    text = bare + " ".join(text.removeprefix(bare) for text in others)
    program, *words = shlex.split(ours(text))
    with Terminal("-m", module[program], *words) as terminal:
        terminal.until("Ctrl-C ends")
        terminal.press(CTRL_C)
        assert terminal.status() == 130, f"{line.where}: {text}\n{terminal}"


@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("line", matching(WEB))
def test_what_serves_pages_until_ctrl_c_serves_them(
    line: CommandLine, folder: Path, ours: Callable[[str], str], store_url: str
) -> None:
    """With all its options at once, on a port that is free: `tests/cli/test_web.py` opens the pages."""
    module = {"celery": "celery", "celery-idempotent": "celery_idempotent.cli"}
    bare, *others = variants(line.text)
    text = bare + " ".join(text.removeprefix(bare) for text in others)
    program, *words = shlex.split(ours(text))
    with Terminal("-m", module[program], *words, *(() if "--port" in words else ("--port", "0"))) as terminal:
        terminal.until("?password=")
        terminal.press(CTRL_C)
        assert terminal.status() == 0, f"{line.where}: {text}\n{terminal}"


# -- what runs until it is told to end ---------------------------------------------------------------------------------


#: What programs print once they are ready, by what their command has in it.
READY = {
    "redis-server": "Ready to accept connections",
    "consumer work": "is ready",
}


class Running:
    """A command that runs in a shell of its own, and what it has printed."""

    def __init__(self, command: str, log: Path, env: dict[str, str]) -> None:
        self.command, self.log = command, log
        with log.open("wb") as out:
            self.process = processes.spawn(
                ["sh", "-c", f"exec {command}"],
                env={**os.environ, **env},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def __str__(self) -> str:
        return f"{self.command}\n{self.log.read_text(errors='replace')}"

    def until_ready(self) -> None:
        """Wait until it does what it is for."""
        if re.match(r"celery -A \S+ worker", self.command):
            ready = self._consumes
        elif re.match(r"celery -A \S+ flower", self.command):
            ready = self._serves
        elif self.command.startswith("rq worker"):
            ready = self._asks_for_jobs
        else:
            ready = self._has_printed
        wait_until(lambda: ready() or self.process.poll() is not None, 60, lambda: f"it to be ready: {self}")
        assert self.process.poll() is None, str(self)

    def _consumes(self) -> bool:
        """Return whether a worker consumes; at the level at which Celery logs by default, it prints nothing of that."""
        with open_client(os.environ["BROKER_URL"]) as client:
            return bool(client.exists("_kombu.binding.celery.pidbox"))

    def _serves(self) -> bool:
        return serves(f"http://{os.environ['FLOWER_ADDRESS']}:{os.environ['FLOWER_PORT']}")

    def _asks_for_jobs(self) -> bool:
        with open_client(os.environ["RQ_REDIS_URL"]) as client:
            return asks_for_jobs(client)

    def _has_printed(self) -> bool:
        program = next(name for name in READY if name in self.command)
        return READY[program] in self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Ask it to end, and return its status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            processes.abort(self.process)
            raise AssertionError(f"It did not end: {self}") from None


@pytest.fixture
def running(folder: Path) -> Iterator[Callable[..., Running]]:
    """A function that starts a command, which ends with its test."""
    started: list[Running] = []

    def start(command: str, **env: str) -> Running:
        started.append(Running(command, folder / f"{len(started)}.log", env))
        return started[-1]

    yield start
    for each in started:
        processes.end(each.process)


def ends_in_order(found: Running) -> None:
    """Ask what was started to end, and see that it does."""
    assert found.stop() in (0, -signal.SIGTERM), str(found)


def typed(command: str) -> None:
    """Type a command that ends by itself."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def started() -> dict[str, CommandLine]:
    """Return each command that starts a process which runs until it is told to end, with the first that prints it."""
    found: dict[str, CommandLine] = {}
    for line in LINES:
        if re.fullmatch(WORKER, line.text) or re.fullmatch(CONSUMER, line.text):
            found.setdefault(line.text.removeprefix("/srv/shop/bin/"), line)
    return found


def beside(line: CommandLine) -> str:
    """Return the command that starts the process which a line of Python has something to do for.

    It is the one that is printed at the same place, if there is one.
    """
    if imported := re.search(r"from (\S+) import", line.text):
        kind = rf"celery -A {re.escape(imported[1])} worker( .*)?"
    else:
        kind = {"examples.rq_shop": "rq worker", "examples.consumer": CONSUMER}[line.text.split()[2]]
    found = [command for command in STARTED if re.fullmatch(kind, command)]
    return next((command for command in found if STARTED[command].where == line.where), found[0])


STARTED = started()
#: The first commands of a reader, of which each has a test.
FIRST = [line.text for line in LINES if line.where.startswith("README.md") and re.fullmatch(WORKER, line.text)]
[OBSERVED] = [command for command in STARTED if re.fullmatch(r"celery -A shop worker -E", command)]
[KILLED] = [command for command in STARTED if re.fullmatch(r"celery -A examples\.tutorial worker( .*)?", command)]
BESIDE = {
    line: beside(line)
    for line in LINES
    if re.fullmatch(PYTHON_LINE, line.text) and line.text not in STARTED and not line.where.startswith("README.md")
}


def test_a_line_of_python_has_its_process_where_both_are_started() -> None:
    assert not {*FIRST, OBSERVED, KILLED} & {*BESIDE.values()}


@pytest.mark.nightly
@pytest.mark.worker
@pytest.mark.thorough
@pytest.mark.parametrize("command", [each for each in STARTED if each not in {*FIRST, OBSERVED, KILLED}])
def test_what_is_started_is_ready_and_serves_and_ends_in_order(
    command: str, running: Callable[..., Running], folder: Path
) -> None:
    """One start for each command: what is to be typed beside it is typed beside it."""
    exported = dict(word.split("=", 1) for word in STARTED[command].exported)
    env = {name: str(folder / "metrics") if value.startswith("/run/") else value for name, value in exported.items()}
    found = running(command, **env)
    found.until_ready()
    for line in [line for line, process in BESIDE.items() if process == command]:
        typed(line.text)
    ends_in_order(found)


@pytest.mark.parametrize("line", matching(SERVER))
def test_the_server_of_a_page_serves(
    line: CommandLine, running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--port 6379" in line.text
    port = free_port()
    program, *words = shlex.split(line.text.replace("6379", str(port)))
    assert program == "redis-server"
    running(shlex.join([str(redis_binary()), *words])).until_ready()
    with open_client(f"redis://127.0.0.1:{port}") as client:
        assert client.ping()


# -- what needs a worker -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.worker
@pytest.mark.thorough
def test_a_command_to_workers_is_answered(running: Callable[..., Running]) -> None:
    worker = running(OBSERVED)
    worker.until_ready()
    wait_until(lambda: type_here(shlex.split("celery -A shop inspect ping"))[0] == 0, 60, "the worker to hear commands")
    for parameter in matching(REMOTE):
        [line] = parameter.values
        command = line.text.replace("TASK_ID", "0f9bd2b6-5d43-4c5d-8c2e-111111111111")
        status, said = type_here(shlex.split(command))
        assert status == 0, f"{line.where}: {command}\n{said}"
        assert "ok" in said.lower()
    ends_in_order(worker)


# -- what Redis is told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", matching(TO_REDIS))
def test_redis_takes_what_it_is_told(line: CommandLine, own_redis: Callable[..., RedisServer]) -> None:
    """By a client: what `redis-cli` is given are the words of a command, and not every machine has it."""
    server = own_redis()
    words = shlex.split(re.sub(r"\{[^}]*\}", "100", line.text))
    db = 0
    if words[0] == "redis-cli":
        db, words = int(words[2]), words[3:]
    store = open_store(server.url(db))
    for key in {word for word in words if re.match(r"idem:.+::", word)}:
        settle(store, key)
    with open_client(server.url(db)) as client:
        assert client.execute_command(*words), f"{line.where}: {line.text}"
    store.close()


# -- the first minutes of a reader -------------------------------------------------------------------------------------


@pytest.mark.worker
@pytest.mark.smoke
@pytest.mark.parametrize(("number", "charges"), [(0, 1), (1, 2)], ids=["two lines", "the bug"])
def test_the_first_examples_of_the_readme_are_modules_that_a_worker_runs(
    number: int, charges: int, folder: Path, running: Callable[..., Running], broker_url: str
) -> None:
    example = [block.text for block in blocks("README.md") if block.language == PYTHON][number]
    assert "redis://localhost" in example
    (folder / "shop.py").write_text(REDIS.sub(broker_url, example))
    [start] = FIRST
    [publish] = [
        line.text for line in LINES if line.where.startswith("README.md") and re.fullmatch(PYTHON_LINE, line.text)
    ]
    worker = running(start)
    worker.until_ready()
    done = subprocess.run(["sh", "-c", publish], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "['receipt for ORD-1', 'receipt for ORD-1']\n", done.stderr
    assert (folder / "ledger.txt").read_text() == "ORD-1 999\n" * charges
    ends_in_order(worker)


@pytest.mark.nightly
@pytest.mark.worker
@pytest.mark.parametrize("line", matching(KILL))
def test_the_tutorial_kills_its_worker_and_no_editor(line: CommandLine, running: Callable[..., Running]) -> None:
    worker = running(KILLED)
    worker.until_ready()
    editors = [
        running(f"python -c 'import time; time.sleep(600)' {name}")
        for name in ("examples/tutorial.py", "examples.tutorial")
    ]
    # It is not typed: it would kill the worker of a reader, too. What it matches is the line of a process's arguments.
    pattern = shlex.split(line.text)[-1]
    family = {member.pid for member in processes.members(worker.process.pid)}
    assert len(family) >= 3
    assert all(re.search(pattern, " ".join(psutil.Process(pid).cmdline())) for pid in family)
    for editor in editors:
        assert not re.search(pattern, " ".join(psutil.Process(editor.process.pid).cmdline()))
    ends_in_order(worker)
