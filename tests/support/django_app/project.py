"""A Django project in a process of its own: settings are a process's, once and for all."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest import mock

from psycopg.conninfo import conninfo_to_dict

T = TypeVar("T")
SETTINGS = "tests.support.django_app.shop.settings"
#: What the process of a project is forked with.
PRELOADED = ["celery_idempotent.celery", "celery_idempotent.stores.postgres", "celery_idempotent.stores.sqlite"]
PRELOADED += ["celery.app.amqp", "django.core.management", "django.db.models", "django.test"]


class Project:
    """The shop of `tests/support/django_app/shop`.

    Arguments:
        settings: What it has beside, or instead of, its own; plain data.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process = ProcessPoolExecutor(1, context, _set_up, (json.dumps(settings),))

    def run(self, function: Callable[..., T], *args: Any, **settings: Any) -> T:
        """Call a function of a module in the project's process, with these settings beside its own."""
        return self._process.submit(_call, function, args, settings).result(90)

    def manage(self, *arguments: str, **settings: Any) -> str:
        """Run a command of `manage.py`, and return what it prints."""
        return self.run(_manage, arguments, **settings)

    def environment(self) -> dict[str, str]:
        """Return the environment of another process of this project."""
        return {**os.environ, "SHOP": json.dumps(self.settings), "DJANGO_SETTINGS_MODULE": SETTINGS}

    def stop(self) -> None:
        """End the process."""
        self._process.shutdown()


def _set_up(settings: str) -> None:
    os.environ.update(SHOP=settings, DJANGO_SETTINGS_MODULE=SETTINGS)
    import django

    django.setup()


def _call(function: Callable[..., T], args: tuple[Any, ...], settings: dict[str, Any]) -> T:
    with configured(settings):
        return function(*args)


@contextmanager
def configured(settings: dict[str, Any]) -> Iterator[None]:
    """Have these settings, in Django and in a Celery app that reads them; NAMESPACE is the prefix that it knows."""
    if not settings:
        yield
        return
    from celery import Celery
    from django.test import override_settings

    with override_settings(**settings):
        app = Celery("shop", set_as_current=False)
        app.config_from_object("django.conf:settings", namespace=settings.get("NAMESPACE", "CELERY"))
        with mock.patch("celery_idempotent.django.databases.get_current_app", return_value=app):
            yield


def _manage(arguments: tuple[str, ...]) -> str:
    from django.core.management import call_command

    written = io.StringIO()
    call_command(*arguments, stdout=written, stderr=written)
    return written.getvalue()


def sqlite(path: object) -> dict[str, Any]:
    """Return the description of a database in a file."""
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}


def postgres(url: str) -> dict[str, Any]:
    """Return the description of the database at a URL, in whose schema all tables of Django are."""
    base, _, query = url.partition("?")
    schema = query.rpartition("schema=")[2]
    known = conninfo_to_dict(base)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": known.get("dbname", ""),
        "USER": known.get("user", ""),
        "PASSWORD": known.get("password", ""),
        "HOST": known.get("host", ""),
        "PORT": str(known.get("port", "")),
        "OPTIONS": {"options": f"-c search_path={schema}"},
    }
