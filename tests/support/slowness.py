"""Processes that pause, at random by a seed, where others see what they do: after a line in the log, before a signal
that ends a process, around what they write to a socket."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from typing import Any

#: In the environment: the seed of the processes that pause.
SLOW = "TESTS_SLOW"
#: How often, and for how many seconds at most.
LOG, SIGNAL, WRITE, SEEN = (0.5, 0.25), (0.7, 0.3), (0.03, 0.15), (0.4, 0.6)


def slow_down(seed: str) -> None:
    """Have this process pause, and each that it forks by a seed of its own."""
    pauses = Pauses(seed)
    emit, kill, killpg, sendall = logging.StreamHandler.emit, os.kill, os.killpg, socket.socket.sendall

    def slow_emit(self: Any, record: logging.LogRecord) -> None:
        emit(self, record)
        pauses.pause(LOG)

    def slow_kill(pid: int, number: int) -> None:
        if number:  # 0 only asks whether there is such a process
            pauses.pause(SIGNAL)
        kill(pid, number)

    def slow_killpg(pgid: int, number: int) -> None:
        pauses.pause(SIGNAL)
        killpg(pgid, number)

    def slow_sendall(self: socket.socket, *args: Any) -> None:
        pauses.pause(WRITE)
        sendall(self, *args)
        pauses.pause(WRITE)

    logging.StreamHandler.emit, socket.socket.sendall = slow_emit, slow_sendall
    os.kill, os.killpg = slow_kill, slow_killpg


class Pauses:
    """The pauses of a process, and those of each that it forks, by a seed."""

    def __init__(self, seed: str) -> None:
        self._seed, self._pid, self._random = seed, 0, random.Random(seed)

    def pause(self, often: tuple[float, float]) -> None:
        """Sleep with a probability, for a random part of so many seconds."""
        if self._pid != os.getpid():
            self._pid, self._random = os.getpid(), random.Random(f"{self._seed} {os.getpid()}")
        if self._random.random() < often[0]:
            time.sleep(self._random.random() * often[1])
