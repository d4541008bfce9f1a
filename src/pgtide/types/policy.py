"""How types are mapped to Spark where there is more than one good way: the user chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

_DECIMAL_OPTION = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")


@dataclass(frozen=True, slots=True)
class TypePolicy:
    """The defaults are those of the documentation's table of types."""

    decimals: str = "null"  # NaN → null | "string": every numeric as text | "decimal(p,s)": for those of no fixed scale
    infinity: Literal["clamp", "null", "string"] = "clamp"  # dates and timestamps outside of the years 1 to 9999
    json: Literal["string", "variant"] = "string"
    times: Literal["string", "micros"] = "string"
    arrays: Literal["null", "string"] = "null"  # arrays of other dimensions than declared → null, or all as text

    def __post_init__(self) -> None:
        if self.decimals not in ("null", "string") and self.loose_decimal is None:
            raise ValueError(f'decimals is "null", "string" or "decimal(p,s)" with s ≤ p ≤ 38, not {self.decimals!r}')

    @property
    def loose_decimal(self) -> pa.DataType | None:
        """The type of numerics without a fixed scale, when they shall be decimals."""
        match = _DECIMAL_OPTION.fullmatch(self.decimals)
        if match is None or not 1 <= int(match[1]) <= 38 or int(match[2]) > int(match[1]):
            return None
        return pa.decimal128(int(match[1]), int(match[2]))
