"""The pages: what the commands print, as HTML."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...errors import ConfigurationError
from ...stores.history import facts_of
from ...stores.maintenance import is_held
from ...stores.records import State
from ...units import clean, format_duration
from .. import tables
from ..common import Json, Stores
from ..explain import advice, describe_event, describe_record, describe_standing
from ..forget import forget_record, question_of_held
from ..release import holder_facts, question_of, release_for_holder, why_not_held
from ..search import Filter, duration
from ..show import describe_unknown, facts_of_record, in_words
from ..stats import details, summary
from ..tables import Cell, Table
from .readings import MOST, Count, PageStores, Readings, Search
from .server import Access, Handler, Refused, Request, Response, redirect

if TYPE_CHECKING:
    from ...stores.maintenance import NamedStore
    from ...stores.records import PastEvent, Record

#: Records on a page.
PAGE = 50
#: Seconds that a first request waits for the stores, and one that goes on with what another began.
WAIT, LONGER = 1.0, 4.0
#: Seconds after which a page that is not complete is loaded again.
SOON = 1
#: Seconds after which a page that is to be kept fresh is loaded again.
REFRESH = 5
#: The fields of a search.
FIELDS = ("text", "task", "state", "older", "younger", "unique")
#: What was done, by the word that stands for it in a URL.
DONE = {"released": "{} is released", "forgotten": "{} is forgotten"}


@dataclass(frozen=True)
class Line:
    """One event in the history of a key."""

    at: datetime
    ago: str
    text: str


@dataclass(frozen=True)
class Explanation:
    """What one store knows of a key."""

    store: str
    now: str
    means: str
    lines: Sequence[Line]
    facts: Mapping[str, str]
    #: Why there is no lease to release, or "".
    not_held: str
    known: bool


class Site:
    """The pages over some stores.

    Arguments:
        stores: The stores.
        tasks: The keys of the app's tasks (default: no app).
        access: Whose token the forms carry (default: the pages change nothing).
        command: The command that serves the pages, for the history of what they change.
    """

    def __init__(self, stores: Stores, tasks: Any = None, access: Access | None = None, command: str = "") -> None:
        self._used, self._guesses = stores.used, stores.guesses
        self._tasks, self._access, self._command = tasks, access, command
        self._names = sorted({name for used in self._used for name in used.lease_ttls})
        self._readings = Readings()
        #: What any template may show.
        self._shared = {
            "changes": access is not None,
            "host": socket.gethostname(),
            "stores": [each.name for each in self._used],
            "tasks": self._names,
        }
        #: By path and method.
        self.routes: Mapping[str, Mapping[str, Handler]] = {
            "/": {"GET": partial(self._records, in_progress=True)},
            "/records": {"GET": self._records},
            "/find": {"GET": self._find},
            "/call": {"GET": self._call},
            "/key": {"GET": self._key},
            "/stats": {"GET": self._stats},
            "/release": {"GET": self._confirm_release, "POST": self._release},
            "/forget": {"GET": self._confirm_forget, "POST": self._forget},
        }

    def refusal(self, refused: Refused) -> Response:
        """Return the page of a request that was refused."""
        facts = {"title": refused.title, "text": str(refused), "outside": refused.outside}
        return self._page("message.html", refused.status, **facts)

    def _page(self, template: str, status: int = HTTPStatus.OK, **facts: Any) -> Response:
        return Response(status, _templates().get_template(template).render(self._shared, **facts).encode())

    def _stores(self) -> PageStores:
        return PageStores(self._used, self._guesses)

    def _records(self, request: Request, *, in_progress: bool = False) -> Response:
        fields = {name: request.query.get(name, "").strip() for name in FIELDS}
        if in_progress:
            fields = dict.fromkeys(FIELDS, "") | {"state": State.IN_PROGRESS.value}
        shown = {"in_progress": in_progress, "fields": fields, "states": list(State), "search": None, "problem": ""}
        try:
            wish = _filter(fields)
        except click.UsageError as error:
            return self._page("records.html", HTTPStatus.BAD_REQUEST, **shown | {"problem": error.format_message()})
        status, found = self._found(request, wish, fields["text"])
        return self._page("records.html", status, **shown | found)

    def _found(self, request: Request, wish: Filter, text: str) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status of a page of records, and what is on it."""
        name, search = self._readings.get(
            request.query.get("reading", ""),
            Search,
            lambda known: (known.wish, known.text) == (wish, text),
            lambda: Search(self._used, wish, text),
        )
        # What is in progress is little, and sorted as a whole; of all else, a page is read when it is wanted.
        whole = wish.wanted == {State.IN_PROGRESS}
        page = max(1, _number(request.query.get("page", "")))
        most = MOST if whole else page * PAGE
        search.advance(_patience(request), lambda: len(search.records) > most)
        records = list(search.records.items())
        found, stopped = len(records), not search.over and len(records) <= most
        page = min(page, max(1, -(-found // PAGE)))
        return _status(search.stores), {
            "search": search,
            "lists": _lists(records, page, whole=whole),
            "found": found,
            "page": page,
            "more": found > page * PAGE,
            "reading": name,
            "pending": stopped and not _stopped(request),
            "stopped": stopped,
            "every": REFRESH if request.query.get("every") else 0,
            "ran_out": sum(not record.remaining for _, record in records),
        }

    def _find(self, request: Request) -> Response:
        """Send the browser to the key that a text stands for, to those that it may, or to those that contain it."""
        text, stores = request.query.get("q", "").strip(), self._stores()
        if not text:
            return redirect("/records")
        meant = [key for _, key in stores.each(lambda used: used.meant_key(text)) if key]
        keys = [key for key in dict.fromkeys([text, *meant, *stores.guesses(text)]) if stores.knows(key)]
        if len(keys) == 1:
            return redirect("/key", key=keys[0])
        if keys:
            return self._page("keys.html", text=text, keys=keys)
        if text in self._names:
            return redirect("/records", task=text)
        return redirect("/records", text=text)

    def _call(self, request: Request) -> Response:
        """Send the browser to the key of a call of one of the app's tasks."""
        if self._tasks is None:
            raise Refused(
                HTTPStatus.NOT_FOUND, "No app", "Expected an app, which knows its tasks: celery -A proj idempotency web"
            )
        fields = {name: request.query.get(name, "").strip() for name in ("task", "args", "kwargs", "header")}
        header, _, value = fields["header"].partition("=")
        if not fields["task"]:
            return self._page("call.html", fields=fields, problem="")
        try:
            args = Json(list).convert(fields["args"] or "[]", None, None)
            kwargs = Json(dict).convert(fields["kwargs"] or "{}", None, None)
            key = self._tasks.of_call(fields["task"], args, kwargs, {header: value} if header else {})
        except (click.UsageError, ConfigurationError) as error:
            problem = error.format_message() if isinstance(error, click.UsageError) else str(error)
            return self._page("call.html", HTTPStatus.BAD_REQUEST, fields=fields, problem=problem)
        return redirect("/key", key=key)

    def _key(self, request: Request) -> Response:
        key, stores = request.query.get("key", ""), self._stores()
        explanations = [
            _explanation(used, record, history)
            for used, (record, history) in stores.each(lambda used: (used.store.get(key), used.store.history(key)))
            if record is not None or history
        ]
        done = DONE.get(request.query.get("done", ""), "").format(key)
        unknown = "" if explanations or stores.errors else describe_unknown(stores, key)
        status = HTTPStatus.NOT_FOUND if unknown and not done else _status(stores)
        return self._page(
            "key.html",
            status,
            key=key,
            explanations=explanations,
            done=done,
            unknown=unknown,
            errors=stores.errors,
            every=REFRESH if request.query.get("every") else 0,
        )

    def _stats(self, request: Request) -> Response:
        name, count = self._readings.get(
            request.query.get("reading", ""), Count, lambda known: True, lambda: Count(self._used)
        )
        count.advance(_patience(request))
        with count.changing:
            found = {
                store: (_cells(summary(store, stats.facts(), stats)), details(stats))
                for store, stats in count.stats.items()
            }
        pending = not count.over and not _stopped(request)
        return self._page("stats.html", _status(count.stores), count=count, found=found, reading=name, pending=pending)

    def _target(self, fields: Mapping[str, str]) -> tuple[NamedStore, Record]:
        """Return the store and the record that a form is about.

        Raises:
            Refused: the pages change nothing, or there is no such record.
            StoreError: the store cannot serve.
        """
        if self._access is None:
            raise Refused(
                HTTPStatus.FORBIDDEN,
                "These pages change nothing",
                "Expected --allow-changes for this, and the command was started without it.",
            )
        key = fields.get("key", "")
        for used in self._used:
            if used.name == fields.get("store") and (record := used.store.get(key)) is not None:
                return used, record
        raise Refused(HTTPStatus.NOT_FOUND, "Nothing is remembered", describe_unknown(self._stores(), key))

    def _confirm_release(self, request: Request) -> Response:
        used, record = self._target(request.query)
        if why := why_not_held(record):
            raise Refused(HTTPStatus.CONFLICT, "There is nothing to release", clean(why))
        facts = _cells(holder_facts(used, record))
        return self._confirm("Release", used, record, question_of(record), facts)

    def _confirm_forget(self, request: Request) -> Response:
        used, record = self._target(request.query)
        question = "Its operation may run again, since no record is left that it was done. Forget it?"
        if is_held(record):
            question = question_of_held(record)
        facts = {"key": record.key, "now": describe_record(record)}
        return self._confirm("Forget", used, record, question, _cells(facts))

    def _confirm(self, verb: str, used: NamedStore, record: Record, question: str, facts: Any) -> Response:
        assert self._access is not None
        return self._page(
            "confirm.html",
            verb=verb,
            store=used.name,
            record=record,
            question=question,
            facts=facts,
            token=self._access.token,
        )

    def _release(self, request: Request) -> Response:
        used, record = self._unchanged(request)
        if why := release_for_holder(used, record, self._command):
            raise Refused(HTTPStatus.CONFLICT, "It was not released", clean(why))
        return _done(record.key, "released")

    def _forget(self, request: Request) -> Response:
        used, record = self._unchanged(request)
        forget_record(used, record, self._command)
        return _done(record.key, "forgotten")

    def _unchanged(self, request: Request) -> tuple[NamedStore, Record]:
        """Return the store and the record that a person has confirmed to change.

        Raises:
            Refused: the record is not any more what that person saw.
        """
        used, record = self._target(request.query)  # a form field would change the ends of a key's lines
        if (str(record.fence), str(record.state)) != (request.form.get("fence"), request.form.get("state")):
            raise Refused(
                HTTPStatus.CONFLICT,
                "It has changed meanwhile",
                f"{record.key} was left alone. Now: {describe_record(record)}. Look at it again, and confirm that.",
            )
        return used, record


def _done(key: str, word: str) -> Response:
    click.echo(clean(DONE[word].format(key)), err=True)
    return redirect("/key", key=key, done=word)


@cache
def _templates() -> Environment:
    here = Path(__file__).parent / "templates"
    made = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters.update(clean=clean, duration=format_duration)
    made.globals.update(most=MOST, refresh=REFRESH, soon=SOON, url=_url)
    return made


def _url(path: str, **query: object) -> str:
    """Return a URL with those parameters that are not empty."""
    return f"{path}?{urlencode({name: value for name, value in query.items() if value})}".rstrip("?")


def _filter(fields: Mapping[str, str]) -> Filter:
    """Return the filter of a search's fields.

    Raises:
        UsageError: one of them is wrong.
    """
    known, state = {state.value: state for state in State}, fields["state"]
    if state and state not in known:  # of a URL that was typed: all would be shown as what was asked for
        raise click.UsageError(f"Expected the state to be one of {', '.join(known)}, got {state!r}.")
    return Filter(
        states=(known[state],) if state else (),
        task=fields["task"] or None,
        prefix="",
        older=duration(None, None, fields["older"] or None),
        younger=duration(None, None, fields["younger"] or None),
        held=False,
        limit=MOST,
        unique=bool(fields["unique"]),
    )


def _stopped(request: Request) -> bool:
    return request.query.get("wait") == "no"


def _patience(request: Request) -> float:
    """Return the seconds that a request waits for the stores."""
    return 0.0 if _stopped(request) else LONGER if "reading" in request.query else WAIT


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 1


def _status(stores: PageStores) -> HTTPStatus:
    return HTTPStatus.SERVICE_UNAVAILABLE if stores.errors else HTTPStatus.OK


def _lists(found: list[tuple[tuple[str, str], Record]], page: int, *, whole: bool) -> list[tuple[str, Table]]:
    """Return the table of each store that has records on a page.

    Arguments:
        found: By the name of the store and the key, what was found.
        page: The page.
        whole: Whether all that was found is put in order, as one state is, and not the page alone.
    """
    if whole:
        places = {id(record): place for place, record in enumerate(tables.in_order(r for _, r in found))}
        found.sort(key=lambda each: places[id(each[1])])
    chosen = found[(page - 1) * PAGE : page * PAGE]
    left_out = {"TASK ID", "FENCE", *(["STATE"] if whole else [])}  # the page of each key has them
    names = dict.fromkeys(store for (store, _), _ in chosen)
    lists = []
    for name in names:
        table = tables.table(tables.in_order(record for (store, _), record in chosen if store == name))
        for place in reversed(range(len(table.columns))):
            if table.columns[place].title in left_out:
                table = table.without(place)
        lists.append((name, table.without_empty()))
    return lists


def _cells(facts: Mapping[str, object]) -> dict[str, Cell]:
    return {name: tables.cell_of(value) for name, value in facts.items()}


def _explanation(used: NamedStore, record: Record | None, history: Sequence[PastEvent]) -> Explanation:
    now = datetime.now().astimezone()
    lines = [
        Line(now - timedelta(seconds=event.age), format_duration(event.age), describe_event(facts_of(event.text)))
        for event in history
    ]
    facts = {} if record is None else {name: in_words(value) for name, value in facts_of_record(record).items()}
    return Explanation(
        store=used.name,
        now=describe_standing(record, history),
        means=advice(record),
        lines=lines,
        facts={name: value for name, value in facts.items() if name != "key"},
        not_held="" if record is None else why_not_held(record),
        known=record is not None,
    )
