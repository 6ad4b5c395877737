"""The connection to one table: a client of boto3 per process, the URL of a store, and what boto3's errors mean."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)

from ...errors import ConfigurationError, StoreError, StoreRefused, StoreUnreachable
from .. import hide_password, unknown_parameter
from .records import Clock, Condition, Item, Update, text

#: Connections that are kept open. More threads than that open and close one each.
MOST_CONNECTIONS = 50


@cache
def _models() -> Any:
    """Return what has read the description of the service, which takes longer than all else, and need be done once."""
    from botocore.loaders import create_loader

    return create_loader()


class ConditionFailed(Exception):
    """Raised when an item is not as a write wanted it; carries it as it is, or None if there is none."""

    def __init__(self, item: Item | None) -> None:
        super().__init__("the item does not meet the condition")
        self.item = item


class Table:
    """Send requests about one table.

    Clients of boto3 may be shared by threads, not by processes: after a fork, the child makes its own.

    Arguments:
        place: Where the table is.
        clock: Receives the date of every reply.
    """

    def __init__(self, place: Address, clock: Clock) -> None:
        self.place = place
        self._clock = clock
        self._client: Any = None
        self._inherited: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        # What came through a fork is not closed, but kept: its locks may be held by threads that stayed behind.
        self._inherited.append(self._client)
        self._client = None
        self._opening = threading.Lock()
        self._pid = os.getpid()  # last, as in `Heartbeat`

    def client(self) -> Any:
        """Return the client of this process."""
        if self._pid != os.getpid():
            self._reset()
        client = self._client
        if client is None:
            with self._opening:
                if self._client is None:
                    self._client = self._connect()
                client = self._client
        return client

    def _connect(self) -> Any:
        from botocore.session import Session  # what boto3 stands on; here, since it takes its time

        place = self.place
        config = Config(
            connect_timeout=place.timeout,
            read_timeout=place.timeout,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=MOST_CONNECTIONS,
        )
        session = Session(profile=place.profile or None)
        session.register_component("data_loader", _models())
        client = session.create_client(
            "dynamodb", region_name=place.region or None, endpoint_url=place.endpoint_url or None, config=config
        )
        client.meta.events.register("response-received.dynamodb", self._check)
        return client

    def _check(self, response_dict: Any = None, **_: object) -> None:
        """Take no reply that was cut off for a whole one: botocore reads an empty body as "there is no item".

        Raises:
            ConnectionClosedError: the connection ended within the reply.
        """
        if response_dict is None:  # nothing came
            return
        try:  # the length may be missing; but no part of an object is one
            whole = isinstance(json.loads(response_dict["body"]), dict)
        except ValueError:
            whole = False
        if not whole:
            raise ConnectionClosedError(endpoint_url=self.place.endpoint_url or "of DynamoDB")

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        """Send a request about the table, and return the reply.

        Arguments:
            operation: As boto3's client calls it: ``put_item``.
            request: What it takes but the table's name.

        Raises:
            ConditionFailed: the condition of a write did not hold.
            StoreError: it could not be served.
        """
        try:
            try:
                return self._send(operation, request)
            except ConnectionClosedError:
                # A connection that was idle for long fails on its first use. Whether the request came through is
                # unknown: each may be sent again.
                return self._send(operation, request)
        except (ClientError, BotoCoreError, OSError) as error:
            interrupted = interruption(error)
            if interrupted is not None:
                raise interrupted from None
            raise translate_error(error, self.place) from error

    def _send(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        client, sent = self.client(), time.monotonic()
        try:
            reply: dict[str, Any] = getattr(client, operation)(TableName=self.place.table, **request)
        except ClientError as error:
            self._receive(error.response, sent)
            if error.response.get("Error", {}).get("Code") == "ConditionalCheckFailedException":
                raise ConditionFailed(error.response.get("Item")) from None
            raise
        self._receive(reply, sent)
        return reply

    def _receive(self, reply: Any, sent: float) -> None:
        self._clock.receive(reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"), sent)

    def put(self, item: Item, condition: Condition) -> None:
        """Write an item in the place of another, or of none.

        Raises:
            ConditionFailed: the condition did not hold.
        """
        self._write("put_item", item["version"]["S"], Item=item, **condition.request())

    def update(self, key: str, update: Update, **options: Any) -> Item | None:
        """Change an item; return it if the options request that, and its reply was not lost.

        Raises:
            ConditionFailed: the condition did not hold.
        """
        reply = self._write("update_item", update.version, Key={"key": text(key)}, **update.request(), **options)
        item: Item | None = reply.get("Attributes")
        return item

    def _write(self, operation: str, version: str, **request: Any) -> dict[str, Any]:
        try:
            return self.call(operation, **request, ReturnValuesOnConditionCheckFailure="ALL_OLD")
        except ConditionFailed as overtaken:
            if overtaken.item is not None and overtaken.item.get("version") == text(version):
                return {}  # this very write came through, its reply was lost, and it was sent again
            raise

    def read(self, key: str) -> Item | None:
        """Return an item as it is now, or None."""
        item: Item | None = self.call("get_item", Key={"key": text(key)}, ConsistentRead=True).get("Item")
        return item

    def scan(self, prefix: str) -> Iterator[Item]:
        """Yield every item whose key begins so, page by page."""
        request: dict[str, Any] = {"ConsistentRead": True}
        if prefix:
            request["FilterExpression"] = "begins_with(#key, :prefix)"
            request["ExpressionAttributeNames"] = {"#key": "key"}
            request["ExpressionAttributeValues"] = {":prefix": text(prefix)}
        while True:
            page = self.call("scan", **request)
            yield from page["Items"]
            if not page.get("LastEvaluatedKey"):
                return
            request["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    def close(self) -> None:
        """Close the connections of this process."""
        if self._pid == os.getpid():
            with self._opening:
                client, self._client = self._client, None
            if client is not None:
                client.close()


#: Errors of the request's signature; the texts of some repeat it, with the key's id and a session's token.
_SIGNATURE = {
    "ExpiredTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_RIGHTS = {"AccessDenied", "AccessDeniedException", "NotAuthorized", "OptInRequired", "SubscriptionRequiredException"}
_NO_IDENTITY = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError)

#: The modules of errors that a request may raise and botocore does not wrap.
_TRANSPORT = {"builtins", "http", "socket", "ssl", "urllib3"}


def interruption(error: Exception) -> Exception | None:
    """Return what a signal's handler raised in the middle of a request, as that of the soft time limit does, or None.

    botocore makes an error of its own of whatever is raised there, and to wait for a store that is not down would be to
    lose the time limit.

    Arguments:
        error: What boto3 raised.
    """
    raised = error.kwargs.get("error") if isinstance(error, HTTPClientError) else None
    if not isinstance(raised, Exception) or type(raised).__module__.partition(".")[0] in _TRANSPORT:
        return None
    return raised


def translate_error(error: Exception, place: object) -> StoreError:
    """Return the store's error that an error of boto3 means.

    Arguments:
        error: What boto3 raised.
        place: What to call the table; no password in it.
    """
    if isinstance(error, ClientError):
        reply = error.response.get("Error", {})
        return _of_code(str(reply.get("Code", "")), str(reply.get("Message", "")), place)
    name = type(error).__name__
    if isinstance(error, NoRegionError):
        return StoreRefused(
            f"Expected a region for the idempotency store {place}, found none: write ?region=... or set AWS_REGION."
        )
    if isinstance(error, _NO_IDENTITY):
        return StoreRefused(
            f"Expected credentials for the idempotency store {place}, and boto3 found none that it can use ({name}). "
            "Give the worker a role, or a profile, or the keys in its environment."
        )
    return StoreUnreachable(
        f"The idempotency store {place} cannot serve ({name}: {error}). Is the endpoint right, and within reach?"
    )


def _of_code(code: str, message: str, place: object) -> StoreError:
    if code in _SIGNATURE:
        return StoreRefused(
            f"The idempotency store {place} refused us ({code}). "
            "Check the credentials, the region, and this machine's clock: AWS takes no request that is minutes off."
        )
    if code in _RIGHTS:
        return StoreRefused(
            f"The idempotency store {place} refused us ({code}: {message}). "
            "Give the role GetItem, PutItem, UpdateItem and DeleteItem on the table."
        )
    if code == "ResourceNotFoundException":
        return StoreRefused(
            f"Expected the table of the idempotency store {place}, and it is not there (or in another region). "
            "Create it with: celery-idempotent --store URL schema --apply"
        )
    if code == "ValidationException" and "Item size" in message:
        return StoreRefused(
            f"The idempotency store {place} refused a record ({message}): an item of DynamoDB has room for 400 KB, its "
            "key and the ids of tasks included. Lower result_max_bytes, or return a reference to what is large."
        )
    if code == "ValidationException" and "hashkey has exceeded" in message:
        return StoreRefused(
            f"The idempotency store {place} refused a key ({message}): it has room for 2,048 bytes, its history's "
            "for 9 fewer. Give the task a shorter name, or the app a shorter idempotency_namespace."
        )
    if code == "ValidationException":
        return StoreRefused(
            f"The idempotency store {place} refused a request ({message}). Check that its table has "
            "one key attribute 'key', a string."
        )
    return StoreUnreachable(f"The idempotency store {place} cannot serve ({code}: {message}).")


def code(error: StoreError) -> str:
    """Return the service's own word for an error that it answered, or "" if it did not answer."""
    cause = error.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, ClientError) else ""


#: Seconds a connection attempt and a reply may take. A lease call must answer or fail long before a lease ends; boto3's
#: own default is a minute, four times over.
TIMEOUT = 2.0

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_OPTIONS = ("region", "endpoint_url", "profile", "timeout")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a table is; boto3 finds the credentials as it always does.

    Arguments:
        table: The table's name.
        region: As ``eu-west-1``; "" for what boto3 finds in the environment.
        endpoint_url: Another endpoint than AWS's own, as ``http://localhost:8000``; "" for none.
        profile: Which profile of boto3's configuration; "" for what boto3 takes by itself.
        timeout: Seconds a connection attempt and a reply may take.
    """

    table: str
    region: str = ""
    endpoint_url: str = ""
    profile: str = ""
    timeout: float = TIMEOUT

    def __str__(self) -> str:
        """Return what to call the table in messages."""
        return f"dynamodb://{self.table}"

    @classmethod
    def in_url(cls, url: str) -> Address:
        """Return the address in a URL.

        Raises:
            ConfigurationError: it holds a password, an option that is not known, or no table's name.
        """
        _, _, rest = url.partition("://")
        table, _, query = rest.partition("?")
        if "@" in table:
            raise _wrong(url, "it holds a user or a password; boto3 takes credentials from the environment, a profile")
        if not _TABLE.fullmatch(table.rstrip("/")):
            raise _wrong(url, "a table's name has 3 to 255 letters, digits, dots, dashes and underscores")
        given = dict(parse_qsl(query, keep_blank_values=True))
        for name in given:
            if name not in _OPTIONS:
                raise unknown_parameter(url, name, _OPTIONS, f"There are {', '.join(_OPTIONS)}.")
        timeout = _seconds(url, given.pop("timeout", str(TIMEOUT)))
        endpoint = given.get("endpoint_url", "")
        if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or "@" in endpoint):
            raise _wrong(url, "its endpoint_url is one like http://localhost:8000, without a password")
        return cls(table.rstrip("/"), timeout=timeout, **given)


def _seconds(url: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and isfinite(seconds)):
        raise _wrong(url, "its timeout is a number of seconds above 0")
    return seconds


def _wrong(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a URL like dynamodb://table?region=eu-west-1, got {hide_password(url)!r}: {why}."
    )
