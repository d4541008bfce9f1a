"""What a capture says of itself: in the log's folder what it is doing, and over its metrics port how much it did."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pgtide.config import Config
from pgtide.log.presence import capture_presence

_LIMIT_S = 2.0


@dataclass(slots=True)
class CaptureStatus:
    """Numbers are since its start; null if there is no metrics port, or nobody answers there."""

    state: str = "not running"  # starting, streaming, reading, waiting, not running
    detail: str | None = None  # of one that has ended: what it said last
    since: str | None = None
    snapshot_trouble: str | None = None  # why a load that has asked for one has none yet, or may lose it
    rows: int | None = None
    bytes: int | None = None
    transactions: int | None = None
    reconnects: int | None = None
    flushes: int | None = None
    flush_seconds_mean: float | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None


def capture_status(config: Config) -> CaptureStatus:
    status = CaptureStatus()
    said = capture_presence(config.presence_path)
    if said is not None:
        status.state = said.phase if said.running else "not running"
        status.detail, status.since = said.detail or None, said.since
        status.snapshot_trouble = (said.snapshot_trouble or None) if said.running else None
    _add_numbers(config, status)
    return status


def _add_numbers(config: Config, status: CaptureStatus) -> None:
    port = config.capture.metrics_port
    if not port:
        return
    # Not through a proxy that the environment may name: the port is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            f"http://{_reachable(config.capture.metrics_address)}:{port}/metrics", timeout=_LIMIT_S
        ) as answer:
            text = answer.read().decode()
    except OSError:
        return
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    _from_metrics(status, {name.removeprefix("pgtide_capture_"): value for name, value in values.items()})


def _reachable(address: str) -> str:
    if address in ("0.0.0.0", "::"):
        return "127.0.0.1" if address == "0.0.0.0" else "[::1]"
    return f"[{address}]" if ":" in address else address


def _from_metrics(status: CaptureStatus, values: dict[str, float]) -> None:
    if "rows_total" not in values:
        return  # somebody else's port
    status.rows = int(values["rows_total"])
    status.bytes = int(values["bytes_total"])
    status.transactions = int(values["transactions_total"])
    status.reconnects = int(values["reconnects_total"])
    status.flushes = int(values["flush_seconds_count"])
    if status.flushes:
        status.flush_seconds_mean = round(values["flush_seconds_sum"] / status.flushes, 6)
    status.lag_bytes = int(values["lag_bytes"])
    status.lag_seconds = round(values["lag_seconds"], 3)
