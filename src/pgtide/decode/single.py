"""One value from what Postgres prints of it, as the log stores it: for values that the catalog has, not the stream."""

from __future__ import annotations

import numpy as np

from pgtide.decode.cells import Cells, Values, Views
from pgtide.decode.codecs import codec_of
from pgtide.decode.frames import PAD
from pgtide.types import PgType


def decode_text(pg_type: PgType, text: str) -> Values:
    """A column of one row."""
    data = text.encode()
    cells = Cells(Views(data + bytes(PAD)), np.zeros(1, np.int64), np.array([len(data)], np.int64), None)
    return codec_of(pg_type).text(cells)
