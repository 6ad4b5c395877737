"""A DynamoDB endpoint of our own: moto's, over HTTP, in a process of its own. Nothing of it is AWS.

Its clock is its own too, so that a test which turns the clock of this process leaves the server's as it is. DynamoDB
decides one write of an item after the other; moto's threads would decide them at once, each over what the others are
about to change. So here requests wait for each other.

`python -m tests.support.dynamodb` serves until its standard input ends, and says first on which port.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any
from urllib.parse import quote

from tests.support import processes
from tests.support.celery.measuring import unmeasured
from tests.support.servers import ServerMissing

__all__ = ["DynamoServer", "credentials"]

#: What signs the requests; moto looks at neither.
ACCESS_KEY, SECRET_KEY = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
REGION = "eu-west-1"
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def credentials() -> dict[str, str]:
    """Return the environment in which boto3 finds keys, and nothing of the machine's own."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class DynamoServer:
    """A server of our own, with tables that vanish with it.

    Raises:
        ServerMissing: moto is not installed.
    """

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> DynamoServer:
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            raise ServerMissing("no DynamoDB endpoint was found. Install one: `pip install 'moto[server]>=5' boto3`")
        command = [sys.executable, "-m", "tests.support.dynamodb"]
        self._process = processes.spawn(command, env=unmeasured(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            status = self.stop()
            raise RuntimeError(f"moto's server ended with status {status} before it served; its error is above")
        self.port = int(said)
        return self

    def stop(self) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        return processes.end(process, grace=1)

    def endpoint(self, port: int | None = None) -> str:
        """Return the endpoint's URL; `port` is another one that leads here."""
        return f"http://127.0.0.1:{port or self.port}"

    def url(self, table: str, port: int | None = None) -> str:
        """Return the URL of a store in this table, which waits long: a machine that is busy is not what is tested."""
        return f"dynamodb://{table}?region={REGION}&endpoint_url={quote(self.endpoint(port), safe='')}&timeout=20"


def one_by_one(app: Application) -> Application:
    """Return the application, answering one request after the other."""
    turn = threading.Lock()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # Read first: a client that sends slowly must not keep the others waiting.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        with turn:
            return app(environ, start)

    return answer


def main() -> None:
    import logging

    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Prompt(WSGIRequestHandler):
        disable_nagle_algorithm = True  # or the body of each reply waits 40 ms for the receipt of its head

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
    app = one_by_one(create_backend_app("dynamodb"))
    with closing(make_server("127.0.0.1", 0, app, threaded=True, request_handler=Prompt)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
