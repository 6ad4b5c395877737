"""A memcached of our own on a free loopback port, always stopped: a result backend that counts a chord's parts.

Where it comes from: PATH, else an error that says how to get one.
"""

from __future__ import annotations

import shutil
import socket
import subprocess

import psutil

from tests.support import processes
from tests.support.servers import ServerMissing, free_port
from tests.support.waiting import wait_until

ATTEMPTS = 5


def memcached_binary() -> str:
    """Return the path of a memcached.

    Raises:
        ServerMissing: there is none.
    """
    found = shutil.which("memcached")
    if found is None:
        raise ServerMissing("no memcached was found. Install one: `apt install memcached`, `brew install memcached`")
    return found


class Memcached:
    """A memcached, until it is stopped."""

    def __init__(self) -> None:
        binary = memcached_binary()
        for _ in range(ATTEMPTS):
            self.port = free_port()
            # `-u` matters to root alone, which memcached refuses to run as unless told so.
            command = [binary, "-l", "127.0.0.1", "-p", str(self.port), "-U", "0", "-u", "root", "-m", "16"]
            self._process = processes.spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(lambda: self._process.poll() is not None or self._listens(), 20, "memcached to listen")
            if self._process.poll() is None:
                return
            processes.end(self._process)
        raise RuntimeError(f"{binary} did not start")

    def url(self) -> str:
        """Return its URL, as Celery's ``result_backend`` has it."""
        return f"cache+memcached://127.0.0.1:{self.port}/"

    def stop(self) -> None:
        """Stop it."""
        processes.end(self._process)

    def _listens(self) -> bool:
        # Another process may have won the race for the port, and answer in its place.
        try:
            own = psutil.Process(self._process.pid).net_connections(kind="tcp4")
        except psutil.NoSuchProcess:
            return False
        if not any(each.status == psutil.CONN_LISTEN for each in own):
            return False
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"version\r\n")
            return connection.recv(64).startswith(b"VERSION")
