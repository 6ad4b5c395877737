"""A PgBouncer of our own before a PostgreSQL, in transaction mode, with fewer connections to the server than clients.

Where it comes from: PATH, or where Debian packages put it, else an error that says how to get one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from tests.support import processes
from tests.support.postgres import as_whom, own
from tests.support.servers import ServerMissing, free_port
from tests.support.waiting import wait_until

CONFIG = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 200
logfile = {folder}/log
"""


def pgbouncer_binary() -> str:
    """Return the path of a pgbouncer.

    Raises:
        ServerMissing: there is none.
    """
    for candidate in (shutil.which("pgbouncer"), "/usr/sbin/pgbouncer"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ServerMissing("no pgbouncer was found. Install one: `apt install pgbouncer`, `brew install pgbouncer`")


class Bouncer:
    """A PgBouncer, until it is stopped.

    Arguments:
        url: The PostgreSQL behind it, which must trust the user `postgres`.
        size: Its connections to each database.
    """

    def __init__(self, url: str, *, size: int = 2) -> None:
        binary = pgbouncer_binary()
        self._url = url
        server = urlsplit(url)
        self.port = free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="pgbouncer-", ignore_cleanup_errors=True)
        folder = Path(self._directory.name)
        (folder / "ini").write_text(
            CONFIG.format(
                host=server.hostname, port=server.port or 5432, listen=self.port, size=size, folder=self._directory.name
            ).replace("* = ", f"* = user={server.username or 'postgres'} ")
        )
        own(folder)
        command = [binary, "-q", str(folder / "ini")]
        self._process = processes.spawn(command, cwd="/", stderr=subprocess.DEVNULL, **as_whom())
        wait_until(self._answers, 30, lambda: f"pgbouncer to answer: {(folder / 'log').read_text()}")

    def url(self) -> str:
        """Return the URL that leads through it."""
        server = urlsplit(self._url)
        return server._replace(netloc=f"{server.username or 'postgres'}@127.0.0.1:{self.port}").geturl()

    def stop(self) -> None:
        """Stop it, and remove its directory."""
        processes.end(self._process, grace=5)
        self._directory.cleanup()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "pgbouncer ended"
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True
