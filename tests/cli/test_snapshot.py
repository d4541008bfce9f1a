"""`pgtide snapshot`: what can be asked for, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pgtide.cli.app import app
from pgtide.errors import ConfigurationError
from pgtide.log.control import TableHistory, record_histories, requested_reloads, withdraw_reloads
from pgtide.log.identity import LogIdentity, create_identity
from pgtide.log.retention import report_reader

LOAD = {
    "rows": 10, "bytes": 5, "bytes_total": 20, "ranges": 1, "ranges_total": 4, "rows_per_s": 2.5, "eta_seconds": 12.0,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    log = tmp_path / "log"
    create_identity(str(log), LogIdentity("7000", "shop", 1, "pgtide", start_lsn=1))
    names = ("public.orders", "public.items")
    record_histories(str(log), {n: TableHistory(name, 0, 1) for n, name in enumerate(names, 16384)})
    config = tmp_path / "pgtide.toml"
    config.write_text('[source]\ndsn = "dbname=nowhere"\n[log]\npath = "log"\n')
    return config


def test_wishes_are_kept_until_the_mirror_takes_them(file: Path) -> None:
    for table in ("public.orders", "public.items", "public.orders"):
        done = CliRunner().invoke(app, ["snapshot", "start", table, "--type", "bulk", "--config", str(file)])
        assert done.exit_code == 0, done.output
    log = str(file.parent / "log")
    assert requested_reloads(log) == ("public.items", "public.orders")
    shown = CliRunner().invoke(app, ["snapshot", "status", "--json", "--config", str(file)])
    assert {name: load["state"] for name, load in json.loads(shown.stdout).items()} == {
        "public.items": "asked",
        "public.orders": "asked",
    }
    withdraw_reloads(log, ["public.items"])
    assert requested_reloads(log) == ("public.orders",)
    withdraw_reloads(log, ["public.orders"])
    shown = CliRunner().invoke(app, ["snapshot", "status", "--config", str(file)])
    assert shown.stdout == "Nothing is being loaded.\n"


@pytest.mark.parametrize("arguments", [["public.nothing"], ["public.orders", "--type", "incremental"]])
def test_what_cannot_be_loaded_is_refused_and_nothing_is_asked_for(file: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["snapshot", "start", *arguments, "--config", str(file)])
    assert isinstance(done.exception, ConfigurationError)
    assert requested_reloads(str(file.parent / "log")) == ()


def test_a_load_under_way_is_shown_with_rows_bytes_ranges_rate_and_time_left(file: Path) -> None:
    tables = {
        "public.orders": {"state": "streaming", "load": LOAD, "load_error": None},
        "public.items": {"state": "streaming", "load": None, "load_error": "the table is gone"},
    }
    report_reader(str(file.parent / "log"), "mirror", {"name": "mirror", "offset": 0, "tables": tables})
    shown = CliRunner().invoke(app, ["snapshot", "status", "--json", "--config", str(file)])
    assert json.loads(shown.stdout) == {
        "public.orders": {"state": "loading", "type": "bulk", "error": None, **LOAD},
        "public.items": {"state": "failed", "type": "bulk", "error": "the table is gone"},
    }
    shown = CliRunner().invoke(app, ["snapshot", "status", "--config", str(file)])
    assert "public.orders: loading, 10 rows" in shown.stdout
    assert "about 0:12 min left" in shown.stdout
