"""Column types and values at their edges, by the version of Postgres that is asked about them.

The types of Postgres itself are asked of all versions.  Those of contrib and xml need a server built with them, which
15 and 17 are here; pgvector comes with 16 and 18.
"""

from __future__ import annotations

from tests.decode.type_cases import CASES, CASES_SINCE_17
from tests.decode.type_cases import TYPES as OWN_TYPES

CONTRIB = ("citext", "cube", "hstore", "intarray", "isn", "ltree", "seg")
EXTENSIONS: dict[int, tuple[str, ...]] = {15: CONTRIB, 16: ("vector",), 17: CONTRIB, 18: ("vector",)}

MEGABYTE = 1_000_000
UNICODE = "äöü €𝄞 \u202eאב e\u0301 漢字 👩\u200d👩\u200d👧"

LARGE: dict[str, list[str]] = {
    "text": ["x" * MEGABYTE, "€" * MEGABYTE],
    "bytea": ["\\x" + "00ff" * (MEGABYTE // 2)],
    "jsonb": ['{"k": "' + "v" * MEGABYTE + '"}'],
    "json": ['["' + "v" * MEGABYTE + '"]'],
    "text[]": ["{" + "y" * MEGABYTE + ",NULL}"],
    "integer[]": ["{" + ",".join(map(str, range(-50_000, 50_000))) + "}"],
    "varbit": ["10" * (MEGABYTE // 2)],
}

# With the modifiers that people write.
MODIFIED: dict[str, list[str]] = {
    "numeric(3,2)": ["1.10", "-9.99", "NaN"],
    "numeric(4)": ["0", "9999", "-1"],
    "numeric(6,2)": ["1234.56", "-0.01"],
    "numeric(6,4)": ["22.2222", "-0.0001", "NaN"],
    "numeric(8,2)": ["123456.78"],
    "numeric(8,3)": ["0.000", "12345.678"],
    "numeric(8,4)": ["1234.5678"],
    "numeric(9,0)": ["999999999", "-1"],
    "numeric(20,8)": ["123456789012.12345678", "-0.00000001"],
    "varchar": ["", UNICODE],
    "varchar(2)": ["\u017e\u0161", ""],
    "varchar(5)": ["abcde"],
    "varchar(25)": ["a string", UNICODE[:20]],
    "char": ["a", ""],
    "char(3)": ["abc", "a"],
    "char(4)": ["abc", UNICODE[:4]],
    "char(6)": ["abc"],
    "char(10)": ["abcd"],
    "bit(1)": ["0", "1"],
    "bit(2)": ["11"],
    "bit(3)": ["101"],
    "bit(7)": ["1010110"],
    "varbit(1)": ["1", ""],
    "varbit(2)": ["00"],
    "varbit(3)": ["101"],
    "varbit(5)": ["110"],
    "varbit(24)": ["110110111111111111111111"],
    "varbit(64)": ["1" * 64, "01" * 20],
    "timestamp(3)": ["2016-11-04 13:51:30.123456", "infinity"],
    "timestamp(6)": ["1936-10-25 22:10:12.608", "4713-01-01 00:00:00 BC"],
    "timestamptz(0)": ["2016-11-04 13:51:30.6+02"],
    "time(3)": ["13:51:30.1239"],
    "timetz(0)": ["13:51:30.6+02"],
    "timetz(3)": ["13:51:30.1239+02"],
    "timetz(6)": ["23:59:59.999999-12"],
    "interval(3)": ["1 day 00:00:01.123456"],
    "interval year to month": ["1 year 2 months"],
}

MORE: dict[str, list[str]] = {
    "text": [UNICODE, "\u0001", "a\\nb"],
    "varchar": [UNICODE],
    "jsonb": ['{"ключ": "значение", "n": 1e400, "nested": [{"a": null}, []]}'],
    "inet": ["::1.2.3.4", "0.0.0.0/0"],
    "text[]": ["{" + UNICODE.replace(" ", "") + "}"],
    "text[][]": ['{{a,NULL},{"",NULL}}', "{{NULL,NULL}}", "{}"],
    "char(10)[]": ["{cone,ctwo}", "{NULL}"],
    "varchar(10)[]": ["{vcone,NULL}", "{}"],
    "bigint[]": ["{1550166368505037572,NULL}"],
    "oid[]": ["{3,4000000000,NULL}"],
    "inet[]": ["{192.168.2.0/12,NULL,::1}"],
    "cidr[]": ["{192.168.100.128/25,NULL}"],
    "macaddr[]": ["{08:00:2b:01:02:03,NULL}"],
    "macaddr8[]": ["{08:00:2b:01:02:03:04:05}"],
    "money[]": ["{$1.50,NULL}"],
    "bit(3)[]": ["{101,NULL}"],
    "json[]": ['{"{\\"bar\\": \\"baz\\"}",NULL}'],
    "time[]": ["{00:01:02,NULL,24:00:00}"],
    "timetz[]": ["{13:51:02+02,NULL,00:00:00+00}"],
    "timestamp[]": ['{"2020-04-01 00:01:02",NULL}', "{infinity}"],
    "timestamptz[]": ["{NULL}"],
    "over_box[]": ["{(3,4),(1,2);NULL}"],
    "point[]": ['{"(1,2)",NULL}'],
    "tsrange[]": ['{"[2019-03-31 15:30:00,infinity)",NULL,empty}'],
    "tstzrange[]": ['{"[2017-06-05 11:29:12.549426+00,infinity]",NULL}'],
    "daterange[]": ['{"[2019-03-31,infinity)",NULL}'],
    "numrange[]": ['{"[5.3,6.3)",NULL}'],
    "int8range[]": ['{"[1000000,6000000)",NULL}'],
    "textrange[]": ['{"[\\"a b\\",c]",NULL}'],
    "positive[]": ["{1,NULL}"],
    "small_text[]": ["{a,NULL}"],
    "xid8[]": ["{18446744073709551615,NULL}"],
    "tsvector[]": ["{'a':1,NULL}"],
    "financial_asset": ["(1.5,DE0001)", "(,)", '(NaN,"a b")'],
    "financial_asset[]": ['{"(1.5,DE0001)",NULL}'],
}

# Domains over these: their values are those of their base types.
DOMAINS = (
    "bit(3)", "smallint", "integer", "bigint", "real", "double precision", "numeric", "numeric(6,2)", "numeric(8,2)",
    "numeric(8,3)", "boolean", "varchar(25)", "text", "char", "date", "time", "timetz", "timestamp", "timestamptz",
    "interval", "money", "box", "circle", "line", "lseg", "path", "point", "polygon", "json", "jsonb", "uuid",
    "varbit(3)", "inet", "cidr", "macaddr", "bytea", "mood", "person", "int4range",
)  # fmt: skip
TWICE = ("varbit(3)", "numeric(8,2)", "text", "timestamptz")  # also as a domain over the domain

CONTRIB_CASES: dict[str, list[str]] = {
    "citext": ["", "AbC", UNICODE],
    "citext[]": ["{A,b,NULL}", "{}"],
    "ltree": ["", "Top.Collections.Pictures", "a"],
    "ltree[]": ["{Ship.Frigate,NULL,Ship.Destroyer}", "{}"],
    "lquery": ["*.a{1,2}.b|c", "a"],
    "ltxtquery": ["a & b* | !c"],
    "hstore": ["", "a=>1", 'a=>NULL, "b c"=>"q\\"x\\\\"', '"ü"=>"ö", ""=>""', '"big"=>"' + "h" * 100_000 + '"'],
    "hstore[]": ['{"\\"a\\"=>\\"1\\"",NULL}', "{}"],
    "isbn": ["0-393-04002-X", "978-0-11-000533-1"],
    "isbn13": ["978-0-11-000533-1"],
    "ean13": ["978-0-11-000533-1"],
    "issn": ["1436-4522"],
    "upc": ["220356483481"],
    "cube": ["(1,2),(3,4)", "(1,2)", "()", "(1e-5,NaN)"],
    "cube[]": ['{"(1, 2)",NULL}'],
    "seg": ["1 .. 2", "1.50", "<1.5", "1 .. "],
    "query_int": ["1&(2|!3)"],
    "xml": ["<a>ü</a>", "", "plain <b/> content", "<l>" + "x" * MEGABYTE + "</l>"],
    "xml[]": ["{<a/>,NULL}"],
}
CONTRIB_DOMAINS = ("citext", "hstore", "ltree", "xml")


def domain_over(base: str) -> str:
    return "over_" + "".join(character if character.isalnum() else "_" for character in base)


def needs(name: str) -> str:
    """The extension whose type it is; empty for Postgres's own."""
    return "vector" if name.split("(")[0].removesuffix("[]") in ("vector", "halfvec", "sparsevec") else ""


VECTOR_CASES: dict[str, list[str]] = {
    "halfvec(3)": ["[101,102,103]", "[0.1,-0,1e-7]"],
    "sparsevec(25)": ["{1:10,11:20,25:30}/25"],
    "sparsevec(3000)": ["{1:201,9:209}/3000"],
}


def cases_of(version: int) -> dict[str, list[str]]:
    """The column types to ask a server of this version about, each with its literals."""
    wanted: dict[str, list[str]] = {}
    sources = [CASES, MODIFIED, MORE, LARGE]
    if version >= 17:
        sources.append(CASES_SINCE_17)
    sources.append(VECTOR_CASES if "vector" in EXTENSIONS[version] else CONTRIB_CASES)
    for source in sources:
        for name, literals in source.items():
            if needs(name) in ("", *EXTENSIONS[version]):
                wanted[name] = [*wanted.get(name, []), *literals]
    for base in (*DOMAINS, *(CONTRIB_DOMAINS if "hstore" in EXTENSIONS[version] else ())):
        wanted[domain_over(base)] = [literal for literal in wanted[base] if len(literal) < 1000]
    for base in TWICE:
        wanted[domain_over(domain_over(base))] = wanted[domain_over(base)]
    return wanted


def types_of(version: int) -> list[str]:
    """The statements that make the types."""
    statements = [f"CREATE EXTENSION {extension}" for extension in EXTENSIONS[version]]
    statements += [statement for statement in OWN_TYPES if not statement.startswith("CREATE EXTENSION")]
    statements.append("CREATE TYPE financial_asset AS (quantity numeric, instrument_code text)")
    for base in (*DOMAINS, *(CONTRIB_DOMAINS if "hstore" in EXTENSIONS[version] else ())):
        statements.append(f"CREATE DOMAIN {domain_over(base)} AS {base}")
    statements += [f"CREATE DOMAIN {domain_over(domain_over(base))} AS {domain_over(base)}" for base in TWICE]
    return statements
