"""A Redis server that answers questions about itself, or says that we may not ask."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from ..errors import StoreError
from ..stores.redis import RedisStore
from .finding import Unasked

__all__ = ["RedisServer", "servers_of"]


class RedisServer:
    """One server of a store.

    Arguments:
        store: The store.
        place: What sends commands to this server.
        name: What to call it among others; "" if it is the only one.
    """

    def __init__(self, store: RedisStore, place: Any, name: str = "") -> None:
        self.store, self.name = store, name
        self._execute = place.execute
        self._info: dict[str, dict[str, str]] = {}

    @property
    def wanted_replicas(self) -> int:
        """How many replicas must confirm a claim."""
        return self.store._replicas.wanted

    def ask(self, *command: str) -> Any:
        """Return the reply to a command.

        Raises:
            Unasked: the server does not let us ask, or does not know the command.
            StoreError: it does not answer.
        """
        try:
            return self.store._at(self._execute, *command)
        except StoreError as error:
            if not isinstance(error.__cause__, ResponseError):
                raise
            asked = " ".join(command[:2] if command[0] in ("CONFIG", "CLUSTER") else command[:1])
            raise Unasked(
                f"The server does not answer {asked}.",
                "Managed servers refuse it: read their console. Elsewhere: ACL SETUSER <user> "
                "+info +config|get +cluster|info",
            ) from error

    def info(self, section: str) -> dict[str, str]:
        """Return a section of INFO; raise as `ask`."""
        if section not in self._info:
            text = self.ask("INFO", section).decode(errors="replace")
            pairs = (line.strip().partition(":") for line in text.splitlines())
            self._info[section] = {name: value for name, mark, value in pairs if mark}
        return self._info[section]

    def number(self, section: str, name: str) -> int:
        """Return a number of INFO, 0 where the server does not know it; raise as `ask`."""
        value = self.info(section).get(name, "0")
        return int(value) if value.isdecimal() else 0

    def config(self, name: str) -> str:
        """Return a setting; raise as `ask`."""
        reply = self.ask("CONFIG", "GET", name)
        found = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else reply
        if name.encode() not in found:
            raise Unasked(f"The server does not tell its {name}.")
        return str(found[name.encode()].decode(errors="replace"))

    def time(self) -> float:
        """Return the server's clock, in seconds since 1970; raise as `ask`."""
        seconds, micros = self.ask("TIME")
        return int(seconds) + int(micros) / 1e6


def servers_of(store: RedisStore) -> list[RedisServer]:
    """Return the servers that have a store's records.

    Raises:
        StoreError: they cannot be told.
    """
    places = list(store._places())
    if len(places) == 1:
        return [RedisServer(store, places[0])]
    return [RedisServer(store, place, "{}:{}".format(*place.address)) for place in places]
