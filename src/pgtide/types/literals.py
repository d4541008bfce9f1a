"""Values as Postgres prints them: arrays, composites, ranges and hstore split and put together, floats printed.

Only what the server's output functions produce is read, not everything its input functions accept.  Elements
stay text: what they mean is the business of their types.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import prod

import numpy as np

Texts = list[str | None]

_ARRAY_BOUNDS = re.compile(r"((?:\[-?\d+:-?\d+\])+)=")
_ARRAY_TOKEN = {
    delimiter: re.compile(rf'"((?:[^"\\]|\\.)*)"|([{{}}{delimiter}])|((?:[^{{}}"\\{delimiter}]|\\.)+)', re.DOTALL)
    for delimiter in ",;:"
}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_RANGE_BOUND = re.compile(r'(?:"((?:[^"\\]|""|\\\\)*)"|([^",()\[\]]*))([,)\]])', re.DOTALL)
_COMPOSITE_FIELD = re.compile(r'(?:"((?:[^"\\]|""|\\\\)*)"|([^",()]*))([,)])', re.DOTALL)
_DOUBLED = re.compile(r'""|\\\\')
_BOUND = r'(?:"(?:[^"\\]|""|\\\\)*"|[^",()\[\]]*)'
_RANGE = re.compile(rf"empty|[\[(]{_BOUND},{_BOUND}[\])]", re.DOTALL)
_HSTORE_PAIR = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:NULL|"((?:[^"\\]|\\.)*)")(?:, |$)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArrayLiteral:
    """An array's elements in storage order; an empty array has no dimensions."""

    sizes: tuple[int, ...]
    lower_bounds: tuple[int, ...]
    elements: Texts


def parse_array(text: str, delimiter: str = ",") -> ArrayLiteral:
    bounds = _ARRAY_BOUNDS.match(text)
    lowers = tuple(int(lower) for lower in re.findall(r"\[(-?\d+):", bounds[1])) if bounds else ()
    at = bounds.end() if bounds else 0
    counts: list[int] = []  # elements so far, at each open level
    sizes: dict[int, int] = {}  # by level
    elements: Texts = []
    token = _ARRAY_TOKEN[delimiter]
    while at < len(text):
        match = token.match(text, at)
        if match is None or (not counts and at > (bounds.end() if bounds else 0)):
            raise ValueError(f"not an array: {text!r}")
        at = match.end()
        if match[2] == "{":
            counts.append(0)
        elif match[2] == "}":
            level, count = len(counts), counts.pop()
            if sizes.setdefault(level, count) != count:
                raise ValueError(f"an array is not rectangular: {text!r}")
            if counts:
                counts[-1] += 1
        elif match[2] is None:
            counts[-1] += 1
            quoted = match[1] is not None
            element = _ESCAPED.sub(r"\1", match[1] if quoted else match[3])
            elements.append(None if not quoted and element.upper() == "NULL" else element)
    if counts or not sizes:
        raise ValueError(f"not an array: {text!r}")
    dimensions = tuple(sizes[level] for level in sorted(sizes)) if elements else ()
    if prod(dimensions) != len(elements) and dimensions:
        raise ValueError(f"an array is not rectangular: {text!r}")
    return ArrayLiteral(dimensions, lowers or (1,) * len(dimensions), elements)


def parse_composite(text: str) -> Texts:
    if text == "()":
        return [None]
    return _fields(text, _COMPOSITE_FIELD, "(", ")")


@dataclass(frozen=True, slots=True)
class RangeLiteral:
    """A bound of None is infinite; so are both of an empty range."""

    lower: str | None
    upper: str | None
    lower_inclusive: bool
    upper_inclusive: bool
    empty: bool


def parse_range(text: str) -> RangeLiteral:
    if text == "empty":
        return RangeLiteral(None, None, False, False, True)
    bounds = _fields(text, _RANGE_BOUND, "[(", ")]")
    if len(bounds) != 2:
        raise ValueError(f"not a range: {text!r}")
    return RangeLiteral(bounds[0], bounds[1], text[0] == "[", text[-1] == "]", False)


def parse_multirange(text: str) -> list[str]:
    """The ranges, each as its own text."""
    ranges = _RANGE.findall(text)
    if "{" + ",".join(ranges) + "}" != text:
        raise ValueError(f"not a multirange: {text!r}")
    return ranges


def parse_hstore(text: str) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    at = 0
    while at < len(text):
        match = _HSTORE_PAIR.match(text, at)
        if match is None:
            raise ValueError(f"not an hstore: {text!r}")
        value = None if match[2] is None else _ESCAPED.sub(r"\1", match[2])
        pairs.append((_ESCAPED.sub(r"\1", match[1]), value))
        at = match.end()
    return pairs


def _fields(text: str, pattern: re.Pattern[str], opening: str, closing: str) -> Texts:
    """Fields between brackets: quoted ones have quotes and backslashes doubled, an empty one is null."""
    if len(text) < 2 or text[0] not in opening or text[-1] not in closing:
        raise ValueError(f"not between {opening} and {closing}: {text!r}")
    fields: Texts = []
    at = 1
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise ValueError(f"a quotation does not end: {text!r}")
        quoted, plain = match[1], match[2]
        fields.append(_DOUBLED.sub(lambda pair: pair[0][0], quoted) if quoted is not None else plain or None)
        at = match.end()
        if (match[3] == ",") == (at == len(text)):
            raise ValueError(f"brackets do not match: {text!r}")
    return fields


_ARRAY_SPACE = re.compile(r"[ \t\n\r\v\f]")


def format_array(
    sizes: Sequence[int], lower_bounds: Sequence[int], elements: Sequence[str | None], delimiter: str = ","
) -> str:
    if not sizes:
        return "{}"
    texts = [_array_element(element, delimiter) for element in elements]
    for size in reversed(sizes):
        texts = ["{" + delimiter.join(texts[at : at + size]) + "}" for at in range(0, len(texts), size)]
    if all(lower == 1 for lower in lower_bounds):
        return texts[0]
    bounds = "".join(f"[{lower}:{lower + size - 1}]" for lower, size in zip(lower_bounds, sizes, strict=True))
    return f"{bounds}={texts[0]}"


def _array_element(element: str | None, delimiter: str) -> str:
    if element is None:
        return "NULL"
    special = any(character in element for character in ('"', "\\", "{", "}", delimiter))
    if element and not special and element.upper() != "NULL" and not _ARRAY_SPACE.search(element):
        return element
    return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


def format_composite(fields: Sequence[str | None]) -> str:
    return "(" + ",".join("" if field is None else _doubled(field, '"\\(),') for field in fields) + ")"


def format_range(value: RangeLiteral) -> str:
    if value.empty:
        return "empty"
    lower, upper = ("" if bound is None else _doubled(bound, '"\\()[],') for bound in (value.lower, value.upper))
    return f"{'[' if value.lower_inclusive else '('}{lower},{upper}{']' if value.upper_inclusive else ')'}"


def _doubled(text: str, special: str) -> str:
    if text and not any(character in text for character in special) and not _ARRAY_SPACE.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


def format_hstore(pairs: Sequence[tuple[str, str | None]]) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ", ".join(f"{quoted(key)}=>{'NULL' if value is None else quoted(value)}" for key, value in pairs)


def float8(value: float) -> str:
    return _shortest(value, repr(value), 15)


def float4(value: float) -> str:
    """`value` is the float4, held in a Python float."""
    return _shortest(value, str(np.float32(value)), 6)


def _shortest(value: float, shortest: str, plain_digits: int) -> str:
    """The shortest digits that give the same number, plain between 1e-4 and 1e15 (float4: 1e6), else with exponent."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign, digits, exponent = Decimal(shortest).normalize().as_tuple()
    assert isinstance(exponent, int)
    prefix, text = "-" * sign, "".join(map(str, digits))
    if value == 0:
        return f"{prefix}0"
    leading = exponent + len(text) - 1  # exponent in scientific form
    if leading < -4 or leading >= plain_digits:
        point = f".{text[1:]}" if len(text) > 1 else ""
        return f"{prefix}{text[0]}{point}e{leading:+03d}"
    if exponent >= 0:
        return prefix + text + "0" * exponent
    if leading >= 0:
        return f"{prefix}{text[: leading + 1]}.{text[leading + 1 :]}"
    return f"{prefix}0.{'0' * (-leading - 1)}{text}"
