"""What the capture says of itself: by one process at a time, and in place."""

from __future__ import annotations

from pathlib import Path

from pgtide.log.presence import CapturePresence, Presence, capture_presence


def said(path: Path) -> tuple[bool, str, str]:
    found = capture_presence(path)
    assert isinstance(found, CapturePresence)
    return found.running, found.phase, found.detail


def test_what_was_said_last_is_known_also_when_the_capture_has_gone(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    assert capture_presence(tmp_path) is None
    presence = Presence(tmp_path)
    presence.say("waiting", "é" * 10_000)
    size = (tmp_path / "control" / "capture.json").stat().st_size
    assert said(tmp_path)[:2] == (True, "waiting")
    presence.say("streaming")
    assert said(tmp_path) == (True, "streaming", "")
    assert (tmp_path / "control" / "capture.json").stat().st_size == size, "overwritten in place"
    presence.close()
    assert said(tmp_path) == (False, "streaming", "")


def test_a_second_capture_says_nothing_until_the_first_has_ended(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    first, second = Presence(tmp_path), Presence(tmp_path)
    first.say("streaming")
    second.say("stopped", "another capture uses the slot")
    assert said(tmp_path) == (True, "streaming", "")
    first.close()
    second.keep_saying()
    assert said(tmp_path) == (True, "stopped", "another capture uses the slot")


def test_where_there_is_no_log_yet_nothing_is_said_and_nothing_breaks(tmp_path: Path) -> None:
    presence = Presence(tmp_path)
    presence.say("starting")
    assert capture_presence(tmp_path) is None
    (tmp_path / "control").mkdir()
    presence.keep_saying()
    assert said(tmp_path) == (True, "starting", "")
