"""What a running capture says of itself, over its metrics port."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pgtide.config import Config

_LIMIT_S = 2.0


@dataclass(slots=True)
class CaptureStatus:
    """Since its start; all null if there is no metrics port, or nobody answers there."""

    rows: int | None = None
    bytes: int | None = None
    transactions: int | None = None
    reconnects: int | None = None
    flushes: int | None = None
    flush_seconds_mean: float | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None


def capture_status(config: Config) -> CaptureStatus:
    port = config.capture.metrics_port
    if not port:
        return CaptureStatus()
    # Not through a proxy that the environment may name: the port is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            f"http://{_reachable(config.capture.metrics_address)}:{port}/metrics", timeout=_LIMIT_S
        ) as answer:
            text = answer.read().decode()
    except OSError:
        return CaptureStatus()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    return _from_metrics({name.removeprefix("pgtide_capture_"): value for name, value in values.items()})


def _reachable(address: str) -> str:
    if address in ("0.0.0.0", "::"):
        return "127.0.0.1" if address == "0.0.0.0" else "[::1]"
    return f"[{address}]" if ":" in address else address


def _from_metrics(values: dict[str, float]) -> CaptureStatus:
    if "rows_total" not in values:
        return CaptureStatus()  # somebody else's port
    flushes = int(values["flush_seconds_count"])
    return CaptureStatus(
        rows=int(values["rows_total"]),
        bytes=int(values["bytes_total"]),
        transactions=int(values["transactions_total"]),
        reconnects=int(values["reconnects_total"]),
        flushes=flushes,
        flush_seconds_mean=round(values["flush_seconds_sum"] / flushes, 6) if flushes else None,
        lag_bytes=int(values["lag_bytes"]),
        lag_seconds=round(values["lag_seconds"], 3),
    )
