"""The mirror killed as by `kill -9` at each of its kill points in turn: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pgtide.failpoints import ENVIRONMENT_VARIABLE, declared
from pgtide.log.control import Barrier, BarrierState, barriers, put_barrier
from pgtide.schema import Column
from pgtide.sinks.iceberg import ALTERED, ALTERING, TABLE_CREATED
from pgtide.spark import at
from pgtide.spark.points import POINTS_PRUNED
from pgtide.spark.upkeep import COMPACTED, EXPIRED
from tests.spark.conftest import Mirrored
from tests.spark.logs import INT8, Change, delete, insert, model, table_shape, update

ORDERS = table_shape()
ITEMS = table_shape("items", oid=16500, key=("id", "region"))

DRIVER = """
import sys, threading
from pathlib import Path
from pgtide import local
from pgtide.config import load_config
from pgtide.spark.mirror import Mirror
config = load_config(Path(sys.argv[1]))
session = local.spark(warehouse=config.warehouse)
Mirror(session, config).run(threading.Event(), until_offset=int(sys.argv[2]))
session.stop()
"""

POINTS = sorted(name for name in declared() if name.startswith("mirror."))
# Reached only when a round of upkeep is due.
OF_UPKEEP = [POINTS_PRUNED, COMPACTED, EXPIRED]
# Starting Spark takes most of the time: the heavy run has all points.
SOME = ["mirror.merged", COMPACTED]
KEEP_UP = {"PGTIDE_MIRROR__COMPACT_MINUTES": "0.000001", "PGTIDE_MIRROR__KEEP_POINTS_HOURS": "0.0000001"}


def drive(config_file: Path, until_offset: int, failpoints: str = "", **variables: str) -> int:
    """Runs a mirror in a process of its own, up to an offset; returns how it ended."""
    command = [sys.executable, "-c", DRIVER, str(config_file), str(until_offset)]
    environment = os.environ | {ENVIRONMENT_VARIABLE: failpoints} | variables
    return subprocess.run(command, env=environment, timeout=300, check=False).returncode


def test_points_are_those_that_this_test_knows() -> None:
    assert POINTS == [
        "mirror.altered",
        "mirror.altering",
        "mirror.branch.created",
        "mirror.forwarded",
        "mirror.merged",
        "mirror.point.published",
        "mirror.point.ready",
        "mirror.points.pruned",
        "mirror.reported",
        "mirror.table.created",
        "mirror.upkeep.compacted",
        "mirror.upkeep.expired",
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("points", [SOME, pytest.param(POINTS, marks=pytest.mark.heavy)], ids=["some", "all"])
def test_killed_at_point_after_point_loses_and_repeats_nothing(
    points: list[str], mirrored: Mirrored, tmp_path: Path
) -> None:
    """Each process begins where the one before was killed, finds new changes, and is killed somewhere else."""
    warehouse = mirrored.spark.conf.get("spark.sql.catalog.lake.warehouse")
    file = tmp_path / "pgtide.toml"
    file.write_text(
        f'[source]\ndsn = "dbname=nowhere"\n[log]\npath = "{mirrored.log.path}"\n[snapshot]\ninitial = "none"\n'
        f'[mirror]\nnamespace = "{mirrored.config.mirror.namespace}"\n'
        f'warehouse = "{warehouse}"\ntrigger_seconds = 0.1\n'
    )
    changes: list[Change] = []
    orders = [ORDERS]  # its shapes
    asked: dict[str, list[Change]] = {}  # barriers, and the changes up to them

    def change(number: int, altered: bool = False) -> int:
        if altered:
            newest = orders[-1]
            added = Column(len(newest.columns) + 1, f"added{number}", INT8, missing=str(number))
            orders.append(replace(newest, columns=(*newest.columns, added)))
        shape = orders[-1]
        made = [insert(shape, id=number, amount=0, body="large"), insert(ITEMS, id=number, region="n")]
        made += [update(shape, unchanged=["body"], id=earlier, amount=number) for earlier in range(1, number)]
        made += [delete(ITEMS, id=number - 2, region="n")] if number >= 2 else []
        end = mirrored.log.commit(*made)
        changes.extend(made)
        barrier_id, lsn = secrets.token_hex(4), mirrored.log.writer.durable_lsn
        put_barrier(mirrored.log.path, Barrier(barrier_id, lsn, datetime.now(UTC) + timedelta(hours=1)))
        asked[barrier_id] = [change for change in changes if change.shape.name == "orders"]
        return end

    # Tables are made once, so that point comes first; tables that are altered have other columns, so they come last.
    altering = [point for point in (ALTERING, ALTERED) if point in points]
    first = change(0)
    if TABLE_CREATED in points:
        assert drive(file, first, f"{TABLE_CREATED}=kill") == -signal.SIGKILL
    change(1)
    mirrored.run()  # so that there are rows to be merged with: new ones are appended without a branch
    in_batches = [*sorted(set(points) - {TABLE_CREATED, *OF_UPKEEP, *altering}), *altering]
    for number, point in enumerate(in_batches, 2):
        assert drive(file, change(number, point in altering), f"{point}=kill") == -signal.SIGKILL, point
    mirrored.run()
    published = [found for found in barriers(mirrored.log.path) if found.state is BarrierState.PUBLISHED]
    assert published, "some were passed, because the mirror was killed before it could answer, but not all"
    for barrier in published[:2]:
        # Without the columns that were added: rows from before them have defaults there.
        columns = [column.name for column in ORDERS.columns]
        rows = at(mirrored.spark, barrier.lsn or 0, mirrored.config).table("orders").select(*columns).collect()
        assert {(row["id"],): row.asDict() for row in rows} == model(ORDERS, asked[barrier.id])
    for number, point in enumerate((p for p in OF_UPKEEP if p in points), 2 + len(in_batches)):
        assert drive(file, change(number), f"{point}=kill", **KEEP_UP) == -signal.SIGKILL, point
    mirrored.run()
    for shape in (orders[-1], ITEMS):
        mine = [change for change in changes if change.shape.name == shape.name]
        wanted = model(shape, mine)
        if shape.name == "orders":  # nobody has touched it since the columns were added, so it has their defaults
            assert all(column.missing for column in shape.columns[4:])
            wanted[0,] |= {column.name: int(column.missing or "") for column in shape.columns[4:]}
        assert mirrored.rows(shape) == wanted
        version = mirrored.sink.recorded(mirrored.target(shape))
        assert version is not None
        assert version.mark is not None
        assert version.mark.changes == len(mine), "some change was counted twice or not at all"
    point_now = at(mirrored.spark, config=mirrored.config)
    assert (point_now.offset, point_now.not_covered) == (mirrored.log.writer.end_offset, ())
    rows = point_now.table("orders").collect()
    assert {(row["id"],): row.asDict() for row in rows} == mirrored.rows(ORDERS)
