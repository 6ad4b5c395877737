"""Metrics for Prometheus: in an app's module, ``install(port=9540)``.

Install it with ``pip install "celery-idempotent[prometheus]"``. Workers with a pool of processes, and those of RQ, need
``PROMETHEUS_MULTIPROC_DIR``, see the guide.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..events import add_hook, logger
from .catalogue import CATALOGUE, Kind, Measures, Metric

__all__ = ["DIRECTORY", "PrometheusMetrics", "install", "registry"]


#: Names the folder in which the processes of a worker leave their numbers; prometheus_client's own.
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def install(
    port: int | None = None,
    address: str = "127.0.0.1",
    *,
    short_lived: bool = False,
) -> PrometheusMetrics:
    """Count what happens in this process and, in a worker, answer ``GET /metrics``; call it once, in the app's module.

    Arguments:
        port: Where a Celery worker's main process listens, for all its children; default: nowhere, see `registry`.
        address: The address of the interface on which it listens. The default is loopback, since task names and error
            rates are not public; give "0.0.0.0" or one interface where Prometheus is on another machine.
        short_lived: Whether processes live for one job, as those of RQ's workers do: they go on in each other's files,
            with all metrics of prometheus_client that are made after this.

    Returns:
        The hook, which ``remove_hook`` takes.

    Raises:
        ConfigurationError: prometheus_client is not installed, or ``short_lived`` asks for more than Windows has.
        OSError: the folder that ``PROMETHEUS_MULTIPROC_DIR`` names is not there, and cannot be made.
    """
    path = os.environ.get(DIRECTORY)
    if path:
        Path(path).mkdir(parents=True, exist_ok=True)
        if short_lived:
            _share_files(Path(path))
    metrics = PrometheusMetrics()
    add_hook(metrics)
    if not short_lived:
        _follow_celery(port, address)
    return metrics


def _follow_celery(port: int | None, address: str) -> None:
    from celery import signals

    signals.worker_process_shutdown.connect(_end_child, weak=False, dispatch_uid="celery_idempotent.metrics.child")
    if port is not None:
        Endpoint(port, address).connect()


def _share_files(path: Path) -> None:
    _driver()
    if find_spec("fcntl") is None:
        raise ConfigurationError(
            "Expected a system that can fork, as short_lived=True needs, got Windows. Leave it out: the worker that RQ "
            "has there does all its jobs in one process."
        )
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue(Slot(path))  # type: ignore[no-untyped-call]


class PrometheusMetrics(Measures):
    """A hook that counts in prometheus_client's metrics.

    Arguments:
        registry: Where they are registered; default is prometheus_client's.

    Raises:
        ConfigurationError: prometheus_client is not installed.
        ValueError: they are registered there already.
    """

    def __init__(self, registry: Any = None) -> None:
        super().__init__()
        self.copied = not os.environ.get(DIRECTORY)  # else each process has its own numbers, which begin at 0
        driver = _driver()
        registry = registry or driver.REGISTRY
        self._metrics = {metric.name: _made(driver, metric, registry) for metric in CATALOGUE}
        self._writers: dict[tuple[str, ...], Callable[[float], object]] = {}

    def write(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to a counter or a gauge, or put a value into a histogram."""
        place = (metric.name, *labels)
        writer = self._writers.get(place)
        if writer is None:
            child = self._metrics[metric.name].labels(*labels)
            writer = self._writers[place] = child.observe if metric.kind is Kind.HISTOGRAM else child.inc
        writer(value)


def registry() -> Any:
    """Return what to expose: the numbers of all processes of this worker, or of this one where they are not shared.

    It is a ``prometheus_client.CollectorRegistry``, for ``generate_latest`` or ``make_wsgi_app``.
    """
    driver = _driver()
    path = os.environ.get(DIRECTORY)
    if not path:
        return driver.REGISTRY
    found = driver.CollectorRegistry()
    found.register(_Processes(Path(path)))
    return found


class _Processes:
    """Collects the numbers of all processes that share a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def collect(self) -> Iterator[Any]:
        """Yield the sums; what a killed process held is live no more."""
        multiprocess = _multiprocess()
        for file in self.path.glob("gauge_live*_*.db"):
            pid = file.stem.rsplit("_", 1)[1]
            if pid.isdigit() and not _is_alive(int(pid)):
                multiprocess.mark_process_dead(int(pid), str(self.path))
        leave_dead(self.path)
        yield from multiprocess.MultiProcessCollector(None, str(self.path)).collect()


def _made(driver: Any, metric: Metric, registry: Any) -> Any:
    options: dict[str, Any] = {"labelnames": metric.labels, "registry": registry}
    if metric.kind is Kind.COUNTER:
        return driver.Counter(metric.prometheus, metric.help, **options)
    if metric.kind is Kind.GAUGE:
        return driver.Gauge(metric.prometheus, metric.help, multiprocess_mode="livesum", **options)
    return driver.Histogram(metric.prometheus, metric.help, buckets=metric.buckets, **options)


def _end_child(pid: int | None = None, **_: Any) -> None:
    if os.environ.get(DIRECTORY):
        try:
            _multiprocess().mark_process_dead(pid or os.getpid())
        except OSError as error:
            logger.warning("The metrics of this process could not be marked as those of a dead one: %s", error)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # a signal, also 0, would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, and alive
        return True
    return True


def _multiprocess() -> Any:
    from prometheus_client import multiprocess

    return multiprocess


def _driver() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigurationError(
            'Expected prometheus_client to be installed. Run: pip install "celery-idempotent[prometheus]"'
        ) from error
    return prometheus_client


class Endpoint:
    """A worker's ``/metrics``.

    Arguments:
        port: Where it listens.
        address: On which interface.
    """

    def __init__(self, port: int, address: str) -> None:
        self.port = port
        self.address = address
        self._server: Any = None

    def connect(self) -> None:
        """Open when a worker of this process is ready, and close when it ends."""
        from celery import signals

        names = {"worker_ready": self.open, "worker_shutdown": self.close, "worker_process_init": self.leave}
        for name, receiver in names.items():
            uid = f"celery_idempotent.metrics.{name}"
            getattr(signals, name).connect(receiver, weak=False, dispatch_uid=uid)

    def open(self, sender: Any = None, **_: Any) -> None:
        """Listen; a worker whose port is taken works all the same, and logs that."""
        from prometheus_client import start_http_server

        prefork = sys.modules.get("celery.concurrency.prefork")
        forks = prefork is not None and isinstance(getattr(sender, "pool", None), prefork.TaskPool)
        if forks and not os.environ.get(DIRECTORY):
            logger.error(
                "/metrics will not show what happens in this worker's children. "
                "Set %s to an empty folder of this worker's own before it starts.",
                DIRECTORY,
            )
        try:
            self._server = start_http_server(self.port, addr=self.address, registry=registry())[0]
        except OSError as error:
            logger.error("/metrics cannot be served at %s:%s: %s", self.address, self.port, error)
        else:
            logger.info("/metrics is served at %s:%s", self.address, self.port)

    def close(self, **_: Any) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def leave(self, **_: Any) -> None:
        """Close the listening socket that a child inherits: an orphan must not keep the port."""
        if self._server is not None:
            self._server.socket.close()
            self._server = None


# Places for the numbers of processes that come and go: one that ends leaves its own to the next.
#
# prometheus_client gives each process files of its own. Where a process lives for one job, as RQ's horses do, files
# would be as many as jobs. A slot is the right to a set of files, held by a lock that the kernel gives back, however
# its process ends; what is counted there goes on from where the one before has left it.


_NAME = "slot{}"


class Slot:
    """The slot of the current process; a child gets one of its own.

    Arguments:
        path: The folder that the processes share.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = self._lock = -1
        self._name = ""

    def __call__(self) -> str:
        """Return its name, which is no other living process's."""
        if self._pid != os.getpid():
            self._take()
        return self._name

    def _take(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # the parent's, which holds it still
        for name in map(_NAME.format, count()):
            lock = _locked(self._path, name)
            if lock is not None:
                _forget_live(self._path, name)
                self._name, self._lock, self._pid = name, lock, os.getpid()
                return


def leave_dead(path: Path) -> None:
    """Forget what was of the moment with processes that are gone."""
    for name in {file.stem.rsplit("_", 1)[1] for file in path.glob(f"gauge_live*_{_NAME.format('*')}.db")}:
        lock = _locked(path, name)
        if lock is not None:
            _forget_live(path, name)
            os.close(lock)


def _locked(path: Path, name: str) -> int | None:
    import fcntl  # not on Windows

    lock = os.open(path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _forget_live(path: Path, name: str) -> None:
    for file in path.glob(f"gauge_live*_{name}.db"):
        file.unlink(missing_ok=True)
