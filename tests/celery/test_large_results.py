"""Results that are too large for their records, on real workers: left in the result backend, or written to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.stores import Record, open_store
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal

APP = "tests.support.celery.large_app"
SIZE = 3 * 1024**2


@pytest.fixture(params=["backend", "files"])
def place(request: pytest.FixtureRequest, worker_env: dict[str, str], tmp_path: Path) -> str:
    """Where large results go."""
    worker_env["LARGE_RESULTS"] = "backend" if request.param == "backend" else f"file://{tmp_path}/results"
    return str(request.param)


@pytest.fixture
def in_files(worker_env: dict[str, str], tmp_path: Path) -> Path:
    """The directory to which large results go."""
    worker_env["LARGE_RESULTS"] = f"file://{tmp_path}/results"
    return tmp_path / "results"


@pytest.fixture
def in_backend(worker_env: dict[str, str]) -> None:
    worker_env["LARGE_RESULTS"] = "backend"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(APP)


def record_of(store_url: str) -> Record:
    store = open_store(store_url)
    [record] = store.scan()
    store.close()
    return record


def whole(app: Celery, name: str) -> dict[str, Any]:
    return {"name": name, "text": app.module.text(name), "pair": [1, None]}


@pytest.mark.smoke
def test_a_duplicate_gets_a_result_that_is_too_large_for_its_record(
    place: str, app: Celery, start_worker: StartWorker, store_url: str, journal: Journal
) -> None:
    start_worker(APP, concurrency=1)
    first = app.module.report.delay("A")
    assert first.get(timeout=30) == whole(app, "A")
    again = app.module.report.delay("A")
    assert again.id != first.id
    assert again.get(timeout=30) == whole(app, "A")
    assert journal.count("made") == 1
    record = record_of(store_url)
    assert len(record.payload) < 400
    kept = f"!reference:task:{first.id}" if place == "backend" else "!reference:file://"
    assert record.payload.decode().startswith(kept)


def test_the_callback_of_a_duplicate_gets_it_too(
    place: str, app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(APP, concurrency=1)
    for name in ("B", "B"):
        app.module.bundle.apply_async((name,), link=app.module.measured.s()).get(timeout=30)
    assert [entry.fields["right"] for entry in journal.wait_for_count(2, "measured")] == [True, True]
    assert journal.count("made") == 1


def test_a_file_that_was_removed_leaves_the_duplicate_without_a_result(
    in_files: Path, app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(APP, concurrency=1)
    app.module.report.delay("A").get(timeout=30)
    [file] = in_files.iterdir()
    assert file.stat().st_size > SIZE
    file.unlink()
    with pytest.raises(Exception, match=r"its file file://.*/results/.*\.result is gone") as caught:
        app.module.report.delay("A").get(timeout=30)
    assert type(caught.value).__name__ == "ResultUnavailable"
    assert journal.count("made") == 1


def test_a_result_that_expired_in_the_backend_leaves_the_duplicate_without_it(
    in_backend: None, app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(APP, concurrency=1)
    first = app.module.report.delay("A")
    first.get(timeout=30)
    # As a result that expired while somebody else's task of that id has failed: no answer is made of it.
    app.backend.delete(app.backend.get_key_for_task(first.id))
    app.backend.store_result(first.id, ValueError("not this"), "FAILURE")
    with pytest.raises(Exception, match=r"as task .*, where its status is FAILURE") as caught:
        app.module.report.delay("A").get(timeout=30)
    assert type(caught.value).__name__ == "ResultUnavailable"
    assert journal.count("made") == 1


@pytest.mark.nightly
def test_a_duplicate_waits_for_a_file_system_that_is_away(
    in_files: Path, app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    node = start_worker(APP, concurrency=1)
    app.module.report.delay("A").get(timeout=30)
    away = in_files.rename(in_files.with_name("unmounted"))
    duplicate = app.module.report.delay("A")
    node.wait_for_log("Deferred")
    away.rename(in_files)
    assert duplicate.get(timeout=60) == whole(app, "A")
    assert journal.count("made") == 1


def test_a_place_that_cannot_be_written_to_repeats_no_effect(
    in_files: Path, app: Celery, start_worker: StartWorker, journal: Journal, store_url: str
) -> None:
    in_files.write_text("a file where the directory should be")
    start_worker(APP, concurrency=1)
    assert app.module.report.delay("A").get(timeout=30) == whole(app, "A")
    with pytest.raises(Exception, match=r"result_max_bytes is 1048576, and it could not be kept elsewhere: "):
        app.module.report.delay("A").get(timeout=30)
    assert journal.count("made") == 1
    assert record_of(store_url).payload.startswith(b"!unavailable:the result has ")


def test_a_result_that_nobody_reads_is_not_left_in_the_backend(
    in_backend: None, app: Celery, start_worker: StartWorker, journal: Journal, store_url: str
) -> None:
    node = start_worker(APP, concurrency=1)
    for _ in range(2):
        app.module.unread.delay("A")
    node.wait_for_log("Replayed")
    assert journal.count("made") == 1
    assert b"the result backend does not keep it" in record_of(store_url).payload


@pytest.fixture
def in_bucket(worker_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 server (moto's) to whose bucket large results go.

    s3fs wants a release of botocore of its own choosing, so the `test` extra does not have it: who installs it runs
    this test too.
    """
    pytest.importorskip("s3fs", reason="s3fs is not installed (it is in no extra, since it pins botocore)")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    settings["FSSPEC_S3_ENDPOINT_URL"] = f"http://{host}:{port}"
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    worker_env.update(settings, LARGE_RESULTS="s3://bucket/results")
    client = boto3.client("s3", endpoint_url=settings["FSSPEC_S3_ENDPOINT_URL"])
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()
    server.stop()


def test_large_results_may_go_to_a_bucket(
    in_bucket: Any, app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(APP, concurrency=2)
    names = ("A", "B", "C")
    for name in names * 3:
        assert app.module.report.delay(name).get(timeout=60) == whole(app, name)
    assert journal.count("made") == len(names)
    listed = in_bucket.list_objects_v2(Bucket="bucket", Prefix="results/")["Contents"]
    assert len(listed) == len(names)
    for each in listed:
        in_bucket.delete_object(Bucket="bucket", Key=each["Key"])
    with pytest.raises(Exception, match=r"its file s3://bucket/results/.*\.result is gone"):
        app.module.report.delay("A").get(timeout=60)
