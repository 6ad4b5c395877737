"""The demo's payment gateway keeps a caller waiting for its kill, and sees whether it came."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from celery_idempotent.cli.demo import gateway as module
from celery_idempotent.cli.demo.gateway import Gateway
from celery_idempotent.cli.demo.scenario import Fault
from tests.support.waiting import wait_until

#: Closes a connection with a reset, as the kernel does for a process that is killed with an answer unread.
RESET = struct.pack("ii", 1, 0)


class Heard(Gateway):
    """A gateway that remembers what it told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[str] = []

    def report(self, event: str, **facts: Any) -> None:
        super().report(event, **facts)
        self.told.append(event)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Heard]:
    """A gateway that serves one order, whose caller is to be killed before it is charged."""
    gateway = Heard(str(tmp_path / "ledger"), {"ORD-1": (0.0, Fault.KILL_BEFORE)})
    thread = threading.Thread(target=gateway.serve_forever)
    thread.start()
    yield gateway
    gateway.shutdown()
    thread.join()
    gateway.server_close()


def charge(gateway: Gateway) -> Request:
    body = json.dumps({"order": "ORD-1", "amount": 999, "pid": 1}).encode()
    return Request(f"http://127.0.0.1:{gateway.server_port}/charges", body)


def test_a_caller_whose_kill_never_comes_is_charged_after_a_while(
    gateway: Heard, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    with urlopen(charge(gateway), timeout=20) as reply:
        assert json.load(reply)["receipt"]
    told = [json.loads(line)["event"] for line in capfd.readouterr().out.splitlines()]
    assert told == gateway.told == ["called", "held", "charged", "receipt"]


@pytest.mark.parametrize("options", [[], [(socket.SOL_SOCKET, socket.SO_LINGER, RESET)]], ids=["closed", "reset"])
def test_a_caller_that_is_gone_is_not_charged(
    gateway: Heard, options: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bool] = []
    lose_caller = module.Conversation._lose_caller
    monkeypatch.setattr(module.Conversation, "_lose_caller", lambda *args: lost.append(lose_caller(*args)) or lost[-1])
    request = charge(gateway)
    assert isinstance(request.data, bytes)
    with socket.create_connection(("127.0.0.1", gateway.server_port)) as caller:
        caller.sendall(b"POST /charges HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(request.data) + request.data)
        wait_until(lambda: "held" in gateway.told, message="the caller to be held")
        for option in options:
            caller.setsockopt(*option)
    wait_until(lambda: lost, message="the gateway to see that the caller is gone")
    assert lost == [True]
    assert gateway.told == ["called", "held"]
