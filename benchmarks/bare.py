"""The scripts of a first run, sent by as little Python as there can be: what is left to a library that needs them."""

from __future__ import annotations

import socket
import threading
from typing import Any

import redis
from redis.connection import parse_url

from celery_idempotent.stores import Claim, Lease, State
from celery_idempotent.stores.redis.records import claim_args, lease_args
from celery_idempotent.stores.redis.store import script

__all__ = ["BareRuns"]

HOUR_MS = 3_600_000
#: Of keys that are as long as a task id.
DIGITS = 36


class BareRuns(threading.local):
    """A socket for each thread, and the commands but for their keys.

    Arguments:
        url: Of a Redis that is not asked for a password.
    """

    def __init__(self, url: str) -> None:
        claim = Claim("", "0" * 32, lease_ttl=60.0, keep_ttl=3600.0, holder="worker-7.example.org:4711")
        settled = (*lease_args(Lease(claim, 1)), State.COMPLETED.value, b"json:null", HOUR_MS)
        self._acquire, self._settle = _around("acquire", claim_args(claim)), _around("settle", settled)
        place: dict[str, Any] = parse_url(url)
        with redis.Redis(**place) as client:
            for verb in ("acquire", "settle"):
                client.script_load(script(verb)[0])
        self._socket = socket.create_connection((place["host"], place["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask(_packed("SELECT", place["db"]), b"+OK\r\n")

    def acquire(self, number: int) -> None:
        """Take the lease on a key that no other has."""
        before, after = self._acquire
        # Last of the reply is what the script read of a record: nothing.
        reply = self._ask(before + b"%036d" % number + after, b"\r\n*0\r\n")
        assert reply.startswith(b"*6\r\n$5\r\nlease\r\n"), reply

    def settle(self, number: int) -> None:
        """Settle it."""
        before, after = self._settle
        self._ask(before + b"%036d" % number + after, b":1\r\n")

    def _ask(self, command: bytes, end: bytes) -> bytes:
        """Send a command and return its reply, which ends so."""
        self._socket.sendall(command)
        reply = self._socket.recv(4096)
        while not reply.endswith(end):  # a server may write a reply in parts
            assert not reply.startswith(b"-"), reply
            part = self._socket.recv(4096)
            assert part, "the server has closed the connection"
            reply += part
        return reply


def _packed(*command: Any) -> bytes:
    return b"".join(redis.Connection().pack_command(*command))


def _around(verb: str, args: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """Return the command for a script before its key, and after it."""
    command = _packed("EVALSHA", script(verb)[1], 1, "0" * DIGITS, *args)
    before, _, after = command.partition(b"0" * DIGITS + b"\r\n")
    return before, b"\r\n" + after
