"""The contract of a storage, kept by a folder, by a real S3 server, and by the store in memory that other tests use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pgtide.errors import ConfigurationError, LogUnreachableError
from pgtide.local import LocalS3
from pgtide.log.folder import Folder
from pgtide.log.s3 import S3, new_client, s3_storage
from pgtide.log.storage import Storage, storage_at
from tests.log.object_store import MemoryStore


@pytest.fixture(params=["folder", "S3", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return storage_at(tmp_path / "log")
    return MemoryStore() if request.param == "memory" else storage_at(f"{request.getfixturevalue('bucket')}/some/log")


def test_a_file_is_created_once(storage: Storage) -> None:
    assert storage.create("segments/1.seg", b"one") is not None
    assert storage.create("segments/1.seg", b"other") is None
    assert storage.read("segments/1.seg") == b"one"


def test_a_file_is_replaced_only_by_who_has_seen_its_last_version(storage: Storage) -> None:
    first = storage.create("control/note", b"1")
    assert first is not None
    second = storage.replace("control/note", b"2", first)
    assert second not in (None, first)
    assert storage.replace("control/note", b"3", first) is None
    assert storage.versioned("control/note") == (b"2", second)
    assert storage.replace("control/other", b"1", first) is None
    assert storage.versioned("control/other") is None


def test_what_is_not_there_says_so(storage: Storage) -> None:
    for read in (storage.read, storage.open, lambda name: storage.read_range(name, 0, 10)):
        with pytest.raises(FileNotFoundError):
            read("segments/1.seg")
    storage.delete("segments/1.seg")
    assert storage.entries("segments") == []


def test_parts_of_a_file_are_read_wherever_they_are(storage: Storage) -> None:
    content = bytes(number % 251 for number in range(1_000_000))
    storage.create("segments/1.seg", content)
    for position, length in [(0, 10), (10, 300_000), (999_990, 100), (500_000, 5), (300_000, 600_000)]:
        assert storage.read_range("segments/1.seg", position, length) == content[position : position + length]
    assert storage.read_range("segments/1.seg", 1_000_000, 10) == b""
    with storage.open("segments/1.seg") as file:
        assert file.seek(0, 2) == len(content)
        file.seek(123_456)
        assert file.read(50) + file.read(50) == content[123_456:123_556]


def test_entries_are_in_order_and_can_begin_after_a_name(storage: Storage) -> None:
    for name in ("b/2", "a/1", "b/10", "b/c/1", "bb/1"):
        storage.write(name, name.encode())
    assert [(entry.name, entry.nbytes) for entry in storage.entries("b")] == [("b/10", 4), ("b/2", 3), ("b/c/1", 5)]
    assert [entry.name for entry in storage.entries("b", after="b/10")] == ["b/2", "b/c/1"]


def test_written_files_are_what_was_written_last_until_they_are_deleted(storage: Storage, tmp_path: Path) -> None:
    storage.write("readers/mirror.json", b"1")
    storage.write("readers/mirror.json", b"2")
    assert storage.read("readers/mirror.json") == b"2"
    storage.delete("readers/mirror.json")
    assert storage.versioned("readers/mirror.json") is None
    (tmp_path / "spooled").write_bytes(b"x" * 100_000)
    assert storage.copy_in("large/1.seg", tmp_path / "spooled") == 100_000
    assert storage.copy_in("large/1.seg", tmp_path / "spooled") == 100_000, "as after a lost answer"
    assert storage.read("large/1.seg") == b"x" * 100_000


def test_more_entries_than_fit_into_one_answer(bucket: str, object_store: LocalS3) -> None:
    store = storage_at(bucket)
    root = object_store.folder / "buckets" / bucket.removeprefix("s3://") / "segments"
    root.mkdir()
    for number in range(1_100):
        (root / f"{number:020d}.seg").touch()
    assert [entry.name for entry in store.entries("segments")] == [f"segments/{n:020d}.seg" for n in range(1_100)]


@pytest.mark.parametrize(
    ("name", "variables", "told"),
    [
        ("there-is-none", {}, ["NoSuchBucket", "create the bucket"]),
        ("", {"AWS_SECRET_ACCESS_KEY": "hunter2"}, ["SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"]),
        ("", {"AWS_ACCESS_KEY_ID": "nobody"}, ["refuses the log", "AWS_ACCESS_KEY_ID"]),
        ("", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ["no AWS credentials", "AWS_PROFILE"]),
        ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, ["does not answer", "AWS_ENDPOINT_URL"]),
        ("", {"AWS_PROFILE": "not-there"}, ["not-there", "~/.aws"]),
        ("", {"AWS_ENDPOINT_URL": "not a url"}, ["not a url", "AWS_*"]),
    ],
)
def test_a_store_that_cannot_be_used_says_why(
    name: str, variables: dict[str, str], told: list[str], bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises((LogUnreachableError, ConfigurationError)) as refused:
        S3(f"s3://{name}" if name else bucket, new_client(), patience_s=0).versioned("log.json")
    assert all(text in str(refused.value) for text in told), refused.value
    assert "hunter2" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_store_that_comes_back_is_waited_for(bucket: str, object_store: LocalS3) -> None:
    patient, impatient = (S3(bucket, new_client(), patience_s=seconds) for seconds in (60, 0))
    patient.write("note", b"1")
    object_store.stop()
    try:
        with pytest.raises(LogUnreachableError, match="does not answer"):
            impatient.read("note")
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(patient.read("note")))
        waiting.start()
    finally:
        object_store.start()
    waiting.join(60)
    assert found == [b"1"]


def test_only_folders_and_s3_are_storages(tmp_path: Path) -> None:
    assert isinstance(storage_at(tmp_path), Folder)
    assert s3_storage("s3://bucket/a/log/", 0).location == "s3://bucket/a/log"
    with pytest.raises(ConfigurationError, match="gs://bucket/log"):
        storage_at("gs://bucket/log")
