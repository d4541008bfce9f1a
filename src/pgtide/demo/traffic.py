"""Live traffic: writers that place, change and cancel orders, each step one transaction that keeps the books balanced.

Rows are locked in the order: order, products by number.  All writers keep to it, so they never deadlock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg

from pgtide.demo import shop
from pgtide.demo.settings import Settings
from pgtide.errors import PgtideError

_JOIN_LIMIT_S = 5.0
_MAX_LAG_S = 1.0

Connection = psycopg.Connection[Any]
Step = Callable[["Writer", Connection], None]


@dataclass(frozen=True, slots=True)
class Tally:
    """Transactions so far."""

    committed: int
    rolled_back: int


class Traffic:
    """The writers as threads, from `start` to `stop`; may be started again."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self._writers = [Writer(dsn, settings, number) for number in range(settings.writers)]
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def start(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=writer.run, args=[self._stop], name=f"traffic-{number}", daemon=True)
            for number, writer in enumerate(self._writers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, limit_s: float = _JOIN_LIMIT_S) -> None:
        """Lets each writer finish its transaction."""
        self._stop.set()
        for thread in self._threads:
            thread.join(limit_s)

    def tally(self) -> Tally:
        """How many transactions there were; raises what ended a writer, if something did."""
        for writer in self._writers:
            if writer.error is not None:
                raise PgtideError(f"The demo's traffic failed: {writer.error}") from writer.error
        return Tally(
            sum(writer.committed for writer in self._writers), sum(writer.rolled_back for writer in self._writers)
        )


class _OutOfStock(psycopg.Rollback):
    """Ends a transaction as a shop would."""


class Writer:
    """One connection, and steps chosen by a seeded chance at an even pace."""

    def __init__(self, dsn: str, settings: Settings, number: int) -> None:
        self._dsn = dsn
        self._settings = settings
        self._chance = random.Random(f"{settings.seed}-{number}")
        self._pause_s = settings.writers / settings.transactions_per_second
        self._newest_order = settings.orders
        self.committed = 0
        self.rolled_back = 0
        self.error: psycopg.Error | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            with psycopg.connect(self._dsn) as connection:
                due = time.monotonic()
                while not stop.wait(max(0.0, due - time.monotonic())):
                    self.step(connection)
                    # A stall is not made up for by a burst.
                    due = max(due + self._pause_s, time.monotonic() - _MAX_LAG_S)
        except psycopg.Rollback:  # comes so far only if it could not be made, for want of a connection
            if not stop.is_set():
                self.error = psycopg.OperationalError("the connection was lost in a rollback")
        except psycopg.Error as error:
            if not stop.is_set():
                self.error = error

    def step(self, connection: Connection) -> None:
        """One transaction of a kind chosen by chance."""
        kinds, weights = zip(*STEPS, strict=True)
        self.attempt(connection, self._chance.choices(kinds, weights)[0])

    def attempt(self, connection: Connection, step: Step) -> None:
        """A step as one transaction, which it may itself roll back."""
        finished = False
        with connection.transaction():  # swallows Rollback
            step(self, connection)
            finished = True
        if finished:
            self.committed += 1
        else:
            self.rolled_back += 1

    def place_order(self, connection: Connection) -> None:
        chance = self._chance
        wanted = sorted(chance.sample(range(1, self._settings.products + 1), chance.randint(1, 3)))
        items = [
            (product, quantity := chance.randint(1, 3), self._take(connection, product, quantity)) for product in wanted
        ]
        total = sum((quantity * price for _, quantity, price in items), Decimal(0))
        customer = chance.randint(1, self._settings.customers)
        row = connection.execute(
            "INSERT INTO orders (customer_id, status, total, note, placed_at) "
            "VALUES (%s, 'placed', %s, %s, now()) RETURNING id",
            [customer, total, shop.note(chance)],
        ).fetchone()
        assert row is not None
        order = self._newest_order = row[0]
        connection.cursor().executemany(
            "INSERT INTO order_items (order_id, line, product_id, quantity, price) VALUES (%s, %s, %s, %s, %s)",
            [(order, line, *item) for line, item in enumerate(items, start=1)],
        )
        self._pay(connection, order, total)

    def place_order_and_change_mind(self, connection: Connection) -> None:
        self.place_order(connection)
        raise psycopg.Rollback

    def pay_wrongly_then_order(self, connection: Connection) -> None:
        """A savepoint that is rolled back: its rows would unbalance the books."""
        with connection.transaction() as savepoint:
            connection.execute("UPDATE products SET stock = stock + 7 WHERE id = 1")
            connection.execute(
                "UPDATE payments SET amount = amount + 1 "
                "WHERE id = (SELECT id FROM payments LIMIT 1 FOR UPDATE SKIP LOCKED)"
            )
            self._roll_back_to(savepoint)
        self.place_order(connection)

    def cancel_order(self, connection: Connection) -> None:
        order = self._some_order(connection)
        taken = connection.execute(
            "DELETE FROM order_items WHERE order_id = %s RETURNING product_id, quantity", [order]
        ).fetchall()
        for product, quantity in sorted(taken):
            connection.execute("UPDATE products SET stock = stock + %s WHERE id = %s", [quantity, product])
        connection.execute("DELETE FROM payments WHERE order_id = %s", [order])
        connection.execute("DELETE FROM orders WHERE id = %s", [order])

    def advance_order(self, connection: Connection) -> None:
        """Leaves the note alone: where it is long, Postgres does not send it again."""
        connection.execute(
            "UPDATE orders SET status = %s WHERE id = %s",
            [self._chance.choice(shop.STATUSES), self._some_order(connection)],
        )

    def order_one_more(self, connection: Connection) -> None:
        order = self._some_order(connection)
        row = connection.execute(
            "UPDATE order_items SET quantity = quantity + 1 WHERE order_id = %s AND line = "
            "(SELECT min(line) FROM order_items WHERE order_id = %s) RETURNING product_id, price",
            [order, order],
        ).fetchone()
        assert row is not None, "an order has items"
        product, price = row
        self._take(connection, product, 1)
        connection.execute("UPDATE orders SET total = total + %s WHERE id = %s", [price, order])
        self._pay(connection, order, price)

    def merge_payments(self, connection: Connection) -> None:
        """Deletes and inserts under other keys, in one transaction."""
        order = self._some_order(connection)
        paid = connection.execute("DELETE FROM payments WHERE order_id = %s RETURNING amount", [order]).fetchall()
        self._pay(connection, order, sum((amount for (amount,) in paid), Decimal(0)))

    def renumber_items(self, connection: Connection) -> None:
        """Changes keys."""
        connection.execute(
            "UPDATE order_items SET line = line + 10 WHERE order_id = %s AND line < 1000",
            [self._some_order(connection)],
        )

    def change_price(self, connection: Connection) -> None:
        """Orders keep the price they were placed at."""
        connection.execute(
            "UPDATE products SET price = greatest(1, round(price * %s, 2)) WHERE id = %s",
            [Decimal(self._chance.randint(90, 112)) / 100, self._some_product()],
        )

    def move_stock(self, connection: Connection) -> None:
        giver, taker = self._chance.sample(range(1, self._settings.products + 1), 2)
        pieces = self._chance.randint(1, 5)
        moves = sorted([(giver, -pieces), (taker, pieces)])
        for product, difference in moves:
            row = connection.execute(
                "UPDATE products SET stock = stock + %s WHERE id = %s AND stock + %s >= 0",
                [difference, product, difference],
            )
            if row.rowcount == 0:
                raise _OutOfStock

    def register_customer(self, connection: Connection) -> None:
        connection.execute(
            "INSERT INTO customers (name, city, newsletter, since) VALUES (%s, %s, %s, current_date)",
            [shop.customer_name(self._chance), shop.city(self._chance), self._chance.random() < 0.5],
        )

    def move_customer(self, connection: Connection) -> None:
        connection.execute(
            "UPDATE customers SET city = %s WHERE id = %s",
            [shop.city(self._chance), self._chance.randint(1, self._settings.customers)],
        )

    def _roll_back_to(self, savepoint: psycopg.Transaction) -> None:
        raise psycopg.Rollback(savepoint)

    def _take(self, connection: Connection, product: int, quantity: int) -> Decimal:
        """Takes pieces out of stock and returns the price of one."""
        row = connection.execute(
            "UPDATE products SET stock = stock - %s WHERE id = %s AND stock >= %s RETURNING price",
            [quantity, product, quantity],
        ).fetchone()
        if row is None:
            raise _OutOfStock
        price: Decimal = row[0]
        return price

    def _pay(self, connection: Connection, order: int, total: Decimal) -> None:
        for amount in shop.amounts(self._chance, total):
            connection.execute(
                "INSERT INTO payments (id, order_id, amount, method, paid_at) VALUES (%s, %s, %s, %s, now())",
                [shop.new_uuid(self._chance), order, amount, self._chance.choice(shop.METHODS)],
            )

    def _some_order(self, connection: Connection) -> int:
        """An order that no other writer has in hand."""
        row = connection.execute(
            "SELECT id FROM orders WHERE id >= %s ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED",
            [self._chance.randint(1, self._newest_order)],
        ).fetchone()
        if row is None:
            raise psycopg.Rollback
        return int(row[0])

    def _some_product(self) -> int:
        return self._chance.randint(1, self._settings.products)


# How often each kind is chosen, of a hundred.
STEPS: tuple[tuple[Step, int], ...] = (
    (Writer.place_order, 40),
    (Writer.place_order_and_change_mind, 5),
    (Writer.pay_wrongly_then_order, 3),
    (Writer.cancel_order, 8),
    (Writer.advance_order, 16),
    (Writer.order_one_more, 6),
    (Writer.merge_payments, 4),
    (Writer.renumber_items, 2),
    (Writer.change_price, 4),
    (Writer.move_stock, 5),
    (Writer.register_customer, 4),
    (Writer.move_customer, 3),
)
