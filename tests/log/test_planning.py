"""What planning looks at: no more files, bytes and names in a log of many segments than in one of few."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pgtide.errors import LogCorruptError
from pgtide.log import reader as reader_module
from pgtide.log.reader import LogReader
from pgtide.log.retention import plan_removal, remove
from pgtide.log.writer import LogWriter
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
QUIET = shape(16400, "quiet")
FEW, MANY = 4, 64
MORE_DIGITS_BYTES = 50  # larger offsets are longer in headers and directories


def build(path: Path, segments: int, monkeypatch: pytest.MonkeyPatch) -> LogWriter:
    """A log of that many segments and a writer that begins no more of them."""
    new_log(path)
    with monkeypatch.context() as quickly:
        quickly.setattr(os, "fsync", lambda _: None)
        quickly.setattr(os, "fdatasync", lambda _: None)
        writer = LogWriter(path, segment_bytes=1)
        writer.record_shape(QUIET)
        for number in range(segments):
            writer.write([transaction(1000 + 10 * number, [(ORDERS, 100_000 + number, "a")])])
    writer._segment_bytes = 1 << 20
    return writer


class Looks:
    """Counts files opened, bytes read from them and names listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self._count(monkeypatch, "open", lambda _: 1)
        self._count(monkeypatch, "pread", len)
        self._count(monkeypatch, "listdir", len)
        read_bytes = Path.read_bytes

        def reading(path: Path) -> bytes:
            data = read_bytes(path)
            self.counts.update({"open": 1, "pread": len(data)})
            return data

        monkeypatch.setattr(Path, "read_bytes", reading)

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, size: Any) -> None:
        real = getattr(os, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            self.counts[name] += size(result)
            return result

        monkeypatch.setattr(os, name, counting)


def plan(reader: LogReader, start: int) -> None:
    end = reader.boundary(start, 1000, 1 << 20)
    assert len(reader.plan(start, end)) == 1
    assert len(reader.plan(start, end, ORDERS.relation_oid)) == 1
    assert reader.touched(start, end) == {ORDERS.relation_oid: (start, end - 1)}
    assert reader.transactions(start, end).num_rows == 1


def test_a_warm_plan_looks_at_no_more_in_a_log_of_many_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for segments in (FEW, MANY):
        writer = build(tmp_path / str(segments), segments, monkeypatch)
        reader = LogReader(tmp_path / str(segments))
        plan(reader, segments - 1)
        writer.write([transaction(9000, [(ORDERS, 900_000, "a")])])
        with monkeypatch.context() as patched:
            looks = Looks(patched)
            plan(reader, segments)
        seen.append(looks.counts)
    few, many = seen
    assert (few["open"], few["listdir"]) == (many["open"], many["listdir"])
    assert abs(few["pread"] - many["pread"]) < MORE_DIGITS_BYTES


def test_a_cold_plan_opens_no_more_files_in_a_log_of_many_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    for segments in (FEW, MANY):
        build(tmp_path / str(segments), segments, monkeypatch)
        for start in (0, segments // 2, segments - 1):
            with monkeypatch.context() as patched:
                looks = Looks(patched)
                reader = LogReader(tmp_path / str(segments))
                assert len(reader.plan(start, start + 1)) == 1
                assert reader.shapes().keys() == {"public.orders", "public.quiet"}
            opened.append((looks.counts["open"], looks.counts["pread"]))
    files, data = zip(*opened, strict=True)
    assert len(set(files)) == 1, opened
    assert max(data) - min(data) < MORE_DIGITS_BYTES


def test_an_lsn_is_found_without_a_look_into_every_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "log", MANY, monkeypatch)
    for number in range(MANY):
        for lsn, expected in ((1000 + 10 * number - 1, number), (1000 + 10 * number, number + 1)):
            with monkeypatch.context() as patched:
                looks = Looks(patched)
                assert LogReader(tmp_path / "log").position_after(lsn) == expected
            assert looks.counts["open"] < 30


def test_an_lsn_is_found_behind_segments_in_which_no_transaction_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = build(tmp_path / "log", 3, monkeypatch)
    writer._segment_bytes = 1
    for place in range(5):
        writer.write([transaction(2000, [(ORDERS, place, "a")], first_place=place, ends=place == 4)])
    writer.write([transaction(3000, [(ORDERS, 9, "a")])])
    reader = LogReader(tmp_path / "log")
    assert [reader.position_after(lsn) for lsn in (1020, 1999, 2000, 2999, 3000)] == [3, 3, 8, 8, 9]


def test_what_a_reader_remembers_of_the_segments_follows_rolls_successors_and_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    writer = build(path, FEW, monkeypatch)
    reader = LogReader(path)

    def same_as_a_new_reader() -> bool:
        return reader.extents() == LogReader(path).extents() and reader.first_offset() == LogReader(path).first_offset()

    lsn = iter(range(5000, 6000))
    for step in range(30):
        assert same_as_a_new_reader()
        if step % 5 == 3:
            writer._segment_bytes = 1
        elif step % 7 == 6:
            writer.write([transaction(next(lsn), [(ORDERS, step, "half")], ends=False)])
            writer = LogWriter(path)
        elif step % 11 == 10:
            assert reader.plan(reader.first_offset(), reader.end().end_offset)
            remove(path, plan_removal(path, retention_s=0, max_bytes=0))
        writer.write([transaction(next(lsn), [(ORDERS, step, "b")])])
    assert same_as_a_new_reader()
    assert reader.first_offset() > 0
    assert len(contents(path)) == reader.end().end_offset - reader.first_offset()


def test_a_file_that_is_lost_while_a_reader_remembers_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    build(path, FEW, monkeypatch)
    reader = LogReader(path)
    assert reader.first_offset() == 0
    (path / "segments" / f"{1:020d}-{1:010d}.seg").unlink()
    with pytest.raises(LogCorruptError, match=r"0001-0000000001\.seg: offsets 1 to 2 are missing"):
        reader.plan(1, 2)


def test_only_so_many_headers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "log", MANY, monkeypatch)
    monkeypatch.setattr(reader_module, "_KEPT_BLOCKS", 10)
    reader = LogReader(tmp_path / "log")
    assert len(reader.plan(0, MANY)) == MANY
    assert reader._indexed_blocks == sum(len(index.headers) for index in reader._indexes.values()) == 10
    assert len(reader.plan(0, MANY)) == MANY


def test_a_table_that_goes_back_to_an_earlier_shape_has_that_shape(tmp_path: Path) -> None:
    path = new_log(tmp_path / "log")
    other = replace(ORDERS, replica_identity="f")
    for number, used in enumerate([ORDERS, other, ORDERS, other, other, ORDERS]):
        writer = LogWriter(path) if number % 2 else LogWriter(path, segment_bytes=1)
        writer.write([transaction(200 + number, [(used, number, "a")])])
        assert LogReader(path).shapes() == {"public.orders": used}
