"""Options of the data source: what is wrong, or does nothing, is refused with what is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgtide.errors import ConfigurationError
from tests.spark.logs import WrittenLog, insert
from tests.spark.reading import ORDERS, Restarted, batch_rows, read


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "public.nothing"}, "Tables in it: public.orders"),
        ({"startingOffset": "1"}, "Valid options: path, table, envelope, startingOffsets"),
        ({"envelope": "avro"}, "Valid values: changes, debezium"),
        ({"envelope": "debezium", "includePreimage": "true"}, "`before` has the old row"),
        ({"json": "bson"}, "Valid values: string, variant"),
        ({"decimals": "decimal(50,2)"}, "decimal\\(38,18\\)"),
        ({"maxBytesPerTrigger": "1.5"}, "a number of bytes from 1 on"),
        ({"minPartitions": "-1"}, "a number of partitions from 1 on"),
        ({"failOnDataLoss": "no"}, "Valid values: true, false"),
        ({"readerName": "a/b"}, "letters, digits"),
        ({"readerName": "mirror"}, "Choose another name"),
        ({"startingOffsets": "soon"}, "Valid values: earliest, latest"),
        ({"maxRowsPerTrigger": "0"}, "a number of rows from 1 on"),
        ({"includePreimage": "yes"}, "Valid values: true, false"),
    ],
)
def test_wrong_option_is_refused_naming_what_is_valid(
    spark: SparkSession, log: WrittenLog, options: dict[str, str], says: str
) -> None:
    log.commit(insert(ORDERS, id=1))
    with pytest.raises(PySparkException, match=says):
        read(spark, log, **options)


@pytest.mark.parametrize(
    ("option", "value"), [("maxRowsPerTrigger", "5"), ("maxBytesPerTrigger", "5"), ("readerName", "totals")]
)
def test_option_that_does_nothing_in_a_batch_read_is_refused(tmp_path: Path, option: str, value: str) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=1))
    with pytest.raises(ConfigurationError, match=rf"{option} belongs to streams(.|\n)*Leave {option} out"):
        batch_rows(log, **{option: value})


def test_ending_offsets_are_refused_in_a_stream_and_whatever_they_are(tmp_path: Path) -> None:
    log = WrittenLog(tmp_path / "log")
    log.commit(insert(ORDERS, id=1))
    for end in ("latest", "1"):
        with pytest.raises(ConfigurationError, match="endingOffsets belongs to batch reads"):
            Restarted(log, endingOffsets=end).begin()
