"""How large the demo is and how long its parts take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    # Rows at the start: these, and about two items and one payment for each order.
    customers: int = 2_000
    products: int = 200
    orders: int = 5_000

    writers: int = 2
    transactions_per_second: float = 80.0  # of all writers together
    seed: int = 1986

    before_kill_s: float = 6.0  # of traffic that the mirror follows
    dead_s: float = 3.0  # of traffic while nothing runs
    after_kill_s: float = 4.0  # of traffic once the mirror has caught up again

    limit_s: float = 180.0  # of each wait, after which the demo gives up and says so
