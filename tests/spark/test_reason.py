"""What is told of an error: the line that says what happened, and the last cause."""

from __future__ import annotations

import pytest

from pgtide.errors import TableError
from pgtide.spark.reason import reason

JAVA = """An error occurred while calling o375.createTable.
: org.apache.iceberg.exceptions.RuntimeIOException: Failed to create file: /lake/t/metadata/v1.json
\tat org.apache.iceberg.hadoop.HadoopOutputFile.create(HadoopOutputFile.java:78)
Caused by: java.io.UncheckedIOException: java.io.IOException: No space left on device
\t... 12 more
Caused by: java.io.IOException: No space left on device
\t... 15 more
"""
WORKER = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "wide_fold.py", line 212, in _survey_run
    values = (
             ^
OSError: [Errno 28] No space left on device


JVM stacktrace:
org.apache.spark.SparkException
\tat org.apache.spark.scheduler.Task.run(Task.scala:147)
"""
WHAT = "org.apache.iceberg.exceptions.RuntimeIOException: Failed to create file: /lake/t/metadata/v1.json"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(JAVA), f"{WHAT} (java.io.IOException: No space left on device)"),
        (RuntimeError(JAVA.partition("Caused by")[0]), WHAT),
        (RuntimeError(WORKER), "OSError: [Errno 28] No space left on device"),
        (ValueError("what\nmore"), "ValueError: what"),
        (ValueError(), "ValueError"),
        (TableError("t is not ours.", remedy="Drop it."), "t is not ours. Drop it."),
        (ValueError("x" * 1000), f"ValueError: {'x' * 488}"),
    ],
    ids=["with causes", "without", "of a worker", "not of Java", "silent", "ours", "long"],
)
def test_reason_is_what_happened_and_why(error: Exception, told: str) -> None:
    assert reason(error) == told
