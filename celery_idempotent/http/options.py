"""The options of the middlewares, checked when an application is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import iscoroutinefunction, signature
from typing import Any, Literal, TypedDict

from ..core.policy import OnStoreError, Policy
from ..errors import ConfigurationError
from ..stores.base import Store
from ..stores.maintenance import NAMESPACE
from ..units import Duration, parse_duration, parse_size, unfit
from .request import Comparison
from .response import Response


class _Constant:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: What a scope returns for a request that is to pass as if it had no key.
UNGUARDED = _Constant("UNGUARDED")
#: The scope of requests whose caller their view alone knows, and gives to `begin`.
INSIDE = _Constant("INSIDE")
_REQUIRED: Any = object()
#: Ways to compare bodies.
COMPARISONS = ("bytes", "json", "headers")

#: The names that headers can have: RFC 9110, section 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

#: What is in routes and patterns of frameworks, as in ``/orders/{id}``, and in no path that a request has.
_PATTERN = re.compile(r"[*{}<>?]|(?<=/):")

Remember = Callable[[Response], object]


class _Scope(TypedDict):
    scope: str | Callable[..., object] | _Constant | None
    """Who calls, verified: a callable over the request, a header's name, None or INSIDE; required."""


class HttpOptions(_Scope, total=False):
    """Name the options of a middleware, with what may be written for each: for type checkers and Django's settings.

    Durations and sizes are written as in `Policy`.

    Example::

        IDEMPOTENCY_HTTP: HttpOptions = {"store": "redis://localhost/1", "scope": lambda request: request.user.pk}
    """

    store: Store | str | None
    """A store or its URL; None (the default): that of ``celery_app``."""
    celery_app: Any
    """A Celery app, whose store and namespace are used (default: none)."""
    name: str
    """Of the service, in keys: services that share a store have different ones (default: "http")."""
    namespace: str
    """How the keys begin."""
    header: str | Callable[[Any], str | None]
    """Of the key; or a callable over the request (default: "Idempotency-Key")."""
    methods: Collection[str]
    """Of the requests that are guarded (default: POST and PATCH)."""
    paths: Collection[str] | Callable[[str], object] | None
    """Prefixes of the paths that are guarded, from the root or from where the application is mounted; or a callable
    over the path; None (the default): all."""
    exempt: Collection[str] | Callable[[str], object]
    """Prefixes of paths that are not, or a callable (default: none)."""
    required: bool
    """Answer 400 to a request without a key (default: False)."""
    fingerprint: Literal["bytes", "json", "headers"] | Callable[[Any, bytes], object]
    """How bodies are compared; or a callable (default: "bytes")."""
    fingerprint_headers: Sequence[str]
    """Headers that are compared too (default: none)."""
    lease_ttl: Duration
    """As in `Policy` (default: 30 s)."""
    result_ttl: Duration
    """How long a response is replayed (default: 24 h)."""
    failure_ttl: Duration
    """As in `Policy` (default: 24 h)."""
    max_crashes: int
    """As in `Policy` (default: 5)."""
    on_store_error: OnStoreError
    """"raise" (the default): 503; "wait" up to ``wait_timeout``; "run" without a guard."""
    on_conflict: Literal["raise", "wait"]
    """"raise" (the default): 409; "wait" up to ``wait_timeout``."""
    wait_timeout: Duration
    """How long a request waits (default: 10 s)."""
    remember: Remember | None
    """A callable over a `Response`: True, False, "fact"; None (the default): by its status."""
    settle_at: Literal["response", "return"]
    """Record a response when it is complete (the default); or when the application has returned."""
    settle_timeout: Duration
    """How long a response waits for the store (default: 5 s)."""
    request_max_bytes: int | str
    """Of a body with a key (default: "1MiB")."""
    response_max_bytes: int | str
    """Of a body that is kept (default: "256KiB")."""
    keep_headers: Sequence[str]
    """Headers to keep that are not kept otherwise, as Set-Cookie (default: none)."""
    drop_headers: Sequence[str]
    """More headers that are not kept (default: none)."""
    docs_url: str | None
    """Of a page for clients, with a section for each type of problem (default: none)."""
    propagate: bool
    """Whether the tasks that a request publishes get ids that follow from its key (default: True)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the options of a middleware, which `HttpOptions` describes.

    Raises ConfigurationError for an unfit value.
    """

    scope: Any = _REQUIRED
    store: Store | str | None = None
    celery_app: Any = None
    name: str = "http"
    namespace: str = NAMESPACE
    header: str | Callable[[Any], str | None] = "Idempotency-Key"
    methods: Collection[str] = ("POST", "PATCH")
    paths: Any = None
    exempt: Any = ()
    required: bool = False
    fingerprint: Comparison = "bytes"
    fingerprint_headers: Sequence[str] = ()
    lease_ttl: float = 30.0
    result_ttl: float = 86400.0
    failure_ttl: float = 86400.0
    max_crashes: int = 5
    on_store_error: str = "raise"
    on_conflict: str = "raise"
    wait_timeout: float = 10.0
    remember: Remember | None = None
    settle_at: str = "response"
    settle_timeout: float = 5.0
    request_max_bytes: int = 1048576
    response_max_bytes: int = 262144
    keep_headers: Sequence[str] = ()
    drop_headers: Sequence[str] = ()
    docs_url: str | None = None
    propagate: bool = True
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(getattr(self, name), name))
        if self.scope is _REQUIRED:
            hint = (
                'write scope=lambda request: the account of its verified user, scope="X-Api-Key", scope=None if there '
                "is one caller, or scope=INSIDE if the view calls begin()"
            )
            raise unfit("scope", "who calls, as a callable, the name of a header, None or INSIDE", "nothing", hint)
        if parse_duration(self.result_ttl, "result_ttl", least=0.0) < 0.5:
            hint = 'write "24h", for which clients may repeat a request'
            raise unfit("result_ttl", "a duration from 0.5 s", self.result_ttl, hint)
        if self.store is None and self.celery_app is None:
            raise unfit("store", "a store, its URL, or celery_app=", None, 'write "redis://localhost/1"')
        given = {name: getattr(self, name) for name in _POLICY}
        policy = Policy(store=self.store, result_max_bytes=4 * self.response_max_bytes + 65536, **given)
        object.__setattr__(self, "policy", policy)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Return options as they were written; raise ConfigurationError for one that is unknown."""
        known = [each.name for each in fields(cls) if each.init]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}"
                raise unfit("idempotency", "options of the middleware", name, hint)
        return cls(**options)

    def guards(self, method: str, path: str, prefix: str = "") -> bool:
        """Return whether a request is guarded.

        Arguments:
            method: Its method; frameworks take one in lower case for the same.
            path: Its path, unescaped, from the server's root on.
            prefix: What of that is where the application is mounted.
        """
        if method.upper() not in self.methods:
            return False
        within = path.removeprefix(prefix) if prefix else path
        return (self.paths is None or _matches(self.paths, path, within)) and not _matches(self.exempt, path, within)


def check_application(app: Any) -> None:
    """Refuse what Django gives to its middlewares in place of an application, and applications of other protocols.

    Raises:
        ConfigurationError: it takes a request, and nothing else; or nothing at all.
    """
    if takes(app, 2) or takes(app, 3):
        return
    if takes(app, 1):
        raise ConfigurationError(
            f"Expected an application, got {app!r}, which takes a request alone, as what Django gives to a middleware. "
            'Write "celery_idempotent.http.django.IdempotencyMiddleware" in MIDDLEWARE, and its options in the setting '
            f"IDEMPOTENCY_HTTP. {_OTHERS}"
        )
    if takes(app, 0):
        raise ConfigurationError(f"Expected an application for ASGI or WSGI, got {app!r}, which is neither. {_OTHERS}")


#: What users of frameworks with a server of their own can do.
_OTHERS = "In aiohttp and Tornado, write @idempotent on a function that the handler calls with the key."


def takes(app: Any, count: int) -> bool:
    """Return whether an application shows that it takes so many arguments."""
    try:
        signature(app, follow_wrapped=False).bind(*[None] * count)
    except (TypeError, ValueError):  # it takes others, or shows none
        return False
    return True


def _matches(paths: Any, path: str, within: str) -> bool:
    """Return whether a path begins with one of these, by whole segments; or its part within an application does."""
    if callable(paths):
        return bool(paths(path))
    return any(f"{one}/".startswith(f"{each.rstrip('/')}/") for one in (path, within) for each in paths)


def _callable(value: Any, option: str) -> bool:
    """Return whether a value is callable; refuse a coroutine function, whose every answer would be taken for yes."""
    if iscoroutinefunction(value) or iscoroutinefunction(getattr(value, "__call__", None)):  # noqa: B004
        raise unfit(option, "a function that is no coroutine", value, "write it with def, and await nothing in it")
    return callable(value)


def _paths(value: Any, option: str) -> Any:
    if value is None or _callable(value, option):
        return value
    if option == "paths" and not isinstance(value, str) and not value:
        raise unfit(option, "one path at least", value, "leave the option out to guard all")
    if isinstance(value, str) or not all(isinstance(each, str) and each.startswith("/") for each in value):
        raise unfit(option, "paths that begin with a slash, or a callable", value, 'write ["/orders"]')
    for pattern in filter(_PATTERN.search, value):
        before = _PATTERN.split(pattern)[0].rpartition("/")[0] or "/"
        hint = f'write ["{before}"], which stands for all below it too, or a callable over the path'
        raise unfit(option, "paths and no patterns", pattern, hint)
    return tuple(value)


def _is_request_name(value: Any, option: str) -> bool:
    """Return whether this is the name of a request's header; refuse one that many servers drop, or take for another."""
    if isinstance(value, str) and "_" in value and _is_name(value):
        name = "-".join(part.capitalize() for part in value.removeprefix("HTTP_").split("_"))
        raise unfit(option, "the name of a header, as it is sent", value, f"write {name!r}")
    return _is_name(value)


def _is_name(value: Any) -> bool:
    """Return whether a header can have this name: no request has one with a blank or a colon in it."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def _names(value: Any, option: str) -> tuple[str, ...]:
    if isinstance(value, str) or not all(map(_is_name, value)):
        raise unfit(option, "names of headers", value, 'write ["Accept"]')
    return tuple(value)


def _request_names(value: Any, option: str) -> tuple[str, ...]:
    for each in _names(value, option):
        _is_request_name(each, option)
    return tuple(value)


def _methods(value: Any, option: str) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(each, str) and each.isupper() for each in value):
        raise unfit(option, "methods in upper case", value, 'write ["POST", "PATCH"]')
    if not value:
        raise unfit(option, "one method at least", value, "leave the option out to guard POST and PATCH")
    if unsafe := {"GET", "HEAD", "OPTIONS", "TRACE"} & set(value):
        raise unfit(option, "methods that change something", sorted(unsafe), "leave them out, since they need no key")
    return tuple(value)


def _text(value: Any, option: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise unfit(option, "a text", value, "write one")


def _header(value: Any, option: str) -> Any:
    if _callable(value, option) or _is_request_name(value, option):
        return value
    raise unfit(option, "the name of a header, or a callable over the request", value, 'write "Idempotency-Key"')


def _scope(value: Any, option: str) -> Any:
    if value in (None, INSIDE) or value is _REQUIRED or callable(value) or _is_request_name(value, option):
        return value
    hint = "write lambda request: request.user.id"
    raise unfit(option, "a callable over the request, the name of a header, None or INSIDE", value, hint)


def _comparison(value: Any, option: str) -> Any:
    if _callable(value, option) or value in COMPARISONS:
        return value
    raise unfit(option, "one of 'bytes', 'json', 'headers', or a callable", value, "write 'bytes'")


def _remember(value: Any, option: str) -> Any:
    if value is None or _callable(value, option):
        return value
    raise unfit(option, "a callable over the response, or None", value, "write lambda response: response.status < 500")


def _one_of(*choices: str) -> Callable[[Any, str], str]:
    def check(value: Any, option: str) -> str:
        if value in choices:
            return str(value)
        raise unfit(option, f"one of {', '.join(map(repr, choices))}", value, f"write {choices[0]!r}")

    return check


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "scope": _scope,
    "name": _text,
    "namespace": _text,
    "header": _header,
    "methods": _methods,
    "paths": _paths,
    "exempt": _paths,
    "fingerprint": _comparison,
    "fingerprint_headers": _request_names,
    "on_conflict": _one_of("raise", "wait"),
    "remember": _remember,
    "settle_at": _one_of("response", "return"),
    "settle_timeout": parse_duration,
    "request_max_bytes": parse_size,
    "response_max_bytes": parse_size,
    "keep_headers": _names,
    "drop_headers": _names,
}
#: Those that are options of a `Policy` too, which checks them.
_POLICY = (
    "lease_ttl",
    "result_ttl",
    "failure_ttl",
    "max_crashes",
    "on_store_error",
    "on_conflict",
    "wait_timeout",
)
