"""Redo logs in the log of changes: what was committed is there, in order, once; what was taken back is not."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgtide.errors import DecodeError, LogError, PgtideError
from pgtide.log.check import check_log
from pgtide.log.reader import LogReader
from pgtide.redo.files import file_of, numbers, record_files
from pgtide.redo.generator import TABLES, History
from pgtide.redo.reader import Limits, RedoReader
from pgtide.redo.records import Operation, Record
from pgtide.spark import register
from tests.redo.recording import TIGHT, expected, found, recorded, remove_passed
from tests.transactions.rows import quick_disk
from tests.waiting import wait_for

ORDERS = TABLES[0]
DDL = Record(1, Operation.DDL, table=ORDERS)
XID = "0001000200000003"


def start(xid: str = XID) -> Record:
    return Record(2, Operation.START, xid)


def insert(key: int, xid: str = XID, **values: object) -> Record:
    row = {"ID": key, "TOTAL": "1.50", "NOTE": None} | values
    return Record(3, Operation.INSERT, xid, data_obj=ORDERS["data_obj"], row_id=f"R{key}", new=row)


def undo(key: int, xid: str = XID) -> Record:
    return Record(4, Operation.DELETE, xid, data_obj=ORDERS["data_obj"], row_id=f"R{key}", rollback=True, old={})


def commit(xid: str = XID) -> Record:
    return Record(5, Operation.COMMIT, xid, timestamp_us=1_700_000_000_000_000)


def read(folder: Path, *records: Record, limits: Limits = TIGHT) -> list[int]:
    """Keys in the log, after reading these."""
    record_files(records, folder / "redo", 1000)
    reader = RedoReader(folder / "redo", folder / "log", limits=limits)
    reader.read_all()
    reader.close()
    return [values["ID"] for _, _, values, _ in found(folder / "log")]


@pytest.mark.parametrize("limits", [TIGHT, Limits()], ids=["tight", "ample"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_recording_comes_out_as_the_generator_says(seed: int, limits: Limits) -> None:
    with quick_disk() as folder:
        history = recorded(folder / "redo", seed, 1200)
        RedoReader(folder / "redo", folder / "log", limits=limits).read_all()
        assert found(folder / "log") == expected(history)
        assert check_log(folder / "log").problems == []
        assert any((folder / "log" / "large").glob("*")) == (limits is TIGHT)
        assert {file.name for file in (folder / "log" / "spool").iterdir()} == {"lock", "position.json"}


def test_histories_have_what_they_should(tmp_path: Path) -> None:
    history = History(3, 1500)
    records = list(history.records())
    undone = [record for record in records if record.rollback]
    ends = {record.xid: place for place, record in enumerate(records) if record.operation is Operation.COMMIT}
    starts = {record.xid: place for place, record in enumerate(records) if record.operation is Operation.START}
    assert {record.operation for record in undone} == {Operation.INSERT, Operation.UPDATE, Operation.DELETE}
    assert {record.xid for record in undone} & set(ends), "savepoints of transactions that commit"
    assert any(record.operation is Operation.ROLLBACK for record in records)
    assert max(ends[xid] - starts[xid] for xid in ends) > 1000, "some go on for long"
    assert len({record.scn for record in records}) < len(records)


def test_files_may_go_as_soon_as_the_position_has_passed_them(tmp_path: Path) -> None:
    """Reading stops and starts again at every file, and never needs one that is gone."""
    history = recorded(tmp_path / "redo", 4, 600, records_per_file=100)
    rest = tmp_path / "later"
    (tmp_path / "redo").rename(rest)
    (tmp_path / "redo").mkdir()
    for number in numbers(rest):
        file_of(rest, number).rename(file_of(tmp_path / "redo", number))
        reader = RedoReader(
            tmp_path / "redo",
            tmp_path / "log",
            limits=Limits(memory_bytes=20_000, piece_bytes=4_000),
            on_position=lambda lsn: remove_passed(tmp_path / "redo", lsn),
        )
        reader.read_all()
        reader.close()
        assert len(numbers(tmp_path / "redo")) == 1
    assert found(tmp_path / "log") == expected(history)


def test_a_row_is_undone_newest_change_first(tmp_path: Path) -> None:
    update = Record(3, Operation.UPDATE, XID, data_obj=ORDERS["data_obj"], row_id="R1", new={"ID": 1}, old={"ID": 1})
    back = Record(4, Operation.UPDATE, XID, data_obj=ORDERS["data_obj"], row_id="R1", rollback=True, new={"ID": 1})
    assert read(tmp_path, DDL, start(), insert(1), update, update, back, insert(2), commit()) == [1, 1, 2]


def test_undo_records_may_come_in_another_order_than_the_changes(tmp_path: Path) -> None:
    changes = [insert(key) for key in range(6)]
    assert read(tmp_path, DDL, start(), *changes, undo(2), undo(5), undo(3), commit()) == [0, 1, 4]


def test_transactions_are_told_apart_by_the_whole_of_their_ids(tmp_path: Path) -> None:
    one, two = "0001000200000003", "0009000200000003"
    records = [start(one), start(two), insert(1, one), insert(2, two), Record(5, Operation.ROLLBACK, one), commit(two)]
    assert read(tmp_path, DDL, *records) == [2]


def test_scn_and_id_are_kept_with_the_transaction(tmp_path: Path) -> None:
    read(tmp_path, DDL, start(), insert(1), commit())
    (extra,) = LogReader(tmp_path / "log").transactions(0, 1)["extra"].to_pylist()
    assert json.loads(extra) == {"scn": 5, "xid": XID}


def test_a_table_that_changes_has_its_new_shape_from_then_on_and_after_a_restart(tmp_path: Path) -> None:
    wider = ORDERS | {"columns": [*ORDERS["columns"], {"id": 4, "name": "WHERE", "type": "VARCHAR2(10)"}]}
    read(tmp_path, DDL, start(), insert(1), Record(3, Operation.DDL, table=wider), insert(2, WHERE="here"))
    reader = RedoReader(tmp_path / "redo", tmp_path / "log")
    with file_of(tmp_path / "redo", 1).open("ab") as file:
        file.write(insert(3, WHERE="there").encode() + commit().encode())
    reader.read_all()
    rows = [values for _, _, values, _ in found(tmp_path / "log")]
    assert [row.get("WHERE", "no such column") for row in rows] == ["no such column", "here", "there"]


def test_a_line_that_is_being_written_is_awaited(tmp_path: Path) -> None:
    assert read(tmp_path, DDL, start(), insert(1)) == []
    file = file_of(tmp_path / "redo", 1)
    reader, stop = RedoReader(tmp_path / "redo", tmp_path / "log"), threading.Event()
    before, line = reader.position, commit().encode()
    with file.open("ab") as half:
        half.write(line[:10])
    reader.read_all()
    assert reader.position == before
    thread = threading.Thread(target=reader.run, args=[stop])
    thread.start()
    try:
        with file.open("ab") as rest:
            rest.write(line[10:])
        wait_for(lambda: reader.position > before, what="the rest to be read")
        record_files([start(), insert(2), commit()], tmp_path / "next", 1000)
        file_of(tmp_path / "next", 1).rename(file_of(tmp_path / "redo", 2))
        wait_for(lambda: reader.position >> 32 == 2, what="the next file to be read")
    finally:
        stop.set()
        thread.join(20)
    assert [values["ID"] for _, _, values, _ in found(tmp_path / "log")] == [1, 2]


def test_a_file_that_is_gone_too_early_is_named(tmp_path: Path) -> None:
    read(tmp_path, DDL, start(), insert(1))
    reader = RedoReader(tmp_path / "redo", tmp_path / "log")
    file_of(tmp_path / "redo", 1).unlink()
    with pytest.raises(LogError, match=r"redo-0000000001\.jsonl is gone"):
        reader.read_all()


def test_a_read_position_that_is_lost_with_the_first_files_is_an_error(tmp_path: Path) -> None:
    read(tmp_path, DDL, start(), insert(1), commit())
    (tmp_path / "log" / "spool" / "position.json").unlink()
    reader = RedoReader(tmp_path / "redo", tmp_path / "log")
    reader.read_all()
    reader.close()
    assert [values["ID"] for _, _, values, _ in found(tmp_path / "log")] == [1], "all files are there: read again"
    (tmp_path / "log" / "spool" / "position.json").unlink()
    file_of(tmp_path / "redo", 1).rename(file_of(tmp_path / "redo", 2))
    with pytest.raises(LogError, match="read position is lost"):
        RedoReader(tmp_path / "redo", tmp_path / "log")


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([start(), insert(1)], "table number 73001"),
        ([DDL, start(), insert(1), undo(9)], "R9"),
        ([DDL, insert(1), commit()], "not begun"),
        ([DDL, start(), insert(1, TOTAL="much"), commit()], r"SHOP\.ORDERS, column TOTAL"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_what(records: list[Record], told: str, tmp_path: Path) -> None:
    with pytest.raises(PgtideError, match=told):
        read(tmp_path, *records)


@pytest.mark.parametrize(
    "line", [b"{", b"{}", b'{"scn": 1, "operation": "DANCE"}', b'{"scn": 1, "operation": "START"}']
)
def test_a_line_that_is_no_record_is_named_with_its_place(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "redo").mkdir()
    file_of(tmp_path / "redo", 1).write_bytes(DDL.encode() + line + b"\n")
    reader = RedoReader(tmp_path / "redo", tmp_path / "log")
    with pytest.raises(DecodeError, match=rf"redo-0000000001\.jsonl at byte {len(DDL.encode())}"):
        reader.read_all()


def test_a_second_reader_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    record_files([DDL, start(), insert(1), commit()], tmp_path / "redo", 1000)
    reader = RedoReader(tmp_path / "redo", tmp_path / "log")
    with pytest.raises(PgtideError, match="in use by another reader"):
        RedoReader(tmp_path / "redo", tmp_path / "log")
    reader.read_all()
    reader.close()
    assert [values["ID"] for _, _, values, _ in found(tmp_path / "log")] == [1]
    RedoReader(tmp_path / "redo", tmp_path / "log").close()


def test_a_log_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    read(tmp_path, DDL)
    with pytest.raises(LogError, match=r"'redo'.*'other'"):
        RedoReader(tmp_path / "redo", tmp_path / "log", database="other")


def test_spark_reads_what_came_from_redo_logs(tmp_path: Path, spark: SparkSession) -> None:
    read(tmp_path, DDL, start(), insert(1, NOTE="one"), insert(2), undo(2), commit())
    register(spark)
    changes = spark.read.format("pgtide").option("path", str(tmp_path / "log")).option("table", "SHOP.ORDERS").load()
    (row,) = changes.collect()
    assert (row.ID, str(row.TOTAL), row.NOTE, row._change_type) == (1, "1.50", "one", "insert")
