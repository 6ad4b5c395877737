"""What middlewares for the Idempotency-Key header make of the same faults: `python -m benchmarks.http_rivals`.

Each is installed from PyPI into an environment of its own, in the version that is named here, configured as its
documentation has it (`benchmarks/http_apps`), and served by four processes with a store of its own. What is printed
are tables in Markdown of what was seen; `--only NAME,NAME` takes some of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from tests.support.postgres import PostgresServer
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

from .http_servers import ROOT, WebProcess, gunicorn, uvicorn, web

__all__ = ["FAULTS", "HERE", "MIDDLEWARES", "Middleware", "Race", "Trial", "trial"]

PROCESSES = 4
#: Seconds for which a request whose server was killed is sent again.
WATCHED = 45.0
#: Seconds of a handler that takes longer than the leases, of which 30 s are usual.
LONG = 36.0
#: Seconds between a failure and its repetition.
PAUSE = 1.0
ENVIRONMENTS = Path(tempfile.gettempdir()) / "celery-idempotent-http-rivals"


@dataclass(frozen=True)
class Middleware:
    """One middleware and its application.

    Arguments:
        name: Of the package.
        app: Module and name of the application.
        requirements: What pip is to install; none are in this environment.
        django: Whether it is served by gunicorn, and not by uvicorn.
        postgres: Whether its store is PostgreSQL, and not Redis.
    """

    name: str
    app: str
    requirements: tuple[str, ...] = ()
    django: bool = False
    postgres: bool = False

    @property
    def command(self) -> list[str]:
        """The command that serves it."""
        app = f"benchmarks.http_apps.{self.app}"
        return gunicorn(app, processes=PROCESSES) if self.django else uvicorn(app, processes=PROCESSES)

    def python(self) -> str:
        """Return a Python that has its packages, after installing them if need be."""
        if not self.requirements:
            return sys.executable
        folder, wanted = ENVIRONMENTS / self.name, "\n".join(self.requirements)
        installed, python = folder / "installed", str(folder / "bin" / "python")
        if not installed.exists() or installed.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            subprocess.run([*pip, *self.requirements], check=True, stderr=subprocess.DEVNULL)
            installed.write_text(wanted)
        return python


FASTAPI = ("fastapi==0.165.0", "uvicorn==0.54.0")
DJANGO = ("django==5.2.19", "gunicorn==27.0.1")
MIDDLEWARES = (
    Middleware("celery_idempotent", "celery_idempotent_asgi:app"),
    Middleware("celery_idempotent, Django", "celery_idempotent_django:app", django=True),
    Middleware(
        "asgi-idempotency-header",
        "asgi_idempotency_header:app",
        ("asgi-idempotency-header==0.2.0", "redis==8.1.0", *FASTAPI),
    ),
    Middleware("idemkit", "idemkit_app:app", ("idemkit[redis]==1.0.2", *FASTAPI)),
    Middleware("idemptx", "idemptx_app:app", ("idemptx==0.2.2", *FASTAPI)),
    Middleware(
        "django-idempotency-key",
        "django_idempotency_key:app",
        ("django-idempotency-key==1.3.0", "redis==8.1.0", *DJANGO),
        django=True,
    ),
    Middleware(
        "drf-idempotency",
        "drf_idempotency_app:app",
        ("drf-idempotency[redis]==1.0.0", *DJANGO),
        django=True,
    ),
    Middleware(
        "djangorestframework-idempotency-key",
        "drf_idempotency_key:app",
        ("djangorestframework-idempotency-key==1.0.3", "psycopg[binary]==3.3.9", *DJANGO),
        django=True,
        postgres=True,
    ),
    Middleware("GET, run, SET", "get_then_set:app"),
)
#: Those that are run without installing anything.
HERE = tuple(middleware for middleware in MIDDLEWARES if not middleware.requirements)


@dataclass(frozen=True)
class Reply:
    """A response, or 0 and b"" where there was none."""

    status: int
    body: bytes = b""

    @property
    def run(self) -> int:
        """Which run of the handler it comes from; 0 if from none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            digits = self.body.removeprefix(b"<p>").removesuffix(b"</p>")
            return int(digits) if digits.isdigit() else 0
        return int(found.get("run", 0)) if isinstance(found, dict) else 0


@dataclass(frozen=True)
class Race:
    """What became of equal requests at once: runs of the handler, statuses, different responses; and one more."""

    runs: int
    statuses: Counter[int]
    responses: int
    again: str


class Trial:
    """One middleware on its server and its store.

    Arguments:
        server: The server.
        store: The store.
        runs: The file in which the handler notes its runs.
    """

    def __init__(self, server: WebProcess, store: Any, runs: Path) -> None:
        self.server, self.store, self._runs = server, store, runs

    def post(self, key: str, **request: Any) -> Reply:
        """Send a request, as `_send` does, and return the reply."""
        try:
            connection = self._send(key, **request)
        except OSError:
            return Reply(0)
        try:
            response = connection.getresponse()
            return Reply(response.status, response.read())
        except (OSError, http.client.HTTPException):
            return Reply(0)
        finally:
            connection.close()

    def _send(
        self, key: str, *, path: str = "/orders", body: str = '{"n": 1}', user: str = "anna", **query: object
    ) -> http.client.HTTPConnection:
        headers = {
            "Idempotency-Key": key,
            "Authorization": f"Bearer {user}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=90)
        connection.request("POST", f"{path}?{urlencode({'tag': key, **query})}", body, headers)
        return connection

    def runs(self, key: str) -> int:
        """Return how often the handler has run for a key."""
        return self._runs.read_text().splitlines().count(key)

    def again(self, key: str, **request: Any) -> str:
        """Send a request with a key that was used, and return what became of it."""
        before = self.runs(key)
        return self.describe(self.post(key, **request), ran=self.runs(key) > before)

    @staticmethod
    def describe(reply: Reply, *, ran: bool) -> str:
        """Return what became of a repetition."""
        if not reply.status:
            return "runs, no response" if ran else "no response"
        if ran:
            return f"runs: {reply.status}"
        return f"{reply.status}, replayed" if reply.run else f"{reply.status}"

    def race(self, clients: int) -> Race:
        """Send one request so many times at once, and once more after them."""
        key = str(uuid4())
        with ThreadPoolExecutor(clients) as pool:
            replies = list(pool.map(lambda _: self.post(key, seconds=0.5), range(clients)))
        runs, bodies = self.runs(key), {reply.body for reply in replies if reply.run}
        return Race(runs, Counter(reply.status for reply in replies), len(bodies), self.again(key, seconds=0.5))

    # -- faults: each returns what was seen ----------------------------------------------------------------------------

    def at_once(self) -> str:
        """100 requests at once, and one more."""
        race = self.race(100)
        seen = ", ".join(f"{times} x {status or 'none'}" for status, times in sorted(race.statuses.items()))
        return f"{race.runs} run{'s' * (race.runs != 1)}: {seen}; then {race.again}"

    def killed(self) -> str:
        """Kill -9 in the handler; retries for 45 s."""
        key, since = str(uuid4()), time.monotonic()
        self.post(key, then="die")
        seen: Counter[int] = Counter()
        while time.monotonic() < since + WATCHED:
            self.server.start()
            reply = self.post(key, then="die")
            if self.runs(key) > 1:
                return f"{self._all(seen)}runs after {time.monotonic() - since:.0f} s: {reply.status}"
            seen[reply.status] += 1
            time.sleep(0.5)
        return f"{self._all(seen)}does not run in {WATCHED:.0f} s"

    @staticmethod
    def _all(seen: Counter[int]) -> str:
        return "".join(f"{status or 'none'}, " for status in sorted(seen))

    def slow(self) -> str:
        """The handler takes 36 s; a retry after 33 s."""
        key = str(uuid4())
        with ThreadPoolExecutor(1) as client:
            first = client.submit(self.post, key, seconds=LONG)
            wait_until(lambda: self.runs(key) == 1)
            time.sleep(LONG - 3)  # what is shown is what happens after so long
            second = self.post(key, seconds=LONG)
            runs = self.runs(key)
            first.result()
            return f"{self.describe(second, ran=runs > 1)}; {runs} run{'s' * (runs != 1)}"

    def other_body(self) -> str:
        """The key with another body."""
        key = str(uuid4())
        self.post(key)
        return self.again(key, body='{"n": 2}')

    def other_user(self) -> str:
        """The key of another caller."""
        key = str(uuid4())
        self.post(key)
        return self.again(key, user="bert")

    def other_endpoint(self) -> str:
        """The key at another endpoint."""
        key = str(uuid4())
        self.post(key)
        return self.again(key, path="/refunds")

    def repeated(self) -> str:
        """The same request again."""
        key = str(uuid4())
        self.post(key)
        return self.again(key)

    def failed(self) -> str:
        """The handler answers 503; a retry."""
        key = str(uuid4())
        self.post(key, then="fail")
        time.sleep(PAUSE)
        return self.again(key, then="fail")

    def raised(self) -> str:
        """The handler raises; a retry."""
        key = str(uuid4())
        self.post(key, then="raise")
        time.sleep(PAUSE)
        return self.again(key, then="raise")

    def left(self) -> str:
        """The client goes away in the handler; a retry."""
        key = str(uuid4())
        connection = self._send(key, seconds=1)
        wait_until(lambda: self.runs(key) == 1, 30)
        connection.close()
        time.sleep(3)
        return self.again(key, seconds=1)

    def large(self) -> str:
        """A response of a megabyte; a retry."""
        key = str(uuid4())
        self.post(key, bytes=1_000_000)
        return self.again(key, bytes=1_000_000)

    def page(self) -> str:
        """A response in HTML; a retry."""
        key = str(uuid4())
        first = self.post(key, html=1)
        return self.again(key, html=1) if first.body.startswith(b"<p>") else "(JSON only)"

    def store_lost(self) -> str:
        """The store is killed while the handler runs."""
        key = str(uuid4())
        with ThreadPoolExecutor(1) as client:
            first = client.submit(self.post, key, seconds=1)
            wait_until(lambda: self.runs(key) == 1, 30)
            self.store.kill()
            since = time.monotonic()
            return f"{first.result().status or 'no response'} after {time.monotonic() - since:.0f} s"

    def store_down(self) -> str:
        """The store is down."""
        key = str(uuid4())
        reply = self.post(key)
        return f"{reply.status or 'no response'}, {'runs' if self.runs(key) else 'does not run'}"


#: The last two take the store away.
FAULTS: tuple[Callable[[Trial], str], ...] = (
    Trial.repeated,
    Trial.at_once,
    Trial.killed,
    Trial.slow,
    Trial.other_body,
    Trial.other_endpoint,
    Trial.other_user,
    Trial.failed,
    Trial.raised,
    Trial.left,
    Trial.large,
    Trial.page,
    Trial.store_lost,
    Trial.store_down,
)


@contextmanager
def trial(middleware: Middleware) -> Iterator[Trial]:
    """Install a middleware, and start its server and its store."""
    python = middleware.python()
    store: Any = PostgresServer() if middleware.postgres else RedisServer()
    store.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = Path(folder) / "runs"
            runs.touch()
            env = {"RUNS": str(runs), "STORE_URL": store.url()}
            if middleware.postgres:
                migrate = (
                    f"import benchmarks.http_apps.{middleware.app.partition(':')[0]}\n"
                    "from django.core.management import call_command\ncall_command('migrate', verbosity=0)"
                )
                subprocess.run([python, "-c", migrate], env={"PYTHONPATH": str(ROOT), **env}, check=True)
            with web(middleware.command, env, python) as server:
                yield Trial(server, store, runs)
    finally:
        store.stop()


def column(middleware: Middleware) -> list[str]:
    """Return what was seen of a middleware, a text for each fault."""
    cells = []
    with trial(middleware) as subject:
        for fault in FAULTS:
            try:
                cells.append(fault(subject))
            except WaitTimeout as error:
                cells.append(f"({error})")
            print(f"{middleware.name}: {fault.__name__}: {cells[-1]}", file=sys.stderr, flush=True)
    return cells


def _row(head: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([head, *cells])} |"


def main() -> None:
    """Print a table for ASGI and one for Django, with a row for each fault and a column for each middleware."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_rivals", description=__doc__)
    parser.add_argument("--only", metavar="NAME,NAME", help=", ".join(each.name for each in MIDDLEWARES))
    only = parser.parse_args().only
    chosen = [each for each in MIDDLEWARES if only is None or each.name in only.split(",")]
    with ThreadPoolExecutor(3) as lanes:  # most of the time is waiting for leases to end
        columns = list(lanes.map(column, chosen))
    for django in (False, True):
        seen = {each.name: cells for each, cells in zip(chosen, columns, strict=True) if each.django is django}
        if seen:
            print(f"\n{_row('', seen)}\n{_row('---', ['---'] * len(seen))}")
            for number, fault in enumerate(FAULTS):
                print(_row(str(fault.__doc__).rstrip("."), [cells[number] for cells in seen.values()]))


if __name__ == "__main__":
    main()
