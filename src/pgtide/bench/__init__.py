"""Benchmarks: pgtide beside its peers, in one run, on one machine.  Ratios count; figures are for orientation.

capture           Postgres → durable log, against pg_recvlogical
latency           commit → durable in the log, commit → visible in the mirror
mirror            Postgres → Iceberg, against pg_recvlogical, and batches in which little happens
big-transaction   one transaction of millions of rows: memory and time to commit
snapshot          the first load into Iceberg, against COPY and Spark's JDBC source
planning          planning a batch over up to 10,000 segments of the log
"""

from __future__ import annotations

from collections.abc import Callable

from pgtide.bench.result import Result


def benchmarks() -> dict[str, Callable[[bool], Result]]:
    """By name; the argument asks for a size that only shows that it runs."""
    from pgtide.bench.big_transaction import big_transaction
    from pgtide.bench.capture import capture
    from pgtide.bench.latency import latency
    from pgtide.bench.mirror import mirror
    from pgtide.bench.planning import planning
    from pgtide.bench.snapshot import snapshot

    return {
        "capture": capture,
        "latency": latency,
        "mirror": mirror,
        "big-transaction": big_transaction,
        "snapshot": snapshot,
        "planning": planning,
    }
