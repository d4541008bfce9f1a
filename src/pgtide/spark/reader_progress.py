"""How far a named query has got, recorded when a batch is committed, and not only when the next one is planned.

Spark tells a Python source of a commit only while it plans the next batch, so of the last one never; a listener in the
driver hears of each.  It knows nothing of a source but its offsets: so those of a named query say whose they are.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pgtide.log.reader import LogReader
from pgtide.log.retention import readers
from pgtide.spark.registration import register_reader

_log = logging.getLogger("pgtide.spark")
_listening = "_pgtide_reader_progress"  # on the session: one listener is enough
_adding = threading.Lock()


def listen(spark: SparkSession) -> None:
    """Once per session, however often it is asked for."""
    with _adding:
        if not hasattr(spark, _listening):
            listener = ReaderProgress()
            spark.streams.addListener(listener)
            setattr(spark, _listening, listener)


class ReaderProgress(StreamingQueryListener):
    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for source in event.progress.sources:
            try:
                _record(json.loads(source.endOffset or "null"))
            except Exception as error:  # noqa: BLE001 - the query goes on: what is recorded is too little, never too much
                _log.warning("how far a named query has got could not be recorded: %s", error)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass


def _record(offset: Any) -> None:
    if not isinstance(offset, dict) or not {"log", "offset", "reader", "path"} <= offset.keys():
        return  # of another source, or of a query without a name
    log = LogReader(offset["path"])
    if log.identity.log_id != offset["log"]:
        return  # of a batch that was planned when another log was there
    recorded = {reader.name: reader.offset for reader in readers(log.storage)}.get(offset["reader"])
    if recorded is not None and recorded < offset["offset"]:
        register_reader(log, offset["reader"], offset["offset"])
