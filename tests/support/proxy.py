"""A TCP proxy between a client and a server, with the faults of a network.

`with Proxy(server.port) as proxy:` and point the client at `proxy.url(db)` or at `proxy.port`. Every fault lasts until
`heal()`, but for `reset` and `swallow_reply`, which hit once, and `swallow_each`, which hits each request once.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter

CHUNK = 65536
RST_ON_CLOSE = struct.pack("ii", 1, 0)


class Link:
    """One client connection and its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.armed = False  # the request whose reply shall be lost has passed
        self.mute = False  # the reply was lost: the rest of this stream is lost too
        self.forgotten = False  # what comes is lost, in both directions

    def cut(self, *, reset: bool = False) -> None:
        """Close both sides, with RST instead of FIN if `reset`."""
        for side in (self.client, self.server):
            try:
                if reset:
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
                # Wakes the thread that blocks in recv, which close alone does not.
                side.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            except OSError:
                pass
            side.close()


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`, as faithfully as it is told to."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.accepted = 0
        self.refused = 0
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._flow = threading.Event()
        self._flow.set()
        self._closed = False
        self._delay = 0.0
        self._dropping = False
        self._refusing = False
        self._swallow = 0
        self._swallowed = 0
        self._dropped = 0
        self._matching = b""
        self._hang = False
        self._each = 0
        self._requests_hit: Counter[bytes] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def url(self, db: int = 0) -> str:
        """Return a Redis URL that leads through this proxy."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    @property
    def swallowed(self) -> int:
        """How many replies were lost."""
        return self._swallowed

    @property
    def requests_hit(self) -> Counter[bytes]:
        """How often each request lost its reply, since the last `heal()`."""
        with self._lock:
            return Counter(self._requests_hit)

    @property
    def dropped(self) -> int:
        """How many bytes were lost."""
        return self._dropped

    @property
    def open_links(self) -> int:
        """How many client connections are open."""
        with self._lock:
            return len(self._links)

    def delay(self, seconds: float) -> None:
        """Hold every chunk back for so long, in each direction."""
        self._delay = seconds

    def drop(self) -> None:
        """Lose every byte from now on; connections stay open."""
        self._dropping = True

    def forget(self) -> None:
        """Lose every byte of the open connections, as a NAT does that has forgotten them; new ones are served."""
        with self._lock:
            for link in self._links:
                link.forgotten = True

    def partition(self) -> None:
        """Hold every byte back, as TCP does while a network is split; `heal()` delivers them late."""
        self._flow.clear()

    def refuse(self) -> None:
        """Reset new connections at once, as a server does that is down; old ones go on."""
        self._refusing = True

    def reset(self) -> None:
        """Reset every open connection."""
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.cut(reset=True)

    def swallow_reply(self, n: int = 1, *, matching: bytes = b"", hang: bool = False) -> None:
        """Lose the replies to the next `n` requests: the server does the work, and the client never hears of it.

        Args:
            n: how many replies, one per connection at a time.
            matching: only requests that hold these bytes, as b"EVALSHA" or a key (a new connection says hello first).
            hang: leave the client waiting on an open connection; otherwise the connection is reset.
        """
        with self._lock:
            self._swallow, self._matching, self._hang = n, matching, hang

    def swallow_each(self, times: int = 1, *, matching: bytes = b"", hang: bool = False) -> None:
        """Lose the first replies to every request: the same bytes sent once more are answered.

        Args:
            times: how many replies to each request.
            matching: only requests that hold these bytes.
            hang: leave the client waiting on an open connection; otherwise the connection is reset.
        """
        with self._lock:
            self._each, self._matching, self._hang = times, matching, hang

    def heal(self) -> None:
        """End every fault. Connections whose bytes were lost are cut, for their streams are beyond repair."""
        with self._lock:
            lossy = [link for link in self._links if link.mute or link.forgotten or self._dropping]
            self._links.difference_update(lossy)
            self._delay, self._dropping, self._refusing, self._swallow, self._each = 0.0, False, False, 0, 0
            self._requests_hit.clear()
        for link in lossy:
            link.cut(reset=True)
        self._flow.set()

    def close(self) -> None:
        """Stop forwarding and cut every connection."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self._flow.set()
        self.reset()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    self.refused += 1
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
                client.close()
                continue
            server.settimeout(None)
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server)
            with self._lock:
                self.accepted += 1
                self._links.add(link)
            for name, pump in (("request", self._requests), ("reply", self._replies)):
                threading.Thread(target=pump, args=(link,), name=f"proxy-{name}", daemon=True).start()

    def _requests(self, link: Link) -> None:
        self._pump(link, link.client, link.server, to_server=True)

    def _replies(self, link: Link) -> None:
        self._pump(link, link.server, link.client, to_server=False)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket, *, to_server: bool) -> None:
        try:
            while chunk := source.recv(CHUNK):
                if self._delay:
                    time.sleep(self._delay)
                self._flow.wait()
                if self._lost(link, chunk, to_server=to_server):
                    continue
                sink.sendall(chunk)
        except OSError:
            pass
        with self._lock:
            self._links.discard(link)
        link.cut()

    def _lost(self, link: Link, chunk: bytes, *, to_server: bool) -> bool:
        """Say whether this chunk is to be lost; raise OSError to cut the connection instead."""
        with self._lock:
            if self._dropping or link.forgotten or (link.mute and not to_server):
                self._dropped += len(chunk)
                return True
            if to_server:
                if (self._swallow or self._each) and not link.armed and self._matching in chunk:
                    self._arm(link, chunk)
                return False
            if not link.armed:
                return False
            link.armed, link.mute = False, True
            self._swallowed += 1
            hang = self._hang
        if not hang:
            link.cut(reset=True)
            raise ConnectionResetError
        return True

    def _arm(self, link: Link, request: bytes) -> None:
        if self._each and self._requests_hit[request] >= self._each:
            return
        self._swallow = max(0, self._swallow - 1)
        self._requests_hit[request] += 1
        link.armed = True
