"""From the log to Spark: every policy does what its documentation says, and alters nothing without counting it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgtide.errors import TableError
from pgtide.types import PgType, TypePolicy, is_variant, lake_type, storage_type, to_lake

TEXT, INT4, DATE = PgType(25, "text"), PgType(23, "int4"), PgType(1082, "date")
TIMESTAMP, TIMESTAMPTZ = PgType(1114, "timestamp"), PgType(1184, "timestamptz")
MONEY_LIKE, LOOSE = PgType(1700, "numeric", typmod=(12 << 16 | 2) + 4), PgType(1700, "numeric")
UUID, TIME, TIMETZ, INTERVAL = (
    PgType(2950, "uuid"),
    PgType(1083, "time"),
    PgType(1266, "timetz"),
    PgType(1186, "interval"),
)
DEFAULT = TypePolicy()


def array_of(element: PgType, dimensions: int = 1) -> PgType:
    return PgType(1, f"_{element.name}", "array", element=element, dimensions=dimensions)


def mapped(
    pg_type: PgType, values: list[Any], text: list[str | None] | None = None, policy: TypePolicy = DEFAULT
) -> tuple[list[Any], dict[str, int]]:
    altered: Counter[str] = Counter()
    stored = pa.array(values, storage_type(pg_type))
    column = to_lake(pg_type, stored, None if text is None else pa.array(text, pa.string()), policy, altered)
    column.validate(full=True)
    assert column.type == lake_type(pg_type, policy)
    assert len(column) == len(values)
    # The same from the middle of a longer column.
    padded = pa.concat_arrays([stored, stored]).slice(len(values))
    padded_text = None if text is None else pa.array(text + text, pa.string()).slice(len(values))
    assert repr(to_lake(pg_type, padded, padded_text, policy).to_pylist()) == repr(column.to_pylist())
    return column.to_pylist(), {reason: count for reason, count in altered.items() if count}


def test_plain_values_pass_as_they_are() -> None:
    columns: list[tuple[PgType, list[Any]]] = [
        (INT4, [1, None, -5]),
        (TEXT, ["a", None, ""]),
        (DATE, [date(2024, 2, 29), None]),
    ]
    for pg_type, values in columns:
        assert mapped(pg_type, values) == (values, {})


def test_uuid_is_printed_as_postgres_prints_it() -> None:
    raw = bytes.fromhex("a0eebc999c0b4ef8bb6d6bb9bd380a11")
    assert mapped(UUID, [raw, None, bytes(16)]) == (
        ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", None, "00000000-0000-0000-0000-000000000000"], {},
    )  # fmt: skip
    assert mapped(UUID, []) == ([], {})


def test_nan_in_a_decimal_is_null_and_counted() -> None:
    assert mapped(MONEY_LIKE, [Decimal("1.50"), None, None], [None, "NaN", None]) == (
        [Decimal("1.50"), None, None], {"numeric NaN → null": 1},
    )  # fmt: skip


def test_decimals_as_string_are_exact() -> None:
    policy = TypePolicy(decimals="string")
    assert mapped(MONEY_LIKE, [Decimal("-1.50"), None, None], [None, "NaN", None], policy) == (
        ["-1.50", "NaN", None],
        {},
    )
    small = PgType(1700, "numeric", typmod=(20 << 16 | 10) + 4)
    assert mapped(small, [Decimal("0.0000000001"), Decimal("0E-10")], None, policy) == (
        ["0.0000000001", "0.0000000000"],
        {},
    )
    assert mapped(LOOSE, ["1e-3", "NaN"], None, policy)[0] == ["1e-3", "NaN"]


def test_loose_decimals_are_rounded_counted_and_refused_when_too_large() -> None:
    policy = TypePolicy(decimals="decimal(10,2)")
    assert mapped(LOOSE, ["1.5", "-2", "NaN", None, "Infinity"], None, policy) == (
        [Decimal("1.50"), Decimal("-2.00"), None, None, None], {"numeric NaN or infinity → null": 2},
    )  # fmt: skip
    assert mapped(LOOSE, ["1.005", "-12345678.994"], None, policy) == (
        [Decimal("1.01"), Decimal("-12345678.99")], {"numeric rounded to 2 decimals": 2},
    )  # fmt: skip
    with pytest.raises(TableError, match="more than 8 digits"):
        mapped(LOOSE, ["123456789"], None, policy)
    assert mapped(LOOSE, ["123456789.1"]) == (["123456789.1"], {})


@pytest.mark.parametrize("wrong", ["decimal", "decimal(39,2)", "decimal(5,6)", "float"])
def test_unknown_decimals_option_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="decimals"):
        TypePolicy(decimals=wrong)


FAR = [None, "infinity", "-infinity", "0044-03-15 BC", "10000-01-01", None]


def test_dates_out_of_range_are_clamped_and_counted() -> None:
    day = date(2024, 1, 1)
    assert mapped(DATE, [day, None, None, None, None, None], FAR) == (
        [day, date.max, date.min, date.min, date.max, None], {"date out of range → the nearest one in range": 4},
    )  # fmt: skip


def test_timestamps_out_of_range_are_clamped_to_the_microsecond() -> None:
    assert mapped(TIMESTAMP, [None, None], ["infinity", "-infinity"])[0] == [datetime.max, datetime.min]
    assert mapped(TIMESTAMPTZ, [None, None], ["infinity", "0044-03-15 00:00:00+00 BC"])[0] == [
        datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC),
    ]  # fmt: skip


def test_dates_out_of_range_are_null_or_text_by_option() -> None:
    day = date(2024, 1, 1)
    values = [day, None, None, None, None, None]
    assert mapped(DATE, values, FAR, TypePolicy(infinity="null")) == (values, {"date out of range → null": 4})
    assert mapped(DATE, values, FAR, TypePolicy(infinity="string")) == (["2024-01-01", *FAR[1:]], {})
    stamps = [datetime(2024, 1, 1, 12, 30, 0, 500_000), datetime(2024, 1, 1, 10, 20, 30)]
    assert mapped(TIMESTAMP, stamps, None, TypePolicy(infinity="string"))[0] == [
        "2024-01-01 12:30:00.5",
        "2024-01-01 10:20:30",
    ]
    utc = [stamp.replace(tzinfo=UTC) for stamp in stamps]
    assert mapped(TIMESTAMPTZ, utc, None, TypePolicy(infinity="string"))[0] == [
        "2024-01-01 12:30:00.5+00", "2024-01-01 10:20:30+00",
    ]  # fmt: skip


def test_times_are_text_or_microseconds() -> None:
    micros = [0, 86_399_999_999, 86_400_000_000, 45_296_700_000, None]
    assert mapped(TIME, micros)[0] == ["00:00:00", "23:59:59.999999", "24:00:00", "12:34:56.7", None]
    in_micros = TypePolicy(times="micros")
    assert mapped(TIME, micros, None, in_micros) == (micros, {})
    assert mapped(TIMETZ, ["01:00:00+02", None, "12:00:00.5-05:30"], None, in_micros)[0] == [
        23 * 3_600_000_000, None, 17 * 3_600_000_000 + 1_800_500_000,
    ]  # fmt: skip
    assert mapped(INTERVAL, ["P1DT2H", "PT-0.5S", "P1M", "infinity"], None, in_micros) == (
        [26 * 3_600_000_000, -500_000, 30 * 86_400_000_000, None],
        {"interval with months of 30 days": 1, "interval infinity → null": 1},
    )
    assert mapped(INTERVAL, ["P1DT2H"])[0] == ["P1DT2H"]


def test_elements_of_arrays_are_mapped_like_columns() -> None:
    raw = bytes(16)
    printed = "00000000-0000-0000-0000-000000000000"
    assert mapped(array_of(UUID), [[raw, None], None, []])[0] == [[printed, None], None, []]
    assert mapped(array_of(UUID, 2), [[[raw], [None]], None, []])[0] == [[[printed], [None]], None, []]


def test_a_policy_reaches_the_one_element_that_needs_it() -> None:
    values, text = [[date(2024, 1, 1)], None, None], [None, "{2024-05-01,infinity,NULL}", None]
    assert mapped(array_of(DATE), values, text) == (
        [[date(2024, 1, 1)], [date(2024, 5, 1), date.max, None], None],
        {"date out of range → the nearest one in range": 1},
    )
    pair = PgType(2, "pair", "composite", fields=(("a", TEXT), ("n", MONEY_LIKE)))
    assert mapped(pair, [{"a": "x", "n": Decimal("1.00")}, None], [None, '("b c",NaN)']) == (
        [{"a": "x", "n": Decimal("1.00")}, {"a": "b c", "n": None}], {"numeric NaN or infinity → null": 1},
    )  # fmt: skip


def test_arrays_of_other_dimensions_are_null_or_all_arrays_are_text() -> None:
    values, text = [[1, None], None, None], [None, "{{1,2},{3,4}}", "[0:1]={7,8}"]
    assert mapped(array_of(INT4), values, text) == (
        [[1, None], None, None], {"array of other dimensions or lower bounds → null": 2},
    )  # fmt: skip
    assert mapped(array_of(INT4), values, text, TypePolicy(arrays="string")) == (
        ["{1,NULL}", "{{1,2},{3,4}}", "[0:1]={7,8}"], {},
    )  # fmt: skip


def test_ranges_and_composites_map_their_parts() -> None:
    dates = PgType(3912, "daterange", "range", element=DATE)
    stored = {
        "lower": date(2024, 1, 1),
        "upper": None,
        "lower_inclusive": True,
        "upper_inclusive": False,
        "empty": False,
    }
    open_ended, counted = mapped(dates, [stored, None], [None, "[2024-01-01,infinity)"])
    assert open_ended[0] == stored
    assert open_ended[1] == stored | {"upper": date.max}
    assert counted == {"date out of range → the nearest one in range": 1}
    owner = PgType(3, "owner", "composite", fields=(("id", UUID), ("at", TIME)))
    assert mapped(owner, [{"id": bytes(16), "at": 1_000_000}, None])[0] == [
        {"id": "00000000-0000-0000-0000-000000000000", "at": "00:00:01"}, None,
    ]  # fmt: skip


def test_domain_is_mapped_as_its_base_type() -> None:
    domain = PgType(4, "token", "domain", element=UUID)
    assert lake_type(domain, DEFAULT) == pa.string()
    assert mapped(domain, [bytes(16)])[0] == ["00000000-0000-0000-0000-000000000000"]


def test_object_names_where_numbers_are_wanted_are_counted() -> None:
    assert mapped(PgType(2205, "regclass"), [1259, None], [None, "pg_type"]) == (
        [1259, None], {"an object's name where its number is wanted": 1},
    )  # fmt: skip


def test_json_is_a_variant_only_when_asked_for() -> None:
    jsonb = PgType(3802, "jsonb")
    assert not is_variant(jsonb, DEFAULT)
    assert is_variant(PgType(5, "document", "domain", element=jsonb), TypePolicy(json="variant"))
    assert not is_variant(TEXT, TypePolicy(json="variant"))
    assert lake_type(jsonb, TypePolicy(json="variant")) == pa.string()
