"""Redis with sentinels, which name the primary and promote a replica when it dies."""

from __future__ import annotations

from time import monotonic
from typing import Any

import redis
from redis.exceptions import RedisError
from redis.sentinel import MasterNotFoundError, Sentinel

from .. import hide_password
from .connections import OPTION, REFUSALS, Addresses, as_redis
from .store import RedisStore, Replicas, made_for_a_store

EXAMPLE = "redis+sentinel://:password@host1:26379,host2:26379/service/0"
#: Parameters with the credentials of the sentinels.
THEIRS = ("sentinel_username", "sentinel_password")
#: Seconds that one sentinel may take to answer, and after which no other one is tried.
ANSWER, PATIENCE = 1.0, 2.0


class Sentinels(Sentinel):
    """The sentinels of a service, queried in turn until one knows the primary, but not for long."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the primary.

        Raises:
            MasterNotFoundError: none of those that answer knows one, or none answers.
            AuthenticationError: none knows one, and one refused the credentials.
        """
        end = monotonic() + PATIENCE
        answers: list[str] = []
        refusal: Exception | None = None
        for sentinel in list(self.sentinels):
            try:
                services: Any = sentinel.sentinel_masters()
            except (RedisError, OSError) as error:
                refusal = error if isinstance(error, REFUSALS) else refusal
                answers.append(f"{type(error).__name__}: {error}")
            else:
                state = services.get(service_name)
                check: Any = self.check_master_state
                if state and check(state, service_name):
                    others = [other for other in self.sentinels if other is not sentinel]
                    self.sentinels = [sentinel, *others]  # the one that knew it is the first the next time
                    return state["ip"], state["port"]
                known = ", ".join(sorted(services)) or "nothing"
                answers.append("it is down" if state else f"a sentinel watches {known}")
            if monotonic() > end:
                break
        raise refusal or MasterNotFoundError(f"no sentinel names a primary of {service_name!r} ({'; '.join(answers)})")


class SentinelStore(RedisStore):
    """Keep the records in the Redis server that sentinels name, whichever that is at the moment.

    Weaker than the contract as one Redis is: a failover loses what the promoted replica had not got.
    """

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SentinelStore:
        """Return a store on the server that sentinels name (``redis+sentinel://`` or ``rediss+sentinel://``).

        Arguments:
            url: Sentinels with commas between them, a slash, the service, and if it is not 0 a slash and the database.
                User and password are the server's. Its query may carry any connection option, ``wait_replicas``, and
                ``sentinel_username`` and ``sentinel_password`` for the sentinels.
            options: Connection options of the server that the URL does not give, and ``wait_replicas``.

        Raises:
            ConfigurationError: the URL cannot be parsed.
        """
        plain, in_url = Replicas.in_url(as_redis(url))
        wanted = options.pop(OPTION, 0)
        places = Addresses.of(plain, port=26379, example=EXAMPLE, own=THEIRS)
        service, db = _service(places)
        theirs = {name: places.options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        server = places.connection({**cls.connection_options(), **options}, db=db)
        sentinel = places.connection(cls.connection_options(), db=0, protocol=None, **theirs)
        for name in ("socket_timeout", "socket_connect_timeout"):
            sentinel[name] = min(sentinel.get(name) or ANSWER, ANSWER)
        for each in (server, sentinel):
            if each.pop("connection_class") is redis.SSLConnection:
                each["ssl"] = True
        make: Any = Sentinels  # whose constructor has no types
        client = make(places.hosts, sentinel_kwargs=sentinel, **server).master_for(service)
        return cls(made_for_a_store(client), url=hide_password(url), wait_replicas=wanted if in_url is None else in_url)


def _service(places: Addresses) -> tuple[str, int]:
    """Return the service and the database that a URL names."""
    service, *rest = places.path or ("",)
    if not service or service.isdecimal():
        raise places.error("The name of the service is missing behind the first slash, as in /orders/0")
    if len(rest) > 1 or not all(part.isdecimal() for part in rest):
        raise places.error("The database is a number, behind the service and a slash, as in /orders/0")
    return service, int(rest[0]) if rest else 0
