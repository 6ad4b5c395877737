"""A client over a plain socket, which sends bytes as they are, and what a server answers."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: Seconds within which a server must answer, and what is waited for must come.
TIMEOUT = 60.0
PROBLEM = "application/problem+json"


@dataclass
class Reply:
    """A response as it came over the socket."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def replayed(self) -> bool:
        """Whether it answers a request that was carried out before."""
        return self.headers.get("Idempotent-Replayed") == "true"

    @property
    def problem(self) -> dict[str, Any]:
        """The members of its problem details (RFC 9457)."""
        assert self.headers["Content-Type"] == PROBLEM
        assert self.headers["Cache-Control"] == "no-store"
        found: dict[str, Any] = json.loads(self.body)
        assert found["status"] == self.status
        assert found["title"]
        assert found["detail"]
        return found

    @property
    def kind(self) -> str:
        """The last part of the problem's type; "" of what is no problem."""
        if self.headers.get("Content-Type") != PROBLEM:
            return ""
        return str(self.problem["type"]).replace("#", ":").rpartition(":")[2]

    @property
    def summary(self) -> str:
        """What the rows expect: "201", "201 replayed", "422 key-reused"."""
        return f"{self.status} {'replayed' if self.replayed else self.kind}".strip()


#: What to do about an answer: its summary, what was expected (both as patterns, to be matched whole), and the advice.
ADVICE = [
    (r"4\d\d key-missing", r".*", "The middleware has required=True: override test_a_request_without_a_key_passes."),
    (r"401.*", r"(?!401).*", "Set anna and bert to headers of callers whom the application knows."),
    (r"503 store-unavailable", r".*", "The middleware cannot reach its store: see the log of the server."),
    (r"409 in-progress", r".*", "The first response was not recorded: see the log of the server."),
    (r"409 not-kept", r"\d+ replayed", "The response came and was not kept: see remember and response_max_bytes."),
    (r"\d+ replayed", r"422 .*", "Another request had the same fingerprint: see the option of that name."),
    (r"\d+ replayed", r"409 not-kept", "Set response_max_bytes to the middleware's; a stream is text/event-stream."),
    (r"\d+ replayed", r"\d+", "Another operation's response: see the options scope, which is to return the caller's "
     "account, and header and remember."),
    (r"4(04|05).*", r".*", "The application does not answer this: set `path`, and have it take GET, POST and, where "
     "scope is INSIDE, PATCH and the path with /other behind."),
    (r"403", r".*", "Something outside refuses it, as Django's CSRF protection does: have it let these requests pass."),
    (r"500", r"(?!500).*", "The application raised: see the log of the server."),
    (r"4\d\d", r"400 .*", "The server or something outside refused it before the middleware, which is no harm: "
     "deselect the fact."),
    (r"\d+", r"413 .*", "Set request_max_bytes to the middleware's. If the application reads no body without a length, "
     "as Django on WSGI, set reads_chunked = False."),
    (r"2\d\d", r"401", "A caller without credentials was let in: see the option scope, which is to return None there."),
    (r"\d+", r"(\d+ replayed|422 .*|409 not-kept|400 key-.*)", "The request was carried out: is the middleware around "
     "this path, does scope return the same for the same caller, and is there one store for all processes of the "
     "server (not memory://)?"),
]  # fmt: skip


def check(reply: Reply, expected: str, sent: bytes = b"") -> None:
    """See that a reply has this summary; say what was sent and answered, and what to do, where it has another."""
    got = reply.summary
    if got == expected:
        return
    advice = next((f" {text}" for g, e, text in ADVICE if re.fullmatch(g, got) and re.fullmatch(e, expected)), "")
    request = f" to {sent.partition(b' HTTP/')[0].decode('latin-1')}" if sent else ""
    raise AssertionError(
        f"The server answered {got!r}{request}, with the body {reply.body[:200]!r}; the fact expected {expected!r}."
        + advice
    )


class Connection:
    """A connection to a server, opened when bytes are sent, and again after the server has closed it.

    Arguments:
        url: Of the server: ``http``, a host and a port.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "http", f"Expected a URL that begins with http://, got {url!r}: the rows speak no TLS."
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.socket: socket.socket | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, *parts: bytes, pause: float = 0.0) -> None:
        """Send bytes, with so many seconds between the parts."""
        if self.socket is None:
            self.socket = socket.create_connection(self.address, TIMEOUT)
        for number, part in enumerate(parts):
            time.sleep(pause if number else 0.0)
            self.socket.sendall(part)

    def read(self, method: str = "POST") -> Reply:
        """Read a response; those that only announce one are skipped."""
        assert self.socket is not None
        response = http.client.HTTPResponse(self.socket, method=method)
        response.begin()
        reply = Reply(response.status, response.headers, response.read())
        if response.will_close:
            self.close()
        return reply

    def read_within(self, seconds: float) -> Reply | None:
        """Read a response; return None where none has come after so many seconds."""
        assert self.socket is not None
        self.socket.settimeout(seconds)
        try:
            return self.read()
        except TimeoutError:
            self.socket.settimeout(TIMEOUT)
            return None

    def first_line(self) -> bytes:
        """Read the first line of what the server sends, up to the empty line that ends its headers."""
        assert self.socket is not None
        found = b""
        while not found.endswith(b"\r\n\r\n"):
            byte = self.socket.recv(1)
            assert byte, f"the server closed the connection after {found!r}"
            found += byte
        return found.partition(b"\r\n")[0]

    def finish(self) -> bytes:
        """Send the end of all that is sent, and return what the server sends until it closes."""
        assert self.socket is not None
        found = b""
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while part := self.socket.recv(65536):
                found += part
        except ConnectionError:
            pass
        self.close()
        return found

    def close(self) -> None:
        """Close it, whatever was not read."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def request_bytes(
    method: str,
    target: str,
    headers: Iterable[tuple[str, str | bytes]],
    body: bytes | Iterable[bytes] = b"",
    *,
    version: str = "1.1",
    host: str = "test",
) -> bytes:
    """Return the bytes of a request.

    Arguments:
        method: Of its first line.
        target: Path and query.
        headers: Names and values; a value of type str is encoded as Latin-1.
        body: Its body; parts of one make it chunked.
        version: Of HTTP.
        host: Of the header Host.
    """
    lines = [f"{method} {target} HTTP/{version}".encode(), b"Host: " + host.encode()]
    lines += [name.encode() + b": " + (v.encode("latin-1") if isinstance(v, str) else v) for name, v in headers]
    if isinstance(body, bytes):
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*body, b""])
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", chunks])
