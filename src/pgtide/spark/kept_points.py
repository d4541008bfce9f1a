"""Which points are kept, and the points table without the others: pure text, to be read and tried by itself.

All points of the last hour are kept, then one a minute: a busy table has a version for each point, and the list of its
versions is written anew by every commit.  The newest point is kept however old it is.

A point says nothing of tables that have not changed since the point before.  So when a point goes, what it said moves
on to the next that is kept, unless that says something newer.
"""

from __future__ import annotations

from datetime import datetime, timedelta

ALL_KEPT_S = 3600.0

# Of a table's rows, what holds at the end: at one place coverage is only ever added.
NEWEST = "max_by(struct(version, covered), struct(`offset`, lsn, covered, published_at))"


def all_kept_since(now: datetime, keep_s: float) -> datetime:
    """Points published from here on are all kept."""
    return now - timedelta(seconds=min(keep_s, ALL_KEPT_S))


def kept_rows(points: str, log_id: str, now: datetime, keep_s: float) -> str:
    """A query: the rows of the points table that stay, those of other logs among them."""
    all_since = f"TIMESTAMP '{all_kept_since(now, keep_s).isoformat()}'"
    some_since = f"TIMESTAMP '{(now - timedelta(seconds=keep_s)).isoformat()}'"
    mine = f"log_id = '{log_id}'"
    places = (
        "SELECT struct(`offset`, lsn) AS place, max(commit_timestamp) AS commit_timestamp, "
        "max(max_commit_timestamp) AS max_commit_timestamp, max(published_at) AS published_at "
        f"FROM {points} WHERE {mine} GROUP BY `offset`, lsn"
    )
    numbered = (
        "SELECT *, row_number() OVER (ORDER BY place DESC) AS from_end, "
        "row_number() OVER (PARTITION BY date_trunc('MINUTE', published_at) ORDER BY place DESC) AS from_end_of_minute "
        f"FROM ({places})"
    )
    is_kept = (
        f"from_end = 1 OR published_at >= {all_since} OR (published_at >= {some_since} AND from_end_of_minute = 1)"
    )
    following = (
        f"SELECT place, min(CASE WHEN {is_kept} THEN "
        "struct(place, commit_timestamp, max_commit_timestamp, published_at) END) "
        "OVER (ORDER BY place ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS kept "
        f"FROM ({numbered})"
    )
    moved = (
        f"SELECT f.kept, p.`table`, {NEWEST} AS now FROM {points} p JOIN ({following}) f "
        f"ON struct(p.`offset`, p.lsn) = f.place WHERE {mine} AND (p.`table` IS NOT NULL OR f.kept.place = f.place) "
        "GROUP BY f.kept, p.`table`"
    )
    return (
        f"SELECT '{log_id}' AS log_id, kept.place.lsn, kept.commit_timestamp, kept.max_commit_timestamp, "
        f"kept.place.`offset`, `table`, now.version, now.covered, kept.published_at FROM ({moved}) "
        "UNION ALL SELECT log_id, lsn, commit_timestamp, max_commit_timestamp, `offset`, `table`, version, covered, "
        f"published_at FROM {points} WHERE NOT ({mine})"
    )
