"""The options of the middlewares, checked when an application is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ..core.policy import Policy
from ..stores.base import Store
from ..stores.maintenance import NAMESPACE
from ..units import parse_duration, parse_size, unfit
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

Remember = Callable[[Response], object]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the options of a middleware.

    Durations and sizes are written as in `Policy`. Raises ConfigurationError for an unfit value.
    """

    scope: Any = _REQUIRED  #: who calls, verified: a callable over the request, a header's name, None or INSIDE
    store: Store | str | None = None  #: a store or its URL; None: that of ``celery_app``
    celery_app: Any = None  #: a Celery app, whose store and namespace are used
    name: str = "http"  #: of the service, in keys: services that share a store have different ones
    namespace: str = NAMESPACE  #: how the keys begin
    header: str | Callable[[Any], str | None] = "Idempotency-Key"  #: of the key; or a callable over the request
    methods: Collection[str] = ("POST", "PATCH")  #: of the requests that are guarded
    paths: Any = None  #: prefixes of the paths that are guarded, or a callable; None: all
    exempt: Any = ()  #: prefixes of paths that are not, or a callable
    required: bool = False  #: answer 400 to a request without a key
    fingerprint: Comparison = "bytes"  #: how bodies are compared: "bytes", "json", "headers", or a callable
    fingerprint_headers: Sequence[str] = ()  #: headers that are compared too
    lease_ttl: float = 30.0  #: as in `Policy`
    result_ttl: float = 86400.0  #: how long a response is replayed
    failure_ttl: float = 86400.0  #: as in `Policy`
    max_crashes: int = 5  #: as in `Policy`
    on_store_error: str = "raise"  #: "raise": 503; "wait" up to ``wait_timeout``; "run" without a guard
    on_conflict: str = "raise"  #: "raise": 409; "wait" up to ``wait_timeout``
    wait_timeout: float = 10.0  #: how long a request waits
    remember: Remember | None = None  #: a callable over a `Response`: True, False, "fact"; None: by its status
    settle_at: str = "response"  #: record a response when it is complete; "return": when the application has returned
    settle_timeout: float = 5.0  #: how long a response waits for the store
    request_max_bytes: int = 1048576  #: of a body with a key
    response_max_bytes: int = 262144  #: of a body that is kept
    keep_headers: Sequence[str] = ()  #: headers to keep that are not kept otherwise, as Set-Cookie
    drop_headers: Sequence[str] = ()  #: more headers that are not kept
    docs_url: str | None = None  #: of a page for clients, with a section for each type of problem
    propagate: bool = True  #: whether the tasks that a request publishes get ids that follow from its key
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
    def of(cls, options: dict[str, Any]) -> Options:
        """Return options as they were written; raise ConfigurationError for one that is unknown."""
        known = [each.name for each in fields(cls) if each.init]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(known)}"
                raise unfit("idempotency", "options of the middleware", name, hint)
        return cls(**options)

    def guards(self, method: str, path: str) -> bool:
        """Return whether a request of this method to this path, unescaped, is guarded."""
        if method not in self.methods:
            return False
        return (self.paths is None or _matches(self.paths, path)) and not _matches(self.exempt, path)


def _matches(paths: Any, path: str) -> bool:
    """Return whether a path begins with one of these, by whole segments."""
    if callable(paths):
        return bool(paths(path))
    return any(path == each or path.startswith(each if each.endswith("/") else f"{each}/") for each in paths)


def _paths(value: Any, option: str) -> Any:
    if value is None or callable(value):
        return value
    if not isinstance(value, str) and all(isinstance(each, str) and each.startswith("/") for each in value):
        return tuple(value)
    raise unfit(option, "paths that begin with a slash, or a callable", value, 'write ["/orders"]')


def _names(value: Any, option: str) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(each, str) and each for each in value):
        raise unfit(option, "names of headers", value, 'write ["Accept"]')
    return tuple(value)


def _methods(value: Any, option: str) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(each, str) and each.isupper() for each in value):
        raise unfit(option, "methods in upper case", value, 'write ["POST", "PATCH"]')
    if unsafe := {"GET", "HEAD", "OPTIONS", "TRACE"} & set(value):
        raise unfit(option, "methods that change something", sorted(unsafe), "leave them out: repeat them as you like")
    return tuple(value)


def _text(value: Any, option: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise unfit(option, "a text", value, "write one")


def _header(value: Any, option: str) -> Any:
    return value if callable(value) else _text(value, option)


def _scope(value: Any, option: str) -> Any:
    if value in (None, INSIDE) or value is _REQUIRED or callable(value) or (isinstance(value, str) and value):
        return value
    hint = "write lambda request: request.user.id"
    raise unfit(option, "a callable over the request, the name of a header, None or INSIDE", value, hint)


def _comparison(value: Any, option: str) -> Any:
    if callable(value) or value in COMPARISONS:
        return value
    raise unfit(option, "one of 'bytes', 'json', 'headers', or a callable", value, "write 'bytes'")


def _remember(value: Any, option: str) -> Any:
    if value is None or callable(value):
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
    "fingerprint_headers": _names,
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
