"""Many small objects into one: beside the writer, by copying blocks as they are.

A flush every second makes 86,400 objects a day, and readers would spend their time asking for them one by one.  A run
of neighbours of one level becomes one object of the next, which has the same blocks and so the same rows under the
same offsets, and all block headers in front, so that planning takes one request.  Whoever merges needs no permission:
two who merge the same run make the same object, and overlapping ones have the same rows where they overlap.  The
originals stay for a while (`layout.GRACE_S`), then retention takes them.

Only what is young is merged: the age of an object is the store's, so what is merged lives longer than it should, by
`_YOUNG_S` for each level at most.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from pgtide.errors import LogCorruptError
from pgtide.failpoints import declare, reach
from pgtide.log.block import HEADER_BYTES
from pgtide.log.objects.contents import ObjectContents, read_object
from pgtide.log.objects.layout import ObjectLayout
from pgtide.log.objects.names import ObjectName
from pgtide.log.segment import FOLDER, INDEXED, Extent, SegmentHeader
from pgtide.log.storage import Storage

RUN = 32  # so many neighbours become one object
_SMALL_BYTES = 4 << 20  # larger ones stay as they are
_MERGED_BYTES = 16 << 20  # a run that is large enough need not be long; also what merging takes of memory
_YOUNG_S = 3600.0
_ROUND_MAX = 8  # objects made in one call

_STORED = declare("log.merge.stored", "a merged object is stored beside those that it was merged from")


def merge(storage: Storage, now_s: float | None = None) -> int:
    """Merges what can be merged now, up to a limit; returns how many objects it made."""
    now_s = time.time() if now_s is None else now_s
    layout = ObjectLayout(storage)
    runs = list(itertools.islice(_runs(layout, layout.look().extents, now_s), _ROUND_MAX))
    return sum(_merge_run(storage, run) for run in runs)


def _runs(layout: ObjectLayout, extents: Sequence[Extent], now_s: float) -> Iterator[list[Extent]]:
    """Neighbours of one level that are small and young, as many as make a whole run."""
    run: list[Extent] = []
    run_bytes = 0
    for extent in extents:
        assert isinstance(extent.name, ObjectName)
        stored = layout.stored(extent)
        fits = stored.nbytes < _SMALL_BYTES and now_s - stored.modified_s < _YOUNG_S and extent.begins is None
        if not fits or (run and _level(run[0]) != extent.name.level):
            run, run_bytes = [], 0
        if not fits:
            continue
        run.append(extent)
        run_bytes += stored.nbytes
        if len(run) == RUN or (run_bytes >= _MERGED_BYTES and len(run) > 1):
            yield run
            run, run_bytes = [], 0


def _level(extent: Extent) -> int:
    assert isinstance(extent.name, ObjectName)
    return extent.name.level


def _merge_run(storage: Storage, run: Sequence[Extent]) -> bool:
    contents: list[ObjectContents] = []
    for extent in run:
        assert isinstance(extent.name, ObjectName)
        found = read_object(storage, extent.name)
        if found is None:
            return False  # retention was faster
        if not found.headers or found.headers[-1].end_offset != extent.end_offset:
            raise LogCorruptError(f"{storage.location}/{found.name}: does not end at offset {extent.end_offset}")
        contents.append(found)
    name = ObjectName(run[0].first_offset, run[-1].end_offset, _level(run[0]) + 1)
    storage.create(f"{FOLDER}/{name}", _merged(contents))  # or somebody else has made the same
    reach(_STORED)
    return True


def _merged(contents: Sequence[ObjectContents]) -> bytes:
    index = b"".join(_block_headers(content) for content in contents)
    first = contents[0].header
    header = SegmentHeader(
        first_offset=first.first_offset,
        epoch=first.epoch,
        timeline=first.timeline,
        previous=first.previous,
        writer=first.writer,
        must_understand=(INDEXED,),
        index_bytes=len(index),
    )
    return b"".join([header.encode(), index, *(content.blocks for content in contents)])


def _block_headers(content: ObjectContents) -> bytes:
    positions = itertools.accumulate((header.total_bytes for header in content.headers[:-1]), initial=0)
    return b"".join(content.blocks[position : position + HEADER_BYTES] for position in positions)
