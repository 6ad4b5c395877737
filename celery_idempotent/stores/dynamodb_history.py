"""The history of a key in DynamoDB: an item beside its record, with a list that grows at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import RecordUnreadable
from ..notes import MOST, Note, Noted
from .dynamodb_client import Overtaken, Table
from .dynamodb_items import Item, number, text
from .noting import Line, expiry, grouped, lines, told
from .rules import SECOND

__all__ = ["Histories", "history_key"]

#: Lines beyond the newest that an item may have: to cut them off is a write of its own.
SLACK = 10


def history_key(key: str) -> str:
    """Return the key of the item; it is no record, and is passed by where records are listed."""
    return f"{key}:history"


class Histories:
    """The histories in one table.

    Arguments:
        table: The table, which has the records too.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def note(self, notes: Iterable[Note], now: int) -> None:
        """Add lines, at the server's time `now` in microseconds."""
        for key, mine in grouped(notes).items():
            new, expires = _listed(lines(mine, now)), number(-(-expiry(mine, now) // SECOND))
            try:
                self._add(key, new, expires, now)
            except Overtaken:  # there is none, or what is there has expired
                item = {"key": text(history_key(key)), "lines": new, "expires": expires}
                self._table.ask("put_item", Item=item)

    def _add(self, key: str, new: Item, expires: Item, now: int) -> None:
        reply = self._table.ask(
            "update_item",
            Key={"key": text(history_key(key))},
            UpdateExpression="SET #lines = list_append(#lines, :new), #expires = :expires",
            ConditionExpression="#expires > :now",
            ExpressionAttributeNames={"#lines": "lines", "#expires": "expires"},
            ExpressionAttributeValues={":new": new, ":expires": expires, ":now": number(now // SECOND)},
            ReturnValues="UPDATED_NEW",
        )
        size = len(reply["Attributes"]["lines"]["L"])
        if size > MOST + SLACK:
            self._cut(key, size)

    def _cut(self, key: str, size: int) -> None:
        oldest = ", ".join(f"#lines[{place}]" for place in range(size - MOST))
        try:
            self._table.ask(
                "update_item",
                Key={"key": text(history_key(key))},
                UpdateExpression=f"REMOVE {oldest}",
                ConditionExpression="size(#lines) = :size",
                ExpressionAttributeNames={"#lines": "lines"},
                ExpressionAttributeValues={":size": number(size)},
            )
        except Overtaken:
            pass  # somebody else has added lines since, and will cut

    def tell(self, key: str, now: int) -> list[Noted]:
        """Return what was noted of a key.

        Raises:
            RecordUnreadable: what is there is none of ours.
        """
        item = self._table.read(history_key(key))
        try:
            if item is None or int(item["expires"]["N"]) * SECOND <= now:
                return []
            return told([_line(line["L"]) for line in item["lines"]["L"]], now)
        except (KeyError, ValueError) as error:
            raise RecordUnreadable(
                f"The item {history_key(key)!r} is not the history of {key!r} ({error}). Delete it if it is garbage."
            ) from error

    def forget(self, key: str) -> None:
        """Delete the history of a key."""
        self._table.ask("delete_item", Key={"key": text(history_key(key))})


def _listed(found: Sequence[Line]) -> Item:
    return {"L": [{"L": [number(at), text(line)]} for at, line in found]}


def _line(pair: Sequence[Item]) -> Line:
    return int(pair[0]["N"]), str(pair[1]["S"])
