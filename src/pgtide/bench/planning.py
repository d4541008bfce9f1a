"""`pgtide bench planning`: what it takes to plan a batch when the log has 10, 100, 1,000 and 10,000 segments.

Warm is what the mirror and a streaming query do all day: new transactions are in the log, where does the next batch
end, which rows are in it, which transactions.  Cold is the same in a process that has just started.  Besides: finding
the place of an LSN, and the shapes of all tables, both cold.  No Postgres is needed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pgtide.bench.result import Result
from pgtide.change import TRANSACTIONS, Committed, Op, TableRows, TransactionKind
from pgtide.log.block import encode_block
from pgtide.log.identity import LogIdentity, create_identity
from pgtide.log.marker import Marker, MarkerFile
from pgtide.log.reader import LogReader
from pgtide.log.segment import SegmentHeader, SegmentName
from pgtide.log.shapes import ShapeStore
from pgtide.log.writer import LogWriter
from pgtide.schema import Column, TableShape, storage_schema
from pgtide.types import PgType

_SEGMENTS = (10, 100, 1000, 10_000)
_BLOCKS = 4  # per segment
_ROWS = 10  # per block and table
_BATCHES = 50
_COLD = 7
_COLUMNS = (Column(1, "id", PgType(20, "int8"), key=True, not_null=True), Column(2, "note", PgType(25, "text")))
_TABLES = tuple(TableShape(20_000 + n, "public", f"table{n}", "d", _COLUMNS) for n in range(3))
_QUIET = TableShape(30_000, "public", "quiet", "d", _COLUMNS)  # has no change at all


def planning(small: bool) -> Result:
    result = Result("planning")
    for segments in _SEGMENTS[:2] if small else _SEGMENTS:
        print(f"{segments} segments", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="pgtide-bench-") as folder:
            _measure(_build(Path(folder) / "log", segments), segments, result)
    return result


def _measure(path: Path, segments: int, result: Result) -> None:
    reader, writer = LogReader(path), LogWriter(path)
    warm = []
    for number in range(_BATCHES + 1):
        start = reader.end().end_offset
        writer.write([_transaction(1 << 40 | number * 16)])
        warm.append(_milliseconds(_plan_batch, reader, start))
    _add(result, "warm", segments, warm[1:])
    middle_lsn = segments // 2 * _BLOCKS * 16
    cold: dict[str, Callable[[], object]] = {
        "cold_newest": lambda: _plan_batch(LogReader(path), start),
        "cold_oldest": lambda: _plan_batch(LogReader(path), 0),
        "cold_position": lambda: LogReader(path).position_after(middle_lsn),
        "cold_shapes": lambda: LogReader(path).shapes(),
    }
    for name, work in cold.items():
        _add(result, name, segments, [_milliseconds(work) for _ in range(_COLD)])
    writer.close()


def _add(result: Result, name: str, segments: int, measured: Sequence[tuple[float, float]]) -> None:
    passed_ms, cpu_ms = zip(*measured, strict=True)
    result.add_figure(f"{name}_ms_{segments}", passed_ms)
    result.add_figure(f"{name}_cpu_ms_{segments}", cpu_ms)


def _milliseconds(work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """How long it took, and how much of a core: on a busy machine the second says more."""
    began, cpu = time.perf_counter(), time.process_time()
    work(*arguments)
    return (time.perf_counter() - began) * 1000, (time.process_time() - cpu) * 1000


def _plan_batch(reader: LogReader, start: int) -> None:
    end = reader.boundary(start, 1000, 1 << 20)
    assert end > start
    assert reader.plan(start, end)
    assert reader.plan(start, end, _TABLES[0].relation_oid)
    assert reader.transactions(start, end).num_rows


def _build(path: Path, segments: int) -> Path:
    """A log as a writer leaves it, without its fsyncs: they would take most of an hour."""
    identity = create_identity(path, LogIdentity("7000", "bench", 1, "pgtide", start_lsn=1))
    shapes, offset, lsns = ShapeStore(path), 0, itertools.count(16, 16)
    for shape in (*_TABLES, _QUIET):
        shapes.save(shape, 0)
    marker = MarkerFile.take(path / "control")
    (path / "segments").mkdir()
    end = Marker()
    for _ in range(segments):
        name = SegmentName(offset, marker.epoch)
        data = [SegmentHeader(offset, marker.epoch, identity.timeline, previous="").encode()]
        for _ in range(_BLOCKS):
            block = encode_block([_transaction(next(lsns))], offset, None)
            data.append(block.data)
            offset, lsn = block.header.end_offset, block.header.last_end_lsn
        (path / "segments" / str(name)).write_bytes(b"".join(data))
        end = Marker(0, name.first_offset, name.epoch, sum(map(len, data)), offset, lsn, lsn)
    marker.record(end, durably=True)
    marker.close()
    return path


def _transaction(end_lsn: int) -> Committed:
    tables = []
    for number, shape in enumerate(_TABLES):
        places = number * _ROWS + np.arange(_ROWS)
        columns = [
            pa.array(np.full(_ROWS, int(Op.INSERT), np.uint8)),
            pa.array(places),
            pa.array(np.zeros(_ROWS, np.uint32)),
            pa.array(places + end_lsn),
            pa.array([f"note {place}" for place in places.tolist()]),
        ]
        tables.append(TableRows(shape, pa.RecordBatch.from_arrays(columns, schema=storage_schema(shape))))
    entry = {
        "kind": int(TransactionKind.COMMIT), "xid": 7, "commit_lsn": end_lsn - 8, "end_lsn": end_lsn,
        "commit_timestamp": 1_700_000_000_000_000, "first_offset": 0, "end_offset": 0,
        "changes": _ROWS * len(_TABLES), "ends": True, "origin": None, "extra": None,
    }  # fmt: skip
    return Committed(pa.RecordBatch.from_pylist([entry], schema=TRANSACTIONS), tuple(tables))
