"""Records of a redo log, as LogMiner's view V$LOGMNR_CONTENTS shows them; the names of the fields are its columns'.

A transaction begins with START and ends with COMMIT or ROLLBACK.  When a savepoint, a failed statement or a whole
transaction is rolled back, the redo log has an undo record (`rollback` = 1) for every change that is taken back, the
newest first: a DELETE for an INSERT, an UPDATE for an UPDATE, an INSERT for a DELETE, each of the same row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pgtide.errors import DecodeError


class Operation(StrEnum):
    START = "START"
    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    DDL = "DDL"


CHANGES = frozenset({Operation.INSERT, Operation.UPDATE, Operation.DELETE})

Values = dict[str, Any]  # by column; as JSON has them


@dataclass(frozen=True, slots=True)
class Record:
    """One redo record.  Fields that an operation does not have are empty."""

    scn: int  # system change number: several records may have the same
    operation: Operation
    xid: str = ""  # undo segment, slot and sequence number: 16 hexadecimal digits
    timestamp_us: int = 0
    rollback: bool = False  # takes a change back
    data_obj: int = 0  # number of the table (DATA_OBJ#)
    row_id: str = ""
    new: Values | None = None  # INSERT, UPDATE: the row as it is then, all columns
    old: Values | None = None  # UPDATE, DELETE: as it was
    table: dict[str, Any] | None = None  # DDL: the table as it is from now on

    def encode(self) -> bytes:
        """As a line of JSON, without what is empty."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        told = {name: value for name, value in fields.items() if value not in ("", 0, None, False)}
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def parse(line: bytes, where: str) -> Record:
        try:
            fields = json.loads(line)
            record = Record(**fields | {"operation": Operation(fields["operation"])})
            if record.operation is not Operation.DDL:
                int(record.xid, 16)
        except (ValueError, TypeError, KeyError) as error:
            raise DecodeError(f"{where}: not a redo record: {error}") from error
        return record

    @property
    def xid_number(self) -> int:
        return int(self.xid, 16)

    @property
    def row_key(self) -> bytes:
        """Names the row: ids are unique within a table."""
        return f"{self.data_obj}:{self.row_id}".encode()
