"""The pages of `web` in this process, and a visitor who sends requests to them over a socket."""

from __future__ import annotations

import html
import http.client
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from urllib.parse import urlencode, urlsplit

from celery_idempotent.cli.common import Stores
from celery_idempotent.cli.web.pages import Site
from celery_idempotent.cli.web.server import Access, Application, bind
from celery_idempotent.stores import Store
from celery_idempotent.stores.maintenance import NamedStore


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def text(self) -> str:
        """The words of a page, as a browser shows them."""
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", self.body)).split())

    @property
    def title(self) -> str:
        """The first heading."""
        found = re.search(r"<h1[^>]*>(.*?)</h1>", self.body, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    def links(self, path: str) -> list[str]:
        """Return the links to a page, in their order."""
        return [html.unescape(found) for found in re.findall(rf'href="({re.escape(path)}\?[^"]*)"', self.body)]

    @property
    def refresh(self) -> str:
        """Where a browser goes by itself, or nowhere."""
        found = re.search(r'http-equiv="refresh" content="\d+;url=([^"]*)"', self.body)
        return html.unescape(found[1]) if found else ""

    @property
    def form(self) -> tuple[str, dict[str, str]]:
        """Where the form that changes something leads to, and its hidden fields."""
        action = re.search(r'<form class="confirm" method="post" action="([^"]*)"', self.body)
        assert action is not None, self.body
        fields = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', self.body)
        return html.unescape(action[1]), {name: html.unescape(value) for name, value in fields}


class Visitor:
    """A browser's requests, without the browser.

    Arguments:
        url: What the command printed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url, self.host, self.port = url, parts.hostname, parts.port
        self.origin, self.cookie = f"http://{parts.netloc}", ""

    def enter(self) -> Reply:
        """Open the printed URL, and keep the cookie."""
        reply = self.send("GET", self.url.removeprefix(self.origin))
        self.cookie = reply.headers.get("Set-Cookie", "").partition(";")[0]
        return reply

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> Reply:
        """Send one request, with the cookie unless headers have another."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        sent = {
            "Cookie": self.cookie,
            **({} if body is None else {"Content-Type": "application/x-www-form-urlencoded"}),
        }
        try:
            connection.request(method, path, body, sent | headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **query: str) -> Reply:
        """Open a page."""
        return self.send("GET", f"{path}?{urlencode(query)}" if query else path)

    def confirm(self, page: Reply, **headers: str) -> Reply:
        """Send the form of a page, as a browser does."""
        action, fields = page.form
        return self.send("POST", action, urlencode(fields), **({"Origin": self.origin} | headers))


@contextmanager
def visiting(stores: Store | Sequence[NamedStore], tasks: object = None, *, changes: bool = False) -> Iterator[Visitor]:
    """Serve the pages of some stores, and yield a visitor who was let in."""
    used = [NamedStore("shelf", stores)] if isinstance(stores, Store) else stores
    guesses = (lambda typed: ()) if tasks is None else (lambda typed: tasks.of_text(typed, {}))  # type: ignore[attr-defined]
    access = Access()
    site = Site(Stores(used, guesses), tasks, access if changes else None, "celery-idempotent web")
    with bind(0, Application(site, access)) as server:
        visitor = Visitor(access.url(server.server_port))
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            visitor.enter()
            yield visitor
        finally:
            server.shutdown()
            thread.join()
