"""Records in Django's admin: searched by key and by task, read, and never changed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.template.defaultfilters import linebreaksbr

from ..celery.app import TaskKeys, default_namespace, store_of
from ..cli.explain import advice, describe_event, describe_record
from ..cli.tables import task_of
from ..core import keys
from ..errors import StoreError
from ..stores.history import facts_of
from ..stores.records import State
from ..stores.rules import SECOND
from ..units import clean, format_duration
from .databases import celery_app, database_stores
from .models import Record

#: Records that are counted and listed at most: to count millions takes as long as to read them.
MOST = 1000
#: The last character of Unicode, above all that follows a prefix.
LAST = chr(0x10FFFF)


class BoundedPaginator(Paginator):
    """Count no further than `MOST`."""

    @cached_property
    def count(self) -> int:
        """Records, `MOST` at most."""
        return int(self.object_list[:MOST].count())


class LiveFilter(admin.SimpleListFilter):
    """Show what is in progress, which has an index of its own."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        """Return the choices."""
        return [(State.IN_PROGRESS.value, "in progress")]

    def queryset(self, request: Any, queryset: Any) -> Any:
        """Return what the choice leaves."""
        return queryset.filter(state=self.value()) if self.value() else queryset


@admin.register(Record)
class RecordAdmin(admin.ModelAdmin):
    """List records, and explain each; hidden where no store is in a database of Django."""

    list_display = ("key", "task", "state", "reason", "holder", "crashes", "until")
    list_filter = (LiveFilter,)
    list_per_page = 50
    list_max_show_all = MOST // 2  # of more, it is not known how many there are
    show_full_result_count = False
    sortable_by = ()
    search_fields = ("key",)
    search_help_text = (
        "A key, its beginning, the name of a task, or what its calls name as key, such as an order's number. "
        f"The first {MOST} are listed."
    )
    paginator = BoundedPaginator
    actions = None
    fields = ("key", "task", "now", "meaning", "story", "holder", "fence", "crashes", "until")
    readonly_fields = fields

    def has_add_permission(self, request: Any) -> bool:
        """Return False: a record is what a worker wrote."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False: the commands release and forget, and write down who did so."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False, as `has_change_permission` does."""
        return False

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the user may view records, and there are any to be read here."""
        return bool(super().has_view_permission(request, obj)) and next(database_stores(), None) is not None

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Return what has one of the keys that a text may stand for, or whose key begins with it."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if exact := set(queryset.filter(key__in=[term, *_keys_of(term)]).values_list("key", flat=True)):
            return queryset.filter(key__in=exact), False
        beginning = _beginning_of(term)
        return queryset.filter(key__gte=beginning, key__lt=beginning + LAST), False

    @admin.display(description="task")
    def task(self, record: Record) -> str:
        """Return the name of its task."""
        return clean(task_of(record.key))

    @admin.display(description="until")
    def until(self, record: Record) -> str:
        """Return when its lease runs out, its retry is due, or it is forgotten."""
        if record.state == State.IN_PROGRESS:
            return f"lease until {_time(record.lease_end)}"
        return f"retry at {_time(record.not_before)}" if record.not_before else f"kept until {_time(record.expires)}"

    @admin.display(description="now")
    def now(self, record: Record) -> str:
        """Return how things stand with it."""
        return clean(describe_record(_found(record)))

    @admin.display(description="what this means")
    def meaning(self, record: Record) -> str:
        """Return what that means for the next delivery."""
        return advice(_found(record))

    @admin.display(description="what happened")
    def story(self, record: Record) -> str:
        """Return its history, a line each; a first run that simply completed has none."""
        return str(linebreaksbr("\n".join(_lines(record)) or "-"))


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / SECOND, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _app() -> Any:
    """Return the Celery app with its tasks, whose modules a process that serves the web may not have imported."""
    app = celery_app()
    app.loader.import_default_modules()
    return app


def _keys_of(term: str) -> Iterable[str]:
    return TaskKeys(_app()).of_text(term, {})


def _beginning_of(term: str) -> str:
    """Return how keys begin that a text stands for: those of a task, or all that begin as it does."""
    app = _app()
    return keys.compose_default(default_namespace(app, None), term, "-")[:-1] if term in app.tasks else term


def _store() -> Any:
    return store_of(celery_app(), next(database_stores()).url)


def _found(record: Record) -> Any:
    try:
        return _store().get(_key_of(record))
    except StoreError:
        return None


def _lines(record: Record) -> list[str]:
    try:
        history = _store().history(_key_of(record))
    except StoreError as error:
        return [str(error)]
    return [f"{format_duration(event.age)} ago: {clean(describe_event(facts_of(event.text)))}" for event in history]


def _key_of(record: Record) -> str:
    """Return a key as it was before PostgreSQL kept it, which has no NUL."""
    if next(database_stores()).vendor != "postgresql":
        return str(record.key)
    from ..stores.postgres.records import unstored

    return unstored(record.key)
