"""System checks, for ``manage.py check``: the part of ``doctor`` that needs no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core import checks
from django.db import connections, router
from django.utils.module_loading import import_string

from ..celery import declarations
from ..celery.app import default_unique
from ..core.policy import Policy
from ..errors import ConfigurationError, StoreRefused
from ..stores import open_store
from .databases import celery_app, database_stores, named_stores

TAG = "idempotency"
MIDDLEWARE = "celery_idempotent.http.django.IdempotencyMiddleware"
#: What is to be outside of it, so that no replay reaches a caller who is locked out.
OUTSIDE = (
    "django.middleware.gzip.GZipMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.RemoteUserMiddleware",
    "django.contrib.auth.middleware.PersistentRemoteUserMiddleware",
)


def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """Find settings that are wrong, or that nothing reads."""
    app = celery_app()
    found = list(_unread(app))
    steps: list[Callable[[], object]] = [
        partial(declarations.check_settings, app),
        lambda: Policy.of(app.conf.get("idempotency")),
        partial(default_unique, app),
        *(partial(_open, store) for store in named_stores()),
    ]
    for step in steps:
        try:
            step()
        except ConfigurationError as error:
            found.append(_error(str(error), "", "E001"))
    return found


def _unread(app: Any) -> Iterator[checks.CheckMessage]:
    """Yield a warning for each setting that no Celery app reads."""
    for name in map(str.upper, declarations.SETTINGS):
        if getattr(settings, f"CELERY_{name}", None) is not None and app.conf.get(name.lower()) is None:
            yield _warning(
                f"CELERY_{name} is set, and the Celery app that Django has loaded does not read it.",
                "Import the app in the __init__.py beside settings.py, and have it read the settings: "
                'app.config_from_object("django.conf:settings", namespace="CELERY").',
                "W001",
            )
        elif hasattr(settings, name) and app.namespace:
            yield _warning(
                f"{name} is set, and nothing reads it.", f"Write {declarations.in_namespace(app, name)}.", "W002"
            )


def _open(store: object) -> None:
    if isinstance(store, str) and not _is_of_test_runner(store):
        open_store(store).close()  # nothing is connected


def _is_of_test_runner(store: str) -> bool:
    """Return whether a store is in the database in memory which Django's test runner makes in place of a file."""
    address = urlsplit(store.removeprefix("cached+"))
    alias = address.netloc or "default"
    if address.scheme != "django" or alias not in connections:
        return False
    return str(connections[alias].settings_dict["NAME"]).startswith(f"file:memorydb_{alias}")


def check_middleware(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """Find a middleware without options or outside of what it should be within, and options without a middleware."""
    from ..http.options import Options

    used = list(settings.MIDDLEWARE or ())
    given = getattr(settings, "IDEMPOTENCY_HTTP", None)
    if MIDDLEWARE not in used:
        return [] if given is None or any(map(_is_derived, used)) else [_without_middleware()]
    found: list[checks.CheckMessage] = []
    try:
        if isinstance(given, dict):
            Options.of(given)
        else:
            found.append(
                _error(
                    f"{MIDDLEWARE} is used, and the setting IDEMPOTENCY_HTTP is not a dict of its options.",
                    'IDEMPOTENCY_HTTP = {"store": "django://default", "scope": lambda request: request.user.pk}',
                    "E002",
                )
            )
    except ConfigurationError as error:
        found.append(_error(f"IDEMPOTENCY_HTTP: {error}", "", "E002"))
    late = [name for name in used[used.index(MIDDLEWARE) :] if name in OUTSIDE]
    if late:
        found.append(
            _warning(
                f"{MIDDLEWARE} stands before {', '.join(late)}: what they do to a request has not been done yet when "
                "it is answered with a replay.",
                f"Move it behind {late[-1]} in MIDDLEWARE.",
                "W003",
            )
        )
    return found


def _is_derived(name: str) -> bool:
    """Return whether a name in MIDDLEWARE may be that of a class of the project's own, which guards requests too."""
    from ..http.django import IdempotencyMiddleware

    try:
        found = import_string(name)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, IdempotencyMiddleware)


def _without_middleware() -> checks.CheckMessage:
    return _warning(
        "IDEMPOTENCY_HTTP is set, and no middleware reads it: a request that is repeated is carried out again.",
        f'Add "{MIDDLEWARE}" to MIDDLEWARE, behind those that authenticate.',
        "W006",
    )


def check_production(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """Find what protects nothing in production: ``check --deploy``."""
    if not any(str(store).lower().startswith("memory:") for store in named_stores()):
        return []
    return [
        _warning(
            "A store is the memory of one process: no other process sees it, and it ends with it.",
            'CELERY_IDEMPOTENCY_STORE = "django://default", or a Redis: "redis://host:6379/1".',
            "W004",
        )
    ]


def check_tables(app_configs: Any, databases: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """Find stores without tables, or with older ones: ``check --database default``, and the tests' databases."""
    if "".join(sys.argv[1:2]).startswith("migrate"):  # which checks a database before it makes the tables
        return []
    found: list[checks.CheckMessage] = []
    for store in database_stores():
        if store.alias not in (databases or ()):
            continue
        try:
            due = store.statements(connections[store.alias])
            if not due or store.vendor == "sqlite":  # where the store's first call makes them
                continue
            what = f"The store in the database {store.alias!r} has no tables of this version, and claims are refused."
        except StoreRefused as error:
            what = str(error)
        found.append(
            _warning(  # not an error, which would keep such commands of other packages from making them
                what,
                _how_to_make_tables(store.alias, store.url),
                "W005",
            )
        )
    return found


def _how_to_make_tables(alias: str, url: str) -> str:
    apply = "celery -A proj idempotency schema --apply"
    if celery_app().main in (None, "default"):  # of a project without Celery
        apply = "celery-idempotent --store URL schema --apply"
        if url.lower().startswith("django://"):  # in which there is no password
            apply = apply.replace("URL", f"'{url}'")
            apply = f"DJANGO_SETTINGS_MODULE={os.environ.get('DJANGO_SETTINGS_MODULE', 'proj.settings')} {apply}"
    if not router.allow_migrate(alias, "celery_idempotent", model_name="record"):
        return (
            f"A router in DATABASE_ROUTERS keeps celery_idempotent out of {alias!r}, where migrate makes nothing. Have "
            f"its allow_migrate return True for that, and run {apply}."
        )
    return (
        f"manage.py migrate celery_idempotent --database {alias}. Where that was done while the settings named another "
        f"store: {apply}."
    )


def _message(kind: Callable[..., checks.CheckMessage]) -> Callable[[str, str, str], checks.CheckMessage]:
    return lambda what, hint, code: kind(what, hint=hint or None, id=f"celery_idempotent.{code}")


_error, _warning = _message(checks.Error), _message(checks.Warning)
