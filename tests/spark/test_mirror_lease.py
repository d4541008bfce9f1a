"""One process mirrors a log that is in an object store, whatever folder or machine the other is started on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pgtide.errors import AlreadyRunningError, LogUnreachableError
from pgtide.log.identity import LogIdentity, create_identity
from pgtide.log.storage import storage_at
from pgtide.spark.mirror_lease import Holder, MirrorLease
from pgtide.spark.only_mirror import only_mirror
from tests.log.object_store import MemoryStore
from tests.spark.mirror_process import mirror_process
from tests.waiting import wait_for

NAME = "control/mirror"


@pytest.fixture
def log(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a log; the folder for temporary files is this test's, as that of a machine would be."""
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    location = f"{bucket}/log"
    create_identity(storage_at(location), LogIdentity("7000", "shop", 1, "pgtide", start_lsn=1))
    return location


def test_second_mirror_on_a_machine_is_refused_and_follows_at_once_when_the_first_was_killed(
    log: str, tmp_path: Path
) -> None:
    with mirror_process(log, tmp_path / "machine") as first:
        with pytest.raises(AlreadyRunningError, match=f"pid {first.pid} on "), only_mirror(log):
            pass
        first.kill()
        first.wait()
        with only_mirror(log), only_mirror(log) as hold:  # nested, as a command does it
            hold.check()


def test_mirror_on_another_machine_is_refused_until_the_first_ends_or_is_not_heard_of_any_more(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirror_process(log, tmp_path / "other") as first:
        with pytest.raises(AlreadyRunningError, match=f"pid {first.pid} on "), only_mirror(log):
            pass
        first.kill()
        first.wait()
        monkeypatch.setattr("pgtide.spark.mirror_lease._EXPIRES_S", 1.0)
        with only_mirror(log):
            pass
    monkeypatch.setattr("pgtide.spark.mirror_lease._EXPIRES_S", 1e9)
    with mirror_process(log, tmp_path / "other") as second:  # at once: the one before has let go of it
        second.communicate("")
    with only_mirror(log):
        pass


def test_mirror_that_was_replaced_is_told_by_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgtide.spark.mirror_lease._BEAT_S", 0.05)
    monkeypatch.setattr("pgtide.spark.mirror_lease._EXPIRES_S", 1.0)
    store = CutOff()
    first = MirrorLease(store, Holder(1, "here", "now", "a"))
    store.is_cut_off = True
    second = MirrorLease(MemoryStore(store.location, store.objects), Holder(2, "there", "later", "b"))
    first.check()
    store.is_cut_off = False
    wait_for(lambda: first._lost is not None, what="the first to find out")
    with pytest.raises(AlreadyRunningError, match="pid 2 on there, since later"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert store.objects[NAME][0] == b"{}", "the first has not let go of what is the second's"


def test_answer_that_was_lost_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgtide.spark.mirror_lease._BEAT_S", 0.05)
    store = CutOff()
    lease = MirrorLease(store, Holder(1, "here", "now", "a"))
    store.loses_answers = 3
    wait_for(lambda: store.loses_answers == 0, what="some beats")
    before = store.objects[NAME][0]
    wait_for(lambda: store.objects[NAME][0] != before, what="another beat")
    lease.check()
    lease.release()


class CutOff(MemoryStore):
    """A store that one mirror does not reach, or does not hear from."""

    is_cut_off = False
    loses_answers = 0

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        if self.is_cut_off:
            raise LogUnreachableError("cut off", remedy="none")
        made = super().replace(name, data, version)
        if made is not None and self.loses_answers:
            self.loses_answers -= 1
            raise LogUnreachableError("the answer was lost", remedy="none")
        return made
