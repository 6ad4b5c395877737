"""HTTP/2: many requests of one connection at once, and one that is given up alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.http.server import WebServer, fresh

pytestmark = pytest.mark.nightly


def run(server: WebServer, main: Callable[[Any], Any]) -> Any:
    """Run a coroutine function with a function that sends a request on the one connection of a client."""
    import httpx

    async def connected() -> Any:
        url, who = f"http://127.0.0.1:{server.port}", {"X-Api-Key": "anna"}
        async with httpx.AsyncClient(http1=False, http2=True, base_url=url, headers=who, timeout=60) as client:

            async def post(key: str, body: bytes = b"body", **query: object) -> Any:
                headers = {"Idempotency-Key": key}
                response = await client.post("/orders", params={"tag": key, **query}, content=body, headers=headers)
                assert response.http_version == "HTTP/2"
                return response

            return await main(post)

    return asyncio.run(connected())


def test_a_request_is_replayed_and_another_under_its_key_refused(serve: Callable[[str], WebServer]) -> None:
    async def main(post: Any) -> Any:
        return await post(key), await post(key), await post(key, b"other")

    key, server = fresh(), serve("hypercorn")
    first, second, other = run(server, main)
    assert [each.status_code for each in (first, second, other)] == [201, 201, 422]
    assert second.headers["Idempotent-Replayed"] == "true"
    assert second.content == first.content
    assert server.count(key) == 1


def test_of_fifty_on_one_connection_one_runs(serve: Callable[[str], WebServer]) -> None:
    async def main(post: Any) -> Any:
        return await asyncio.gather(*(post(key, seconds=3) for _ in range(50)))

    key, server = fresh(), serve("hypercorn")
    assert Counter(each.status_code for each in run(server, main)) == {201: 1, 409: 49}
    assert server.count(key) == 1


def test_a_request_that_is_given_up_is_carried_out_and_replayed(serve: Callable[[str], WebServer]) -> None:
    async def main(post: Any) -> Any:
        given_up = asyncio.create_task(post(key, seconds=1))
        while not server.count(key):
            await asyncio.sleep(0.01)
        given_up.cancel()  # the connection goes on
        while (again := await post(key, seconds=1)).status_code == 409:
            await asyncio.sleep(0.1)
        return again

    key, server = fresh(), serve("hypercorn")
    again = run(server, main)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
    assert server.count(key) == 1
