"""Frames are found where they are, whatever is in them, and wherever the buffer ends."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgtide.replication import frame_walk
from pgtide.replication.frame_walk import frame_bounds

PADDING = bytes(64)
LOOKS_LIKE_A_FRAME = b"d\0\0\0\x09wxyz\0d\0\0\0\x04"
PAYLOADS = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", LOOKS_LIKE_A_FRAME * 3, b"d\0\0" * 20, b"\xff" * 40, bytes(100)]),
    st.integers(0, 3_000).map(lambda count: b"d" * count),
)
FRAMES = st.lists(st.tuples(st.sampled_from(b"dddddddEc"), PAYLOADS), max_size=200)


def simple_bounds(buffer: bytes, end: int) -> list[int]:
    bounds, position = [], 0
    while (
        position + 5 <= end and (following := position + 1 + struct.unpack_from(">I", buffer, position + 1)[0]) <= end
    ):
        bounds.append(position)
        position = following
    return [*bounds, position]


def encoded(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(bytes([kind]) + struct.pack(">I", 4 + len(payload)) + payload for kind, payload in frames)


@given(FRAMES, st.integers(0, 400), st.sampled_from([16, 64, 2048]))
@example([(ord("d"), LOOKS_LIKE_A_FRAME)] * 50, 3, 16)
@settings(deadline=None)
def test_all_whole_frames_are_found(frames: list[tuple[int, bytes]], cut_off: int, stretch_bytes: int) -> None:
    data = encoded(frames)
    end = max(0, len(data) - cut_off)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_walk, "_STRETCH_BYTES", stretch_bytes)
        patch.setattr(frame_walk, "_SIDE_BY_SIDE_FROM_BYTES", 8)
        assert frame_bounds(bytearray(data + PADDING), 0, end).tolist() == simple_bounds(data, end)


@given(st.binary(max_size=500), st.sampled_from([16, 64]))
def test_bytes_that_are_no_frames_are_walked_like_the_chain_they_happen_to_be(data: bytes, stretch_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_walk, "_STRETCH_BYTES", stretch_bytes)
        patch.setattr(frame_walk, "_SIDE_BY_SIDE_FROM_BYTES", 8)
        assert frame_bounds(bytearray(data + PADDING), 0, len(data)).tolist() == simple_bounds(data, len(data))


def test_a_large_buffer_of_ordinary_frames_is_walked_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded([(ord("d"), bytes([number % 256]) * (20 + number % 300)) for number in range(5_000)])
    monkeypatch.delattr(frame_walk, "_walk")
    assert frame_bounds(bytearray(data + PADDING), 0, len(data) - 7).tolist() == simple_bounds(data, len(data) - 7)
