"""A real Flower, as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.support import processes
from tests.support.celery.nodes import ROOT
from tests.support.servers import free_port
from tests.support.waiting import wait_until

START_SECONDS = 40.0


class Flower:
    """`celery flower` on a loopback port.

    Args:
        app_module: what `celery -A` is given.
        config: its flowerconfig.py.
        env: environment of the app.
        log: where its log goes.
    """

    def __init__(self, app_module: str, config: Path, env: Mapping[str, str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        address = ["--address=127.0.0.1", f"--port={self.url.rsplit(':', 1)[1]}"]
        command = [sys.executable, "-m", "celery", "-A", app_module, "flower", *address, f"--conf={config}"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.log = log
        with log.open("wb") as out:
            self.process = processes.spawn(
                command, env={**os.environ, **env, "PYTHONPATH": path}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        try:
            wait_until(self._serves, START_SECONDS, lambda: f"Flower to serve; its log:\n{log.read_text()}")
        except BaseException:
            self.close()
            raise

    def get(self, path: str) -> str:
        """Return the text of a page."""
        return _get(f"{self.url}{path}")

    def close(self) -> None:
        processes.end(self.process)

    def _serves(self) -> bool:
        assert self.process.poll() is None, f"Flower ended; its log:\n{self.log.read_text()}"
        return serves(self.url)


def serves(url: str) -> bool:
    """Return whether Flower serves its pages.

    It prints its address before that. Asked to end in between, Flower 2.2 hangs once in 60 times: its executor does not
    know the thread yet that it has just begun.
    """
    try:
        return _get(f"{url}/healthcheck") == "OK"
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
