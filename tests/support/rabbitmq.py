"""A real RabbitMQ for the tests: one node of our own on loopback, in a temporary directory, always stopped.

Where the server comes from: the one at `RABBITMQ_URL` or `AMQP_URL`, else the `rabbitmq-server` on PATH or where Debian
and RPM packages put it, else an error that says how to get one. Nothing is shared with a broker that the machine may
already run: the node has its own name, ports, cookie, epmd and directory.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import kombu
from kombu.exceptions import ChannelError

from tests.support import processes
from tests.support.servers import ServerMissing, free_port
from tests.support.waiting import wait_until

START_SECONDS = 60.0
STOP_SECONDS = 20.0
CTL_SECONDS = 60.0

# The scripts themselves. What Debian has on PATH are wrappers that change to the user `rabbitmq`.
PACKAGED = ("/usr/lib/rabbitmq/bin", "/opt/homebrew/opt/rabbitmq/sbin", "/usr/local/opt/rabbitmq/sbin")

HOW_TO_GET_ONE = (
    "no rabbitmq-server was found. Set RABBITMQ_URL to a server with a vhost for tests, or install one: "
    "`apt install rabbitmq-server`, `brew install rabbitmq`"
)

# Levels of Celery's native delayed delivery that a test may use: its copies wait for less than a minute or so.
DELAYS = tuple(f"celery_delayed_{level}" for level in range(8))


def rabbitmq_scripts() -> Path:
    """Return the directory with rabbitmq-server and rabbitmqctl.

    Raises:
        ServerMissing: there is none, or no epmd beside it.
    """
    on_path = shutil.which("rabbitmq-server")
    candidates = [*map(Path, PACKAGED), *([Path(on_path).resolve().parent] if on_path else [])]
    for candidate in candidates:
        if os.access(candidate / "rabbitmq-server", os.X_OK) and os.access(candidate / "rabbitmqctl", os.X_OK):
            return candidate
    raise ServerMissing(HOW_TO_GET_ONE)


def epmd_binary() -> str:
    """Return the path of Erlang's port mapper.

    Raises:
        ServerMissing: there is none.
    """
    found = shutil.which("epmd") or next(map(str, Path("/usr/lib/erlang").glob("erts-*/bin/epmd")), None)
    if found is None:
        raise ServerMissing("no epmd was found, which comes with Erlang; put it on PATH")
    return found


#: A node that declares dozens of quorum queues on a busy machine answers nobody for longer than kombu waits.
CONNECT_SECONDS = 30


class Vhost:
    """A part of a RabbitMQ that one test has for itself.

    Arguments:
        url: Where it is.
        prefix: How the names of the test's queues begin, so that tests which share a vhost do not meet.
    """

    def __init__(self, url: str, prefix: str = "") -> None:
        self.url = url
        self.prefix = prefix or f"t{uuid.uuid4().hex[:8]}."

    def name(self, queue: str) -> str:
        """Return the name that a queue has here."""
        return f"{self.prefix}{queue}"

    def left(self, *queues: str) -> dict[str, int]:
        """Return how many messages each of these queues has, and those of Celery's delayed delivery.

        A message that a worker holds unacked is in none of them: end the workers first, and it goes back to its queue.
        Queues without messages are left out, and so are queues that do not exist.
        """
        names = [*map(self.name, queues), *DELAYS]
        with kombu.Connection(self.url, connect_timeout=CONNECT_SECONDS) as connection:
            wait_until(lambda: not any(_count(connection, name)[1] for name in names), message="the consumers to go")
            counts = {name.removeprefix(self.prefix): _count(connection, name)[0] for name in names}
        return {name: count for name, count in counts.items() if count}

    def delayed(self) -> int:
        """Return how many messages Celery's delayed delivery holds back."""
        with kombu.Connection(self.url, connect_timeout=CONNECT_SECONDS) as connection:
            return sum(_count(connection, name)[0] for name in DELAYS)

    def delete(self, queues: Iterable[str]) -> None:
        """Delete queues of this test."""
        with kombu.Connection(self.url, connect_timeout=CONNECT_SECONDS) as connection:
            for queue in queues:
                connection.default_channel.queue_delete(self.name(queue))


def _count(connection: kombu.Connection, name: str) -> tuple[int, int]:
    """Return how many messages a queue has to hand out, and how many consumers."""
    channel = connection.channel()
    try:
        found = channel.queue_declare(name, passive=True)
        return int(found.message_count), int(found.consumer_count)
    except ChannelError:  # there is no such queue; RabbitMQ has closed the channel
        return 0, 0
    finally:
        channel.close()


class RabbitServer:
    """A RabbitMQ node of our own."""

    def __init__(self) -> None:
        self._scripts = rabbitmq_scripts()
        self._epmd_binary = epmd_binary()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._env: dict[str, str] = {}
        self._vhosts: list[str] = []
        self.port = 0

    def __enter__(self) -> RabbitServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self, vhost: str = "/") -> str:
        """Return the URL of a vhost of this server."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{quote(vhost, safe='')}"

    def logs(self) -> str:
        """Return what the server wrote."""
        path = Path(self._directory.name if self._directory else os.devnull) / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def vhost(self) -> Vhost:
        """Return an empty vhost that nobody else gets."""
        if not self._vhosts:  # several at once, for each call of rabbitmqctl takes a while
            self._vhosts = [f"v{uuid.uuid4().hex[:8]}" for _ in range(10)]
            binaries = ", ".join(f'<<"{name}">>' for name in self._vhosts)
            self.evaluate(
                'Tests = <<"tests">>, All = <<".*">>, [begin rabbit_vhost:add(Name, Tests), '
                'rabbit_auth_backend_internal:set_permissions(<<"guest">>, Name, All, All, All, Tests) end '
                f"|| Name <- [{binaries}]]"
            )
        return Vhost(self.url(self._vhosts.pop()))

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression in the node, and return its value as text."""
        caller = shutil.which("erl_call")
        if caller is None:  # it comes with Erlang, but not everywhere
            return self.ctl("eval", f"{expression}.").strip()
        # A rabbitmqctl is a virtual machine of its own, and takes seconds of a machine that is busy.
        command = [caller, "-n", self._env["RABBITMQ_NODENAME"], "-c", self._cookie(), "-e"]
        done = subprocess.run(
            command,
            env=self._env,
            input=f"{expression}.\n",
            capture_output=True,
            text=True,
            timeout=CTL_SECONDS,
            check=False,
        )
        value = re.fullmatch(r"\{ok, (.*)\}", done.stdout.strip(), re.DOTALL)
        assert value is not None, f"{expression} failed:\n{done.stdout}{done.stderr}"
        return value[1]

    def _cookie(self) -> str:
        assert self._directory is not None
        return (Path(self._directory.name) / ".erlang.cookie").read_text()

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl on the node, and return what it prints."""
        command = [str(self._scripts / "rabbitmqctl"), "--quiet", *arguments]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=CTL_SECONDS, check=False)
        assert not done.returncode, f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
        return done.stdout

    def close_connections(self, vhost: Vhost) -> None:
        """Close every connection to a vhost, as an operator or a node that goes away does."""
        name = vhost.url.rsplit("/", 1)[1]
        self.evaluate(
            '[rabbit_networking:close_connection(Connection, "the test says so") '
            "|| Connection <- rabbit_networking:connections(), "
            f'catch rabbit_networking:connection_info(Connection, [vhost]) =:= [{{vhost, <<"{name}">>}}]]'
        )

    def fill_up(self, vhost: Vhost) -> None:
        """Let every queue of a vhost refuse what is published from now on, as a queue does that is full."""
        policy = json.dumps({"max-length": 0, "overflow": "reject-publish"})
        self.ctl("set_policy", "--vhost", vhost.url.rsplit("/", 1)[1], "--apply-to", "queues", "full", ".*", policy)

    def empty(self, vhost: Vhost) -> None:
        """Let the queues of a vhost take messages again that `fill_up` has filled."""
        self.ctl("clear_policy", "--vhost", vhost.url.rsplit("/", 1)[1], "full")

    def unacked(self, vhost: Vhost) -> int:
        """Return how many messages are handed out and not acked."""
        name = vhost.url.rsplit("/", 1)[1]
        # Of the channels, which know at once: a quorum queue writes its own numbers down every 5 s.
        found = self.evaluate(
            "lists:sum([Number || Channel <- rabbit_channel:list(), "
            f'[{{vhost, <<"{name}">>}}, {{messages_unacknowledged, Number}}] <- '
            "[catch rabbit_channel:info(Channel, [vhost, messages_unacknowledged])]])"
        )
        return int(found)

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version: its first two numbers."""
        found = self.evaluate("rabbit_misc:version()").strip('"')
        return tuple(int(number) for number in found.split(".")[:2])

    @contextmanager
    def consumer_timeout(self, seconds: float) -> Iterator[None]:
        """Let channels that are opened meanwhile close when a message is held unacked for longer."""
        default = self.evaluate("element(2, application:get_env(rabbit, consumer_timeout))")
        self.evaluate(f"application:set_env(rabbit, consumer_timeout, {int(seconds * 1000)})")
        try:
            yield
        finally:
            self.evaluate(f"application:set_env(rabbit, consumer_timeout, {default})")

    def start(self) -> RabbitServer:
        """Start the node, and wait until it takes connections."""
        assert not self.running, "the server is running already"
        self._directory = tempfile.TemporaryDirectory(prefix="rabbitmq-", ignore_cleanup_errors=True)
        for _ in range(3):
            self._launch(Path(self._directory.name))
            wait_until(
                lambda: not self.running or "Server startup complete" in self.logs(),
                START_SECONDS,
                lambda: f"rabbitmq-server to start; log:\n{self.logs()}",
            )
            if self.running:
                return self
            self._end()
            if not re.search("eaddrinuse|already in use|epmd", self.logs()):
                break
        raise RuntimeError(f"{self._scripts}/rabbitmq-server did not start; log:\n{self.logs()}")

    def stop(self) -> None:
        """Stop the node and remove its directory; a second time does nothing."""
        self._end()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _end(self) -> None:
        # Nothing here outlives the session, so there is nothing to shut down in good order.
        for process in (self._process, self._epmd):
            if process is not None:
                processes.end(process)
        self._process = self._epmd = None

    def _launch(self, directory: Path) -> None:
        self.port, distribution, mapper = free_port(), free_port(), free_port()
        config = {
            "listeners.tcp.default": f"127.0.0.1:{self.port}",
            "loopback_users": "none",
            "log.console": "true",
            "log.console.level": "info",
            "disk_free_limit.absolute": "1MB",
            "vm_memory_high_watermark.absolute": "1GB",  # of a machine where other things run
        }
        (directory / "rabbitmq.conf").write_text("".join(f"{key} = {value}\n" for key, value in config.items()))
        (directory / "rabbitmq-env.conf").touch()
        (directory / "enabled_plugins").write_text("[].\n")
        cookie = directory / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(10))
            cookie.chmod(0o400)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        self._env = {
            **inherited,
            "HOME": str(directory),  # where Erlang looks for the cookie
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP": os.devnull,
            "RABBITMQ_NODENAME": f"tests{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(directory),
            "RABBITMQ_LOG_BASE": str(directory),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            # Two schedulers are plenty. Channels look every half second at what they have handed out for too long, and
            # quorum queues tell five times a second how many messages they have.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 "
            "-rabbit channel_tick_interval 500 -rabbit quorum_tick_interval 200",
        }
        with (directory / "log").open("ab") as log:
            options = {"env": self._env, "cwd": directory, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            # In the foreground, or Erlang would start one that outlives the node.
            mapping = [self._epmd_binary, "-port", str(mapper), "-address", "127.0.0.1"]
            self._epmd = processes.spawn(mapping, **options)
            self._process = processes.spawn([str(self._scripts / "rabbitmq-server")], **options)


def external_url() -> str | None:
    """Return the URL of a server that somebody else runs, if the environment names one."""
    return os.environ.get("RABBITMQ_URL") or os.environ.get("AMQP_URL")
