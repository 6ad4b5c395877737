"""One table, asked through a client of boto3 that belongs to this process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from .dynamodb_clock import Clock
from .dynamodb_expressions import Condition, Update
from .dynamodb_items import Item, text
from .dynamodb_refusals import interruption, translated
from .dynamodb_urls import Place

__all__ = ["Overtaken", "Table"]

#: Connections that are kept open. More threads than that open and close one each.
MOST_CONNECTIONS = 50


@cache
def _models() -> Any:
    """Return what has read the description of the service, which takes longer than all else, and need be done once."""
    from botocore.loaders import create_loader

    return create_loader()


class Overtaken(Exception):
    """Raised when an item is not as a write wanted it; carries it as it is, or None if there is none."""

    def __init__(self, item: Item | None) -> None:
        super().__init__("the item is not as the condition says")
        self.item = item


class Table:
    """Send requests about one table.

    Clients of boto3 may be shared by threads, not by processes: after a fork, the child makes its own.

    Arguments:
        place: Where the table is.
        clock: Hears the date of every reply.
    """

    def __init__(self, place: Place, clock: Clock) -> None:
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
        try:  # its length need not be said; but no part of an object is one
            whole = isinstance(json.loads(response_dict["body"]), dict)
        except ValueError:
            whole = False
        if not whole:
            raise ConnectionClosedError(endpoint_url=self.place.endpoint_url or "of DynamoDB")

    def ask(self, operation: str, **request: Any) -> dict[str, Any]:
        """Send a request about the table, and return the reply.

        Arguments:
            operation: As boto3's client calls it: ``put_item``.
            request: What it takes but the table's name.

        Raises:
            Overtaken: the condition of a write did not hold.
            StoreError: it could not be served.
        """
        try:
            try:
                return self._send(operation, request)
            except ConnectionClosedError:
                # A connection that was idle for long fails on its first use. Whether the request came through, nobody
                # knows: each may be sent again.
                return self._send(operation, request)
        except (ClientError, BotoCoreError, OSError) as error:
            interrupted = interruption(error)
            if interrupted is not None:
                raise interrupted from None
            raise translated(error, self.place) from error

    def _send(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        client, sent = self.client(), time.monotonic()
        try:
            reply: dict[str, Any] = getattr(client, operation)(TableName=self.place.table, **request)
        except ClientError as error:
            self._hear(error.response, sent)
            if error.response.get("Error", {}).get("Code") == "ConditionalCheckFailedException":
                raise Overtaken(error.response.get("Item")) from None
            raise
        self._hear(reply, sent)
        return reply

    def _hear(self, reply: Any, sent: float) -> None:
        self._clock.hear(reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"), sent)

    def put(self, item: Item, condition: Condition) -> None:
        """Write an item in the place of another, or of none.

        Raises:
            Overtaken: the condition did not hold.
        """
        self._write("put_item", item["version"]["S"], Item=item, **condition.request())

    def update(self, key: str, update: Update, **options: Any) -> Item | None:
        """Change an item; return it if the options ask for it, and its reply was not lost.

        Raises:
            Overtaken: the condition did not hold.
        """
        reply = self._write("update_item", update.version, Key={"key": text(key)}, **update.request(), **options)
        item: Item | None = reply.get("Attributes")
        return item

    def _write(self, operation: str, version: str, **request: Any) -> dict[str, Any]:
        try:
            return self.ask(operation, **request, ReturnValuesOnConditionCheckFailure="ALL_OLD")
        except Overtaken as overtaken:
            if overtaken.item is not None and overtaken.item.get("version") == text(version):
                return {}  # this very write came through, its reply was lost, and it was sent again
            raise

    def read(self, key: str) -> Item | None:
        """Return an item as it is now, or None."""
        item: Item | None = self.ask("get_item", Key={"key": text(key)}, ConsistentRead=True).get("Item")
        return item

    def scan(self, prefix: str) -> Iterator[Item]:
        """Yield every item whose key begins so, page by page."""
        request: dict[str, Any] = {"ConsistentRead": True}
        if prefix:
            request["FilterExpression"] = "begins_with(#key, :prefix)"
            request["ExpressionAttributeNames"] = {"#key": "key"}
            request["ExpressionAttributeValues"] = {":prefix": text(prefix)}
        while True:
            page = self.ask("scan", **request)
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
