"""`snapshot start` and `snapshot status`: wishes that the mirror fulfils, and how far it is with them.  No Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pgtide.cli.status import readers_of, snapshots_of
from pgtide.config import Config
from pgtide.errors import ConfigurationError
from pgtide.log.control import histories, request_reload, requested_reloads
from pgtide.log.load_progress import load_line
from pgtide.log.presence import capture_presence
from pgtide.log.reader import LogReader


def start(config: Config, tables: Sequence[str], kind: str) -> None:
    if kind != "bulk":
        raise ConfigurationError(f"--type {kind} is not there", remedy="Only bulk is there: --type bulk.")
    if config.snapshot.initial != "bulk":
        raise ConfigurationError(
            f"snapshot.initial is {config.snapshot.initial!r}: this mirror loads nothing",
            remedy='Set snapshot.initial = "bulk", and start the mirror again.',
        )
    LogReader(config.log_location)  # says that there is no log
    captured = sorted(history.table for history in histories(config.log_location).values())
    unknown = [table for table in tables if table not in captured]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: not captured, so it is not mirrored",
            remedy=f"Captured are: {', '.join(captured)}. New tables are loaded by themselves (source.tables).",
        )
    request_reload(config.log_location, tables)
    print(f"Asked the mirror to load {', '.join(tables)} anew. How far it is: pgtide snapshot status")


def show(config: Config, *, as_json: bool) -> None:
    found = gather(config)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, load in sorted(found.items()):
        told = load_line(load) if "rows" in load else load["error"] or ""
        print(f"{name}: {load['state']}" + (f", {told}" if told else ""))
    capture = capture_presence(config.presence_path)
    if capture is not None and capture.running and capture.snapshot_trouble:
        print(f"Snapshots for loads: {capture.snapshot_trouble}")
    if not found:
        print("Nothing is being loaded.")


def gather(config: Config) -> dict[str, Any]:
    asked = {name: {"state": "asked", "type": "bulk", "error": None} for name in requested_reloads(config.log_location)}
    return asked | snapshots_of(readers_of(config.log_location).get("mirror") or {})
