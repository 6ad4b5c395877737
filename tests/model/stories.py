"""What a path through the model says, and a path from what was said."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from .programs import real_code
from .protocol import Configuration, Core, Event, Message, Protocol, Row, Tally
from .search import Search

SEPARATOR = " | "


class Broken(AssertionError):
    """Something does not hold on a path."""


def written(configuration: Configuration, path: Sequence[str]) -> str:
    """Return the argument of `replay` for a path."""
    plain = Configuration()
    given = {name: value for name, value in vars(configuration).items() if value != getattr(plain, name)}
    for name in ("depth", "states"):
        given.pop(name, None)
    return SEPARATOR.join([repr(given), *path])


def replay(text: str, beyond: int = 20_000) -> tuple[Core, Tally]:
    """Go along a path, as `python -m tests.model` prints one, and return where it leads.

    Arguments:
        text: What was printed.
        beyond: How many states to look at from there on.

    Raises:
        Broken: something does not hold on the way, or in what can follow.
        LookupError: the path does not exist.
    """
    options, *path = text.split(SEPARATOR)
    configuration = Configuration(**ast.literal_eval(options))
    with real_code():
        protocol = Protocol(configuration)
        core, tally = protocol.start()
        for number, label in enumerate(path, 1):
            event, after = _follow(protocol, core, tally, label)
            if isinstance(after, str):
                raise Broken("\n".join([*story(configuration, path[:number]), after]))
            assert event.core is not None
            core, tally = event.core, after
        found = Search(replace(configuration, states=beyond), start=(protocol, core, tally)).run()
        if found.broken:
            raise Broken("\n".join([*story(configuration, path), found.broken]))
    return core, tally


def _follow(protocol: Protocol, core: Core, tally: Tally, label: str) -> tuple[Event, Tally | str]:
    events = {event.label: event for faults in (False, True) for event in protocol.events(core, faults=faults)}
    event = events.get(label)
    after = event and tally.after(event.change)
    if event is None or after is None:
        raise LookupError(f"{label!r} cannot happen here, but {sorted(events)}")
    if isinstance(after, Tally) and event.broken and not (event.excused and after.meddled):
        return event, event.broken
    return event, after


def story(configuration: Configuration, path: Sequence[str]) -> list[str]:
    """Return a path as lines that can be read: each event, and what becomes of the record."""
    lines = []
    with real_code():
        protocol = Protocol(configuration)
        core, tally = protocol.start()
        for number, label in enumerate(path, 1):
            event, after = _follow(protocol, core, tally, label)
            text = re.sub(r"^(worker|entry|ghost) (\d)", partial(_named, core), label)
            lines.append(f"{number:3}  {text}")
            if event.core is None or isinstance(after, str):
                break
            if event.core.row != core.row:
                lines.append(f"     record: {_record(event.core.row)}")
            core, tally = event.core, after
    return lines


def _named(core: Core, found: re.Match[str]) -> str:
    at = int(found[2])
    items = {"worker": core.workers, "entry": core.entries, "ghost": core.ghosts}[found[1]]
    main = ", the main process" if found[1] == "worker" and core.workers[at].reaper else ""
    return f"{found[0]} ({_message(items[at].message)}{main})"


def _message(message: Message) -> str:
    parts = [f"{message.task} of publish {message.published}"]
    parts += [f"retry {message.retries}"] if message.retries else []
    parts += [f"copy {message.copy}{chr(97 + min(message.token, 25))}"] if message.copy else []
    parts += ["redelivered"] if message.redelivered else []
    return ", ".join(parts)


def _record(row: Row | None) -> str:
    if row is None:
        return "none"
    words = [row.state, f"of {row.task}", f"fence {row.fence}"]
    words += [f"held by {row.owner}, {row.lease} ticks left"] if row.state == "in_progress" else []
    words += [f"by reason of {row.reason}"] if row.reason else []
    words += [f"retry due in {row.not_before}"] if row.not_before else []
    words += [f"{row.crashes} crashes"] if row.crashes else []
    words += [f"value {row.payload}"] if row.state == "completed" else []
    words += [f"waiting {row.waiting}"] if row.waiting else []
    return ", ".join(words)
