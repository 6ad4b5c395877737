"""A Redis that fails over: a main server, replicas that reach it through a proxy, and a sentinel that watches."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import redis
from redis.sentinel import Sentinel

from tests.support import processes
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, free_port, open_client, redis_binary
from tests.support.waiting import wait_until

NAME = "orders"
REPLICAS = 2
READY_SECONDS = 60.0
#: After its failover timeout a sentinel tries a failover again that came to nothing. It also has replicas follow the
#: main server directly then, which would lead them around our proxy: not before the main server is dead.
PATIENT_MS, HASTY_MS = 600_000, 3_000
#: After so long without an answer a server is dead for the sentinel: a busy machine must not have it promote another.
DOWN_MS = 30_000


class Failover:
    """One main server, two replicas and one sentinel, started when it is entered."""

    def __init__(self) -> None:
        quick = {"repl_diskless_sync": "yes", "repl_diskless_sync_delay": 0}
        self.main = RedisServer(**quick)
        self._quick = quick
        self._replicas: list[RedisServer] = []
        self._link: Proxy | None = None
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="sentinel-", ignore_cleanup_errors=True)
        self.port = free_port()

    def __enter__(self) -> Failover:
        try:
            self.main.start()
            self._link = Proxy(self.main.port).__enter__()
            for _ in range(REPLICAS):
                self._replicas.append(RedisServer(replicaof=f"127.0.0.1 {self._link.port}", **self._quick).start())
            self._start_sentinel()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._sentinel is not None:
            processes.end(self._sentinel)
        for server in (*self._replicas, self.main):
            server.stop()
        if self._link is not None:
            self._link.close()
        self._directory.cleanup()

    def cut_replication(self) -> None:
        """Hold back whatever the main server sends its replicas from now on; they believe that it is just quiet."""
        assert self._link is not None
        with self.main.client() as client:
            sent = client.info("replication")["master_repl_offset"]

            def is_copied() -> bool:
                told = client.info("replication")
                replicas = [told[f"slave{number}"] for number in range(told["connected_slaves"])]
                return bool(replicas) and all(replica["offset"] >= sent for replica in replicas)

            wait_until(is_copied, READY_SECONDS, "the replicas to have what was written before")
        self._link.partition()

    def kill_main(self) -> None:
        """Kill the main server; the sentinel promotes a replica, at once."""
        self.main.kill()
        with redis.Redis(port=self.port, socket_timeout=2) as client:
            client.sentinel_set(NAME, "failover-timeout", HASTY_MS)

            def is_begun() -> bool:
                try:
                    return bool(client.execute_command("SENTINEL", "FAILOVER", NAME))
                except redis.ResponseError as error:  # it has not heard of its replicas for a while
                    if "NOGOODSLAVE" not in str(error):
                        raise
                    return False

            wait_until(is_begun, READY_SECONDS, "a failover to begin")

    def wait_for_promotion(self) -> None:
        """Wait until a replica has been promoted and the other one follows it."""
        wait_until(self._is_promoted, READY_SECONDS, lambda: f"a replica to be promoted; log:\n{self._log()}")

    def main_address(self) -> tuple[str, int]:
        """Return whom the sentinel names."""
        with redis.Redis(port=self.port, socket_timeout=2) as client:
            host, port = client.sentinel_get_master_addr_by_name(NAME)
            return str(host), int(port)

    def _is_promoted(self) -> bool:
        _, port = self.main_address()
        if port == self.main.port:
            return False
        with redis.Redis(port=port, socket_timeout=2) as client:
            found = client.info("replication")
            return found["role"] == "master" and found["connected_slaves"] == REPLICAS - 1

    def _start_sentinel(self) -> None:
        config = Path(self._directory.name) / "sentinel.conf"
        config.write_text(
            f"port {self.port}\n"
            "bind 127.0.0.1\n"
            f"dir {self._directory.name}\n"
            f"logfile {self._directory.name}/log\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.main.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_MS}\n"
            f"sentinel failover-timeout {NAME} {PATIENT_MS}\n"
        )
        command = [redis_binary(), str(config), "--sentinel"]
        self._sentinel = processes.spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._knows_its_replicas, READY_SECONDS, lambda: f"the sentinel to see all; log:\n{self._log()}")

    def _knows_its_replicas(self) -> bool:
        try:
            found = Sentinel([("127.0.0.1", self.port)], socket_timeout=2).discover_slaves(NAME)
        except redis.RedisError:
            return False
        with self.main.client() as client:
            return len(found) == REPLICAS and client.execute_command("WAIT", REPLICAS, 200) == REPLICAS

    def _log(self) -> str:
        path = Path(self._directory.name) / "log"
        return path.read_text(errors="replace") if path.exists() else ""


class Watch:
    """A sentinel that watches servers, started when it is entered.

    Arguments:
        services: The port of each service's main server, as clients are told of it.
        config: More lines of its configuration.
        binary: Another redis-server than that of the other tests.
    """

    def __init__(self, services: dict[str, int], *config: str, binary: str = "") -> None:
        self._binary = binary or redis_binary()
        self._services, self._config = services, config
        self._directory = tempfile.TemporaryDirectory(prefix="sentinel-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def __enter__(self) -> Watch:
        config = Path(self._directory.name) / "sentinel.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._directory.name}",
            *(f"sentinel monitor {name} 127.0.0.1 {port} 1" for name, port in self._services.items()),
            *self._config,
        ]
        config.write_text("\n".join([*lines, ""]))
        command = [self._binary, str(config), "--sentinel"]
        self._process = processes.spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, READY_SECONDS, "the sentinel to answer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it; a second time does nothing."""
        if self._process is not None:
            processes.end(self._process)
            self._process = None
        self._directory.cleanup()

    def _answers(self) -> bool:
        try:
            with open_client(f"redis://127.0.0.1:{self.port}", socket_timeout=2) as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        return True
