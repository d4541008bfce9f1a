"""A damaged log: an error that names file and place, never other rows, never silence; and `check` says what to do.

Every kind of byte is flipped, every kind of file removed, cut or exchanged.  A capture that starts on a log whose end
is damaged touches nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pgtide.change import LargeTransaction
from pgtide.errors import LogCorruptError, LogError
from pgtide.log.block import HEADER_BYTES
from pgtide.log.check import check_log
from pgtide.log.reader import LogReader
from pgtide.log.segment import parse_segment_header
from pgtide.log.writer import LogWriter
from pgtide.transactions.buffer import Commit, TransactionBuffer
from pgtide.transactions.spool import Spool
from tests.log.building import contents, new_log, shape, transaction

ORDERS = shape()
ITEMS = shape(16400, "items")
CHANGES = 65


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, three segments of one or two blocks with two tables, one transaction in a file of its own."""
    path = new_log(tmp_path_factory.mktemp("pristine") / "log")
    writer = LogWriter(path)
    writer.write([transaction(200, [(ORDERS, n, f"note {n}" * 20) for n in range(40)])])
    writer.write([transaction(210, [(ORDERS, n, "a") for n in range(5)] + [(ITEMS, n, "b") for n in range(5)])])
    writer.close()
    writer = LogWriter(path, segment_bytes=1)
    writer.write_large(_spooled(path.parent / "spool", 220))
    writer.write([transaction(230, [(ORDERS, n, "c") for n in range(5)])])
    writer.close()
    return path


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "log"))


def _spooled(folder: Path, end_lsn: int) -> LargeTransaction:
    buffer = TransactionBuffer(Spool(folder), memory_bytes=1)
    buffer.begin(7)
    buffer.append(7, np.full(10, 7, np.uint32), transaction(end_lsn, [(ITEMS, n, "large") for n in range(10)]).tables)
    large = buffer.commit(7, Commit(end_lsn - 8, end_lsn, 0))
    assert isinstance(large, LargeTransaction)
    return large


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


def markers(path: Path) -> list[Path]:
    return sorted((path / "control").glob("marker-*"))


def large_file(path: Path) -> Path:
    (file,) = (path / "large").iterdir()
    return file


def shape_file(path: Path) -> Path:
    return path / "schemas" / str(ITEMS.relation_oid) / f"{ITEMS.fingerprint}.json"


def listed(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def regions(path: Path) -> Iterator[tuple[Path, str, int, int]]:
    """Every part of every segment and large file: which it is, where it begins and ends."""
    log = LogReader(path)
    for extent in log.extents():
        file = path / "segments" / str(extent.name)
        yield file, "segment header", 0, parse_segment_header(file.read_bytes(), "")[1]
        for block in log.blocks_of(extent):
            body = block.position + HEADER_BYTES + block.header.directory_bytes
            yield file, "block header", block.position, block.position + HEADER_BYTES
            yield file, "directory", block.position + HEADER_BYTES, body
            for entry in log.directory(block).tables:
                yield (
                    file,
                    "rows",
                    block.position + entry.position,
                    block.position + entry.position + entry.length_bytes,
                )
    for piece in log.plan(0, CHANGES):
        if piece.large is not None:
            begin = piece.position + piece.entry.position
            yield path / piece.segment, "block header", piece.position, piece.position + HEADER_BYTES
            yield path / piece.segment, "directory", piece.position + HEADER_BYTES, begin
            yield path / piece.segment, "rows", begin, begin + piece.entry.length_bytes


def flipped(data: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


def test_the_undamaged_log_is_fine(path: Path) -> None:
    assert len(contents(path)) == CHANGES
    result = check_log(path)
    assert (result.changes, result.transactions, result.problems) == (CHANGES, 4, [])


def test_every_byte_belongs_to_a_region_and_a_flipped_bit_in_any_is_found_by_readers_and_by_check(path: Path) -> None:
    covered: dict[Path, int] = {}
    for file, _, begin, end in regions(path):
        covered[file] = covered.get(file, 0) + end - begin
    assert covered == {file: file.stat().st_size for file in [*segments(path), large_file(path)]}
    for file, what, begin, end in regions(path):
        pristine = file.read_bytes()
        step = max(1, (end - begin) // (20 if what.endswith("header") else 6))
        for number, position in enumerate([*range(begin, end, step), end - 1]):
            file.write_bytes(flipped(pristine, position, number % 8))
            with pytest.raises(LogCorruptError, match=f"{file.name} at byte ") as error:
                contents(path)
            assert error.value.remedy, f"{what} at byte {position}"
            problems = check_log(path).problems
            assert any(f"{file.name} at byte " in problem.what for problem in problems), f"{what} at byte {position}"
            assert all("restore the file" in problem.remedy for problem in problems)
        file.write_bytes(pristine)
    assert check_log(path).problems == []


def test_check_goes_on_behind_a_damaged_block_and_names_what_is_lost_and_to_whom(path: Path) -> None:
    first, second = [region for region in regions(path) if region[1] == "rows"][:2]
    for file, _, begin, _ in (first, second):
        file.write_bytes(flipped(file.read_bytes(), begin, 0))
    (path / "readers").mkdir()
    (path / "readers" / "mirror.json").write_text(json.dumps({"offset": 43}))
    result = check_log(path)
    assert result.changes == CHANGES - 40 - 5
    passed, needed = result.problems
    assert (passed.first_offset, passed.end_offset) == (0, 40)
    assert "every registered reader has passed offsets 0 to 40" in passed.remedy
    assert "pgtide log prune" in passed.remedy
    assert (needed.first_offset, needed.end_offset) == (40, 45)
    assert "mirror (at 43) still needs offsets 40 to 45: restore the file" in needed.remedy


def test_one_damaged_slot_of_the_marker_is_reported_and_costs_nothing(path: Path) -> None:
    marker = markers(path)[-1]
    pristine = marker.read_bytes()
    for slot in (0, 4096):
        for position in range(slot, slot + 72, 5):
            marker.write_bytes(flipped(pristine, position, position % 8))
            assert LogReader(path).end().end_offset in (60, CHANGES), "the end of a transaction"
            (problem,) = check_log(path).problems
            assert problem.what.startswith(f"{marker} at byte {slot}: ")
            assert "start the capture" in problem.remedy
        newest = max((0, 4096), key=lambda at: pristine[at + 8 : at + 16])
        marker.write_bytes(flipped(pristine, newest, 0))
    successor = LogWriter(path)
    assert (successor.end_offset, successor.durable_lsn) == (CHANGES, 230)
    assert len(contents(path)) == CHANGES


def test_bytes_behind_the_slots_of_the_marker_mean_nothing(path: Path) -> None:
    marker = markers(path)[-1]
    marker.write_bytes(flipped(flipped(marker.read_bytes(), 1000, 0), 8000, 0))
    assert len(contents(path)) == CHANGES
    assert check_log(path).problems == []


def remove(file: Path) -> Path:
    file.unlink()
    return file


def cut(file: Path, length: int) -> Path:
    file.write_bytes(file.read_bytes()[:length])
    return file


def exchange(path: Path) -> Path:
    first, second, _ = segments(path)
    pristine = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(pristine)
    return first


def rename_column(path: Path) -> Path:
    file = shape_file(path)
    file.write_text(file.read_text().replace('"note"', '"nota"'))
    return file


def remove_all(files: list[Path]) -> Path:
    for file in files:
        file.unlink()
    return files[0].parent


def region(path: Path, number: int, kind: str) -> tuple[int, int]:
    begin, end = next((r[2], r[3]) for r in regions(path) if r[0] == segments(path)[number] and r[1] == kind)
    return begin, end


# What is done to the log; the file that must be named.
ANYWHERE: dict[str, Callable[[Path], Path]] = {
    "first segment missing": lambda path: remove(segments(path)[0]).parent,
    "middle segment missing": lambda path: (remove(segments(path)[1]), segments(path)[0])[1],
    "cut in a segment header": lambda path: cut(segments(path)[0], 20),
    "cut behind a segment header": lambda path: cut(segments(path)[0], region(path, 0, "segment header")[1]),
    "cut in a block header": lambda path: cut(segments(path)[0], region(path, 0, "block header")[1] - 1),
    "cut in a directory": lambda path: cut(segments(path)[0], region(path, 0, "directory")[1] - 1),
    "cut in rows": lambda path: cut(segments(path)[0], region(path, 0, "rows")[1] - 1),
    "cut between blocks": lambda path: cut(segments(path)[0], region(path, 0, "rows")[1]),
    "segments exchanged": exchange,
    "large file missing": lambda path: remove(large_file(path)),
    "large file cut": lambda path: cut(large_file(path), 100),
    "shape missing": lambda path: remove(shape_file(path)),
    "shape cut": lambda path: cut(shape_file(path), 30),
    "shape changed": rename_column,
}
AT_THE_END: dict[str, Callable[[Path], Path]] = {
    "last segment missing": lambda path: remove(segments(path)[-1]),
    "last segment cut": lambda path: cut(segments(path)[-1], region(path, 2, "rows")[1] - 1),
    "all segments missing": lambda path: remove_all(segments(path)),
    "newest marker missing": lambda path: remove(markers(path)[-1]).parent,
    "all markers missing": lambda path: remove_all(markers(path)),
    "newest marker empty": lambda path: cut(markers(path)[-1], 0),
}


def read_everything(path: Path) -> None:
    LogReader(path).shapes()
    contents(path)


@pytest.mark.parametrize("damage", [*ANYWHERE, *AT_THE_END])
def test_what_is_missing_cut_or_exchanged_is_an_error_for_readers_and_found_by_check(damage: str, path: Path) -> None:
    file = (ANYWHERE | AT_THE_END)[damage](path)
    with pytest.raises(LogCorruptError, match=file.name) as error:
        read_everything(path)
    assert "pgtide log check" in error.value.remedy
    problems = check_log(path).problems
    assert any(file.name in problem.what for problem in problems), problems
    assert all("restore the file" in problem.remedy for problem in problems)


@pytest.mark.parametrize("damage", ANYWHERE)
def test_the_capture_goes_on_at_an_end_that_is_whole(damage: str, path: Path) -> None:
    ANYWHERE[damage](path)
    successor = LogWriter(path)
    successor.write([transaction(300, [(ITEMS, 99, "new")])])
    log = LogReader(path)
    (piece,) = log.plan(CHANGES, CHANGES + 1)
    assert log.read(piece).rows["c1"].to_pylist() == [99]


@pytest.mark.parametrize("damage", AT_THE_END)
def test_the_capture_touches_nothing_of_a_log_whose_end_is_damaged(damage: str, path: Path) -> None:
    file = AT_THE_END[damage](path)
    before = listed(path)
    with pytest.raises(LogCorruptError) as error:
        LogWriter(path)
    assert file.name in error.value.what or "segments" in error.value.what
    assert listed(path) == before


def test_a_capture_mends_the_shape_that_it_uses(path: Path) -> None:
    cut(shape_file(path), 30)
    successor = LogWriter(path)
    successor.record_shape(ITEMS)
    assert LogReader(path).shapes()["public.items"] == ITEMS
    assert check_log(path).problems == []


@pytest.mark.parametrize("file", ["log.json", "control/removed.json"])
def test_a_cut_note_is_an_error_that_names_the_file(file: str, path: Path) -> None:
    (path / file).write_text('{"end_offset": 1')
    with pytest.raises(LogError, match=file.rsplit("/", maxsplit=1)[-1]):
        LogReader(path).plan(0, 1, ORDERS.relation_oid)


def test_a_torn_tail_of_any_length_is_left_behind(path: Path, tmp_path: Path) -> None:
    writer = LogWriter(path)
    before = shutil.copytree(path, tmp_path / "before")
    writer.write([transaction(300, [(ORDERS, 1, "torn")])])
    last = segments(path)[-1]
    whole = last.read_bytes()
    begin = parse_segment_header(whole, "")[1]
    for length in [0, 5, begin, begin + 1, begin + HEADER_BYTES, *range(begin + 100, len(whole), 400), len(whole)]:
        log = shutil.copytree(before, tmp_path / f"torn at {length}")
        (log / "segments" / last.name).write_bytes(whole[:length])
        expected = CHANGES + 1 if length == len(whole) else CHANGES
        assert LogWriter(log).end_offset == expected, f"{length} bytes"
        assert len(contents(log)) == expected
