"""The name under which Spark finds the data source `pgtide` by itself.

Spark imports every installed module called `pyspark_…` when it looks for Python data sources, in every session on the
machine: so this import is cheap, and nothing in it can fail.  The real source is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    def __init__(self, options: dict[str, str]) -> None:
        from pgtide.spark.source import PgtideSource

        super().__init__(options)
        self._source = PgtideSource(options)

    @classmethod
    def name(cls) -> str:
        return "pgtide"

    def schema(self) -> StructType:
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source.reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return self._source.streamReader(schema)
