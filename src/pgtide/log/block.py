"""The block: what one flush makes durable.

    header      fixed size: lengths, offsets, the last end LSN, checksums of itself and of the directory
    directory   JSON (tables: byte range, checksum, rows, first and last offset), then transactions as an Arrow stream
    body        one Arrow IPC stream per table and batch layout

A planner that skips a block reads the header alone; one that needs to know what is inside reads the directory; a
reader of one table reads that table's bytes and checks their own checksum.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pgtide.change import TRANSACTIONS, Committed, LargeTransaction, TransactionKind
from pgtide.errors import LogCorruptError
from pgtide.schema import TableShape

MAGIC = b"PTB1"
# magic, flags, directory bytes, body bytes, first offset, end offset, last end LSN, last commit LSN, transactions,
# checksum of the directory; then the checksum of all these
_HEADER = struct.Struct("<4sIQQqqQQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_JSON_LENGTH = struct.Struct("<I")
_ENDS_TRANSACTION = 1  # flag: the last transaction of the block ends in it
_COMPRESS_FROM_BYTES = 4096  # below, zstd's frames cost more than they save
_KNOWN_KINDS = frozenset(int(kind) for kind in TransactionKind)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    directory_bytes: int
    body_bytes: int
    first_offset: int  # next offset before this block
    end_offset: int  # next offset after it
    last_end_lsn: int  # of the last transaction that ends here; 0 if none does
    last_commit_lsn: int
    transactions: int
    directory_checksum: int
    ends_transaction: bool

    @property
    def total_bytes(self) -> int:
        return HEADER_BYTES + self.directory_bytes + self.body_bytes


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Where one table's rows are, relative to the block's start."""

    relation_oid: int
    fingerprint: str
    position: int
    length_bytes: int
    checksum: int
    rows: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class LargeReference:
    """Files in `large/` that hold the rows of the block's one transaction; places in `gone` are not part of it."""

    files: tuple[tuple[str, int], ...]  # names and lengths in bytes
    gone: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Directory:
    tables: tuple[TableEntry, ...]
    transactions: pa.RecordBatch  # schema TRANSACTIONS
    large: LargeReference | None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of which earlier blocks hold the beginning."""

    first_offset: int


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    header: BlockHeader
    data: bytes
    shapes: tuple[TableShape, ...]
    open_transaction: OpenTransaction | None  # what the next block continues


def split_unfinished(pieces: Sequence[Committed]) -> tuple[Sequence[Committed], Sequence[Committed]]:
    """Whole transactions, and the pieces of one that goes on: never in one block, so that a marker is a block's end."""
    cut = len(pieces)
    while cut and not pieces[cut - 1].transactions["ends"][-1].as_py():
        cut -= 1
    unfinished = pieces[cut:]
    assert all(piece.transactions.num_rows == 1 for piece in unfinished), "an open transaction is a piece of its own"
    return pieces[:cut], unfinished


def assign_offsets(
    pieces: Sequence[Committed], next_offset: int, continued: OpenTransaction | None
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """All pieces' transactions as one batch with offsets; a transaction cut between pieces becomes one entry again.

    Also returns, for each piece's transactions in turn, their index in that batch.
    """
    columns = [pa.concat_arrays([piece.transactions[name] for piece in pieces]) for name in TRANSACTIONS.names]
    merged = pa.RecordBatch.from_arrays(columns, schema=TRANSACTIONS)
    changes = merged["changes"].to_numpy()
    ends = merged["ends"].to_numpy(zero_copy_only=False)
    index = np.concatenate(([0], np.cumsum(ends[:-1]))).astype(np.int64)  # a piece after one that did not end: same
    last = np.flatnonzero(np.append(np.diff(index) > 0, True))  # the last piece of each transaction knows its end LSN
    totals = np.bincount(index, weights=changes).astype(np.int64)
    end_offsets = next_offset + np.cumsum(totals)
    first_offsets = end_offsets - totals
    if continued is not None:
        first_offsets[0] = continued.first_offset
    merged = merged.take(pa.array(last)) if len(last) < len(ends) else merged
    for name, values in (("first_offset", first_offsets), ("end_offset", end_offsets), ("changes", totals)):
        merged = merged.set_column(TRANSACTIONS.get_field_index(name), TRANSACTIONS.field(name), pa.array(values))
    return merged, index


def encode_block(pieces: Sequence[Committed], next_offset: int, continued: OpenTransaction | None) -> EncodedBlock:
    """One block of everything in `pieces`, in order: whole transactions, or one that goes on in the next block."""
    transactions, index = assign_offsets(pieces, next_offset, continued)
    holds_reads(transactions)
    first_offsets = transactions["first_offset"].to_numpy()
    entries, streams, position = [], [], 0
    for shape, batches in _runs(pieces, index):
        rows = batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        stream = _ipc_stream(rows)
        offsets = first_offsets[rows["_txn"].to_numpy()] + rows["_place"].to_numpy()
        assert (offsets[1:] > offsets[:-1]).all(), "rows out of order"
        checksum = xxhash.xxh3_64_intdigest(stream)
        entries.append((shape, position, len(stream), checksum, rows.num_rows, int(offsets[0]), int(offsets[-1])))
        streams.append(stream)
        position += len(stream)
    return _assemble(transactions, entries, streams, next_offset)


def holds_reads(transactions: pa.RecordBatch) -> bool:
    """Whether a block has snapshot-read rows: then it has nothing else, so who does not want them can pass over it."""
    reads = transactions["kind"].to_numpy() == TransactionKind.READ
    assert reads.all() or not reads.any(), "reads and commits in one block"
    return bool(reads.any())


def encode_large_block(large: LargeTransaction, files: Sequence[tuple[str, int]], next_offset: int) -> EncodedBlock:
    """The block of a transaction whose rows are in files: it takes an offset for every place, rolled-back ones too."""
    return encode_reference(large.transaction, large.places, LargeReference(tuple(files), large.gone), next_offset)


def encode_reference(
    transaction: pa.RecordBatch, places: int, reference: LargeReference, next_offset: int
) -> EncodedBlock:
    """The block of one transaction, a row of TRANSACTIONS, whose rows are where `reference` says."""
    for name, value in (("first_offset", next_offset), ("end_offset", next_offset + places)):
        column = pa.array([value], pa.int64())
        transaction = transaction.set_column(TRANSACTIONS.get_field_index(name), TRANSACTIONS.field(name), column)
    return _assemble(transaction, [], [], next_offset, reference)


def _runs(pieces: Sequence[Committed], index: npt.NDArray[np.int64]) -> list[tuple[TableShape, list[pa.RecordBatch]]]:
    """Each table's batches, together while their layout is the same.

    A table whose layout changes (a new shape, an old image for the first time) gets another entry from there on, so
    that a table's entries are in the order of its offsets.
    """
    runs: list[tuple[TableShape, list[pa.RecordBatch]]] = []
    newest: dict[int, int] = {}  # relation → its newest run
    base = 0
    for piece in pieces:
        for table in piece.tables:
            if not table.rows.num_rows:
                continue
            rows = _with_transaction_index(table.rows, index[base:])
            run = newest.get(table.shape.relation_oid)
            if run is None or runs[run][0] != table.shape or runs[run][1][0].schema != rows.schema:
                run = newest[table.shape.relation_oid] = len(runs)
                runs.append((table.shape, []))
            runs[run][1].append(rows)
        base += piece.transactions.num_rows
    return runs


def _with_transaction_index(rows: pa.RecordBatch, index: npt.NDArray[np.int64]) -> pa.RecordBatch:
    number = rows.schema.get_field_index("_txn")
    renumbered = index[rows.column(number).to_numpy()].astype(np.uint32)
    return rows.set_column(number, rows.schema.field(number), pa.array(renumbered))


def _ipc_stream(rows: pa.RecordBatch) -> pa.Buffer:
    compression = pa.Codec("zstd", compression_level=1) if rows.nbytes >= _COMPRESS_FROM_BYTES else None
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def _assemble(
    transactions: pa.RecordBatch,
    entries: list[tuple[TableShape, int, int, int, int, int, int]],
    streams: list[pa.Buffer],
    next_offset: int,
    large: LargeReference | None = None,
) -> EncodedBlock:
    tables = [[e[0].relation_oid, e[0].fingerprint, *e[1:]] for e in entries]
    content = {"tables": tables, "large": {"files": large.files, "gone": large.gone} if large else None}
    described = json.dumps(content, separators=(",", ":")).encode()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TRANSACTIONS) as stream:
        stream.write_batch(transactions)
    directory = _JSON_LENGTH.pack(len(described)) + described + sink.getvalue().to_pybytes()
    ends = transactions["ends"].to_numpy(zero_copy_only=False)
    ended = np.flatnonzero(ends)
    last = int(ended[-1]) if len(ended) else -1
    header = BlockHeader(
        directory_bytes=len(directory),
        body_bytes=sum(len(stream) for stream in streams),
        first_offset=next_offset,
        end_offset=transactions["end_offset"][-1].as_py(),
        last_end_lsn=transactions["end_lsn"][last].as_py() if last >= 0 else 0,
        last_commit_lsn=transactions["commit_lsn"][last].as_py() if last >= 0 else 0,
        transactions=transactions.num_rows,
        directory_checksum=xxhash.xxh3_64_intdigest(directory),
        ends_transaction=bool(ends[-1]),
    )
    open_transaction = None if ends[-1] else OpenTransaction(transactions["first_offset"][-1].as_py())
    data = b"".join([_pack_header(header), directory, *(memoryview(stream) for stream in streams)])
    return EncodedBlock(header, data, tuple(e[0] for e in entries), open_transaction)


def outside(places: npt.NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which of the places lie in none of the ranges (from, to exclusive; ascending, disjoint)."""
    if not ranges:
        return np.ones(len(places), np.bool_)
    lows, highs = np.array(ranges, np.int64).T
    index = np.searchsorted(lows, places, side="right") - 1
    return np.asarray((index < 0) | (places >= highs[index]))


def _pack_header(header: BlockHeader) -> bytes:
    packed = _HEADER.pack(
        MAGIC,
        _ENDS_TRANSACTION if header.ends_transaction else 0,
        header.directory_bytes,
        header.body_bytes,
        header.first_offset,
        header.end_offset,
        header.last_end_lsn,
        header.last_commit_lsn,
        header.transactions,
        header.directory_checksum,
    )
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def parse_header(data: bytes, where: str) -> BlockHeader:
    """The header in the first bytes of a block; anything else is corruption at `where`."""
    if len(data) < HEADER_BYTES:
        raise LogCorruptError(f"{where}: a block header of {HEADER_BYTES} bytes is cut off after {len(data)}")
    fields: list[Any]
    magic, flags, *fields = _HEADER.unpack_from(data)
    (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if magic != MAGIC or expected != xxhash.xxh3_64_intdigest(data[: _HEADER.size]):
        raise LogCorruptError(f"{where}: not a valid block header (wrong magic or checksum)")
    if flags & ~_ENDS_TRANSACTION:
        raise LogCorruptError(
            f"{where}: the block has flags {flags:#x} that this version does not understand",
            remedy="read this log with the pgtide version that wrote it, or a newer one",
        )
    fields.append(bool(flags & _ENDS_TRANSACTION))
    return BlockHeader(*fields)


def parse_directory(data: bytes, header: BlockHeader, where: str) -> Directory:
    """The directory from its bytes, checked against the header's checksum."""
    if len(data) != header.directory_bytes or xxhash.xxh3_64_intdigest(data) != header.directory_checksum:
        raise LogCorruptError(f"{where}: the block's directory does not match its checksum")
    (length,) = _JSON_LENGTH.unpack_from(data)
    described: dict[str, Any] = json.loads(data[_JSON_LENGTH.size : _JSON_LENGTH.size + length])
    body = HEADER_BYTES + header.directory_bytes
    tables = tuple(TableEntry(oid, fp, body + pos, *rest) for oid, fp, pos, *rest in described["tables"])
    with pa.ipc.open_stream(pa.py_buffer(data)[_JSON_LENGTH.size + length :]) as stream:
        transactions = stream.read_next_batch()
    if unknown := set(transactions["kind"].to_pylist()) - _KNOWN_KINDS:
        raise LogCorruptError(
            f"{where}: transactions of kind {sorted(unknown)}, which this version does not know",
            remedy="read this log with the pgtide version that wrote it, or a newer one",
        )
    large = described["large"]
    if large is None:
        return Directory(tables, transactions, None)
    files = tuple((name, length) for name, length in large["files"])
    return Directory(tables, transactions, LargeReference(files, tuple((low, high) for low, high in large["gone"])))


def decode_rows(
    data: bytes, entry: TableEntry, where: str, wanted: Callable[[str], bool] | None = None
) -> pa.RecordBatch:
    """A table's rows from its byte range, checked against the checksum in the directory.

    `wanted` tells by name which columns; the others are not even decompressed.
    """
    if len(data) != entry.length_bytes or xxhash.xxh3_64_intdigest(data) != entry.checksum:
        raise LogCorruptError(f"{where}: rows of relation {entry.relation_oid} do not match their checksum")
    buffer, options = pa.py_buffer(data), pa.ipc.IpcReadOptions()
    if wanted is not None:
        with pa.ipc.open_stream(buffer) as stream:
            options.included_fields = [place for place, name in enumerate(stream.schema.names) if wanted(name)]
    with pa.ipc.open_stream(buffer, options=options) as stream:
        return stream.read_next_batch()
