"""Complete protocol messages, laid out in one buffer: what every decoder here reads.

Whoever receives bytes finds where messages begin and end (libpq does, or a walk over the raw socket's
buffer); the decoders only ever see whole messages.  The padding lets them gather a value of any width at
any place in the buffer without asking first whether it would end behind the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAD = 64  # readable bytes behind the last message


@dataclass(frozen=True, slots=True)
class Frames:
    """Messages `buffer[starts[i]:ends[i]]`, in the order of their arrival, none overlapping another.

    A message is the payload of a CopyData: it begins with `w` or `k` in a replication stream, with the
    number of fields in a binary COPY.  Decoders copy what they keep: the buffer may be used again afterwards.
    """

    buffer: bytearray  # at least PAD bytes longer than the last end
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @staticmethod
    def from_messages(messages: Sequence[bytes | memoryview]) -> Frames:
        """Messages as libpq hands them out, one object each."""
        lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        ends = np.cumsum(lengths)
        return Frames(bytearray().join([*messages, bytes(PAD)]), ends - lengths, ends)
