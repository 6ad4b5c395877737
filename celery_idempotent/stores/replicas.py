"""How many replicas must have a claim before it counts: Redis's WAIT, sent along with the script.

Redis replicates after it has replied. A server that is cut off from its replicas goes on granting leases which the
replica that is promoted in its place has never heard of. WAIT (redis.io/commands/wait) tells how many replicas have
what this connection wrote; a claim that too few have is refused. That narrows the window of a failover and does not
close it: the replica that is promoted need not be one of those that answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError

__all__ = ["OPTION", "Replicas"]

#: What the option is called, in a store's URL too.
OPTION = "wait_replicas"
#: Seconds that replicas have to confirm; well within the time a lease call may take.
PATIENCE = 0.5


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that must confirm a claim.

    Arguments:
        wanted: How many; 0 asks none.

    Raises:
        ConfigurationError: that is no number of replicas.
    """

    wanted: int = 0

    def __post_init__(self) -> None:
        if type(self.wanted) is not int or self.wanted < 0:  # True is an int too
            raise ConfigurationError(f"Expected {OPTION} to be a number of replicas (0 or more), got {self.wanted!r}.")

    @classmethod
    def in_url(cls, url: str) -> tuple[str, int | None]:
        """Return a URL without the option, and what the option says there, or None."""
        base, mark, query = url.partition("?")
        parts = query.split("&")
        said = [part.partition("=")[2] for part in parts if part.partition("=")[0] == OPTION]
        if not said:
            return url, None
        if not said[-1].isdecimal():
            raise ConfigurationError(f"Expected {OPTION} to be a number of replicas (0 or more), got {said[-1]!r}.")
        rest = "&".join(part for part in parts if part.partition("=")[0] != OPTION)
        return f"{base}{mark if rest else ''}{rest}", int(said[-1])

    @property
    def command(self) -> tuple[Any, ...] | None:
        """What to send along with a claim, or None."""
        return ("WAIT", self.wanted, int(PATIENCE * 1000)) if self.wanted else None

    def missing(self, reply: Any) -> str:
        """Return what is missing by the reply to the command, in words; "" if enough replicas have the claim."""
        if isinstance(reply, int) and reply >= self.wanted:
            return ""
        got = f"{reply} confirmed" if isinstance(reply, int) else f"the server said: {reply}"
        return (
            f"{OPTION}={self.wanted} asks for {self.wanted}, and {got} within {PATIENCE:g} s. "
            f"Are the replicas connected? INFO replication tells"
        )
