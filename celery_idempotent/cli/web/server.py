"""The server of the pages: it listens on loopback alone, and answers those who have its password."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ...errors import ConfigurationError, IdempotencyError, RecordUnreadable

ADDRESS = "127.0.0.1"
#: Names that no other machine can have: a page that rebinds its own name to this address sends that name.
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
#: Bytes of a form, and how many fields it, or a query, may have.
LARGEST, FIELDS = 65536, 50
#: Seconds for a client to send its request.
PATIENCE = 30
STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
#: There are no scripts, so none is allowed. Pages show results, so no cache keeps them.
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "same-origin"),  # with no-referrer, browsers send no Origin
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


@dataclass(frozen=True)
class Request:
    """What a browser sent."""

    method: str
    path: str
    host: str
    origin: str
    cookies: str
    query: Mapping[str, str]
    form: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """What to send to a browser."""

    status: int
    body: bytes = b""
    type: str = "text/html; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """A request that gets a page with a sentence instead of what it requested."""

    #: Whether the browser was not let in, and so gets no link to other pages.
    outside = False

    def __init__(self, status: HTTPStatus, title: str, text: str) -> None:
        super().__init__(text)
        self.status, self.title = status, title


class ShutOut(Refused):
    """A request of a browser that was not let in."""

    outside = True


Handler = Callable[[Request], Response]


class Pages(Protocol):
    """What an application serves."""

    #: By path and method.
    routes: Mapping[str, Mapping[str, Handler]]

    def refusal(self, refused: Refused) -> Response:
        """Return the page of a request that was refused."""
        ...


def redirect(path: str, *headers: tuple[str, str], **query: str) -> Response:
    """Return the response that sends the browser to another page."""
    location = f"{path}?{urlencode(query)}" if query else path
    return Response(HTTPStatus.SEE_OTHER, headers=(("Location", location), *headers))


class Access:
    """The password of one run, and the token that its forms carry."""

    def __init__(self) -> None:
        self._password, self.token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._cookie = ""

    def url(self, port: int) -> str:
        """Return the URL that lets a browser in."""
        self._cookie = f"celery_idempotent_{port}"  # browsers send a cookie to every port of a host
        return f"http://{ADDRESS}:{port}/?password={self._password}"

    def check_host(self, request: Request) -> None:
        """Raise if the browser was led here by the name of another machine."""
        if not LOOPBACK.fullmatch(request.host):
            raise ShutOut(
                HTTPStatus.MISDIRECTED_REQUEST,
                "Not by this name",
                f"Expected the address {ADDRESS} or localhost, got {request.host or 'none'!r}. To reach the pages from "
                f"another machine, forward the port: ssh -L 8765:{ADDRESS}:8765 HOST",
            )

    def admitted(self, request: Request) -> Response | None:
        """Return the response to the URL that lets a browser in, and None for any other.

        The cookie goes along when a link elsewhere is followed, which can only read, and with no form of another site.
        """
        given = request.query.get("password")
        if given is None or not secrets.compare_digest(given.encode(), self._password.encode()):
            return None
        cookie = f"{self._cookie}={self._password}; Path=/; HttpOnly; SameSite=Lax"
        return redirect("/", ("Set-Cookie", cookie))

    def check_password(self, request: Request) -> None:
        """Raise if the browser was not let in."""
        pairs = (part.strip().partition("=") for part in request.cookies.split(";"))
        given = next((value for name, _, value in pairs if name == self._cookie), "")
        if not secrets.compare_digest(given.encode(), self._password.encode()):
            raise ShutOut(
                HTTPStatus.FORBIDDEN,
                "Open the printed URL",
                "Expected the password of this run. Open the URL that the command printed: it ends in ?password=...",
            )

    def check_form(self, request: Request) -> None:
        """Raise if a form was not sent from a page of this run."""
        token = request.form.get("token", "")
        if request.origin != f"http://{request.host}" or not secrets.compare_digest(
            token.encode(), self.token.encode()
        ):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "Not from this page",
                "Expected a form that one of these pages has sent. Go back, reload the page, and confirm again.",
            )


class Application:
    """The pages as a WSGI application: who may read them, and what is sent with each.

    Arguments:
        pages: What it serves.
        access: Who may read it.
    """

    def __init__(self, pages: Pages, access: Access) -> None:
        self._pages, self._access = pages, access

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        try:
            response = self._respond(_read(environ))
        except Refused as refused:
            response = self._pages.refusal(refused)
        status = HTTPStatus(response.status)
        headers = [("Content-Type", response.type), ("Content-Length", str(len(response.body)))]
        start_response(f"{status.value} {status.phrase}", [*headers, *HEADERS, *response.headers])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [response.body]

    def _respond(self, request: Request) -> Response:
        self._access.check_host(request)
        if request.path.startswith("/static/"):
            return _static(request.path)
        if admitted := self._access.admitted(request):
            return admitted
        self._access.check_password(request)
        methods = self._pages.routes.get(request.path)
        if methods is None:
            raise Refused(HTTPStatus.NOT_FOUND, "No such page", f"There is no page at {request.path}.")
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            text = f"Expected {' or '.join(methods)}, got {request.method}."
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Not that way", text)
        if request.method == "POST":
            self._access.check_form(request)
        try:
            return handler(request)
        except RecordUnreadable as error:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "The record cannot be read", str(error)) from error
        except IdempotencyError as error:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "The store cannot serve", str(error)) from error


def _read(environ: dict[str, Any]) -> Request:
    form: dict[str, str] = {}
    if environ["REQUEST_METHOD"] == "POST":
        length = environ.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or len(length) > len(str(LARGEST)) or int(length) > LARGEST:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "Too large", f"Expected at most {LARGEST:,} bytes.")
        form = _fields(environ["wsgi.input"].read(int(length)).decode("latin-1"))
    return Request(
        method=environ["REQUEST_METHOD"],
        path=environ.get("PATH_INFO", ""),
        host=environ.get("HTTP_HOST", ""),
        origin=environ.get("HTTP_ORIGIN", ""),
        cookies=environ.get("HTTP_COOKIE", ""),
        query=_fields(environ.get("QUERY_STRING", "")),
        form=form,
    )


def _fields(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS))
    except ValueError as error:
        text = f"Expected at most {FIELDS} fields in a query or a form."
        raise Refused(HTTPStatus.BAD_REQUEST, "Too many fields", text) from error


def _static(path: str) -> Response:
    name = path.removeprefix("/static/")
    found = {each.name: each for each in STATIC.iterdir()}.get(name)
    if found is None:
        raise Refused(HTTPStatus.NOT_FOUND, "No such page", f"There is no page at {path}.")
    return Response(HTTPStatus.OK, found.read_bytes(), TYPES[found.suffix])


class Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, none of which keeps the command from ending."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, without the look-up of the address's name that the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]
        self.setup_environ()


class QuietHandler(WSGIRequestHandler):
    """Reads a request within a time, and writes no line for it."""

    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Write nothing: a query may hold a password or a key."""


def bind(port: int, application: Application) -> Server:
    """Return a server that listens on a port of loopback.

    Raises:
        ConfigurationError: the port is not free.
    """
    try:
        server = Server((ADDRESS, port), QuietHandler)
    except OSError as error:
        raise ConfigurationError(
            f"Expected port {port} of {ADDRESS} to be free, got: {error.strerror}. "
            "Give another with --port, or --port 0 for one that is free."
        ) from error
    server.set_app(application)
    return server
