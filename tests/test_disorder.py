"""The options that bring disorder into a test run do so, and repeat it."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.disorder import shuffled

ROOT = Path(__file__).parent.parent
SLOW_WRITER = """
import logging, os, signal, socket, time
pauses = []
time.sleep = pauses.append
from tests.support.slowness import LOG, SIGNAL, WRITE, slow_down
slow_down("7")
for _ in range(40):
    logging.warning("a line")
assert 0 < len(pauses) < 40 and max(pauses) <= LOG[1], pauses
pauses.clear()
signal.signal(signal.SIGTERM, lambda *_: None)
for _ in range(40):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), 0)
assert 0 < len(pauses) <= 40 and max(pauses) <= SIGNAL[1], pauses
pauses.clear()
one, other = socket.socketpair()
for _ in range(200):
    one.sendall(b"x")
assert 0 < len(pauses) < 100 and max(pauses) <= WRITE[1], pauses
"""


def test_a_seed_shuffles_the_files_and_the_tests_of_each() -> None:
    items: list[Any] = [SimpleNamespace(path=file, number=n) for file in "abcdef" for n in range(6)]
    found = shuffled(items, 7)
    assert sorted(map(id, found)) == sorted(map(id, items))
    assert [file for file, _ in groupby(found, lambda item: item.path)] != list("abcdef")
    assert sum(1 for _ in groupby(found, lambda item: item.path)) == 6
    assert [item.number for item in found][:6] != list(range(6))
    assert found == shuffled(items, 7) != shuffled(items, 8)


def test_a_slow_process_pauses_where_others_see_what_it_does() -> None:
    subprocess.run([sys.executable, "-c", SLOW_WRITER], cwd=ROOT, check=True, capture_output=True)
