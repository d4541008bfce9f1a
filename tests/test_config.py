"""The configuration: where values come from, and that every mistake is told well and without secrets."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pgtide.config import Config, Source, load_config, matches, template
from pgtide.errors import ConfigurationError

MINIMAL = '[source]\ndsn = "host=db dbname=shop"\n'


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, **overrides: Any) -> Config:
    Path("pgtide.toml").write_text(text)
    return load_config(Path("pgtide.toml"), overrides)


def mistakes(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_file_of_init_sets_every_key_to_its_default() -> None:
    values = tomllib.loads(template())
    dsn = values["source"]["dsn"]
    assert load(template()) == Config(source=Source(dsn=dsn))
    for name, section in Config(source=Source(dsn=dsn)):
        depending = {key for key, field in type(section).model_fields.items() if field.json_schema_extra}
        assert values[name].keys() | depending == type(section).model_fields.keys()
        assert all(f"# {key} = " in template() for key in depending)


def test_the_file_of_init_explains_every_key() -> None:
    lines = template().splitlines()
    keys = [number for number, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    assert len(keys) > 10
    assert all(lines[number - 1].startswith("# ") for number in keys)


def test_command_line_beats_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINIMAL + 'slot = "from_file"\npublication = "from_file"\n[snapshot]\nconnections = 2\n'
    monkeypatch.setenv("PGTIDE_SOURCE__SLOT", "from_environment")
    monkeypatch.setenv("PGTIDE_SOURCE__PUBLICATION", "from_environment")
    Path("pgtide.toml").write_text(text)
    config = load_config(Path("pgtide.toml"), {"source.slot": "from_command_line"})
    assert (config.source.slot, config.source.publication) == ("from_command_line", "from_environment")
    assert (config.snapshot.connections, config.log.flush_interval_ms) == (2, 10)


def test_text_of_the_environment_becomes_the_type_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTIDE_SOURCE__TABLES", "public.*, !public.audit_*")
    monkeypatch.setenv("PGTIDE_MIRROR__TRIGGER_SECONDS", "0.5")
    monkeypatch.setenv("PGTIDE_SNAPSHOT__CONNECTIONS", "8")
    monkeypatch.setenv("PGTIDE_SPARK__CONF", '{"spark.ui.enabled": false}')
    config = load(MINIMAL)
    assert config.source.tables == ("public.*", "!public.audit_*")
    assert (config.mirror.trigger_seconds, config.snapshot.connections) == (0.5, 8)
    assert config.spark.conf == {"spark.ui.enabled": "false"}


def test_without_a_file_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGTIDE_SOURCE__DSN", "service=shop")
    assert load_config().source.dsn == "service=shop"
    assert load_config().log_path == tmp_path / "pgtide-data/log"


def test_a_missing_file_points_to_init() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)pgtide\.toml.*no such file.*source\.dsn.*pgtide init"):
        load_config()
    with pytest.raises(ConfigurationError, match=r"(?s)other\.toml.*no such file.*pgtide init"):
        load_config(Path("other.toml"))


def test_a_file_that_was_asked_for_must_exist_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTIDE_SOURCE__DSN", "service=shop")
    with pytest.raises(ConfigurationError, match="no such file"):
        load_config(Path("other.toml"))


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "shop.toml").write_text(MINIMAL + '[log]\npath = "../log"\n[mirror]\nwarehouse = "s3://bucket/lake"\n')
    config = load_config(folder / "shop.toml")
    assert config.log_path.resolve() == tmp_path / "log"
    assert config.warehouse == "s3://bucket/lake"
    assert load_config(folder / "shop.toml", {"mirror.warehouse": "lake"}).warehouse == str(folder / "lake")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["pgtide.toml: source.dsn: missing", "libpq"]),
        ('[source]\ndsn = ""\nslto = "x"', ["source.slto: unknown key", "did you mean 'slot'"]),
        ('[sorce]\ndsn = ""', ["sorce: unknown key", "did you mean 'source'"]),
        (MINIMAL + "tables = 5", ["source.tables: found 5", "expected a list of strings"]),
        (MINIMAL + "tables = []", ["source.tables: found []", "at least one pattern"]),
        (MINIMAL + 'tables = ["orders"]', ["source.tables", "schema.table", "'orders'"]),
        (MINIMAL + 'tables = ["a.b", 7]', ["source.tables[1]: found 7", "expected a string"]),
        (MINIMAL + 'tables = ["!a.b"]', ["at least one pattern that does not begin with !"]),
        (MINIMAL + 'slot = "My-Slot"', ['source.slot: found "My-Slot"', "lower-case"]),
        (MINIMAL + 'publication_mode = "auto"', ['found "auto"', '"managed" or "existing"']),
        (MINIMAL + f'publication = "{"x" * 52}"', ["source.publication", "1 to 51 bytes"]),
        (MINIMAL + "connect_timeout_seconds = 0", ["found 0", "more than 0"]),
        (MINIMAL + '[log]\npath = "gs://bucket/log"', ["log.path", "a folder or s3://bucket/prefix"]),
        (MINIMAL + '[log]\npath = "s3://bucket/../log"', ["log.path", "a folder or s3://bucket/prefix"]),
        (MINIMAL + '[log]\npath = "s3://key:hunter2@bucket/log"', ["log.path: found a string", "AWS_*"]),
        (MINIMAL + "[log]\nflush_interval_ms = 1.5", ["log.flush_interval_ms: found 1.5", "a whole number"]),
        (MINIMAL + '[mirror]\nformat = "delta"', ['mirror.format: found "delta"', "not there yet"]),
        (MINIMAL + '[mirror]\ntrigger_seconds = "1"', ['mirror.trigger_seconds: found "1"', "expected a number"]),
        (MINIMAL + "[snapshot]\nconnections = 65", ["snapshot.connections: found 65", "at most 64"]),
        (MINIMAL + "[snapshot]\nconnections = true", ["snapshot.connections: found true", "a whole number"]),
        (MINIMAL + 'spark = "local"', ["source.spark: unknown key"]),
        ('spark = "local"\n' + MINIMAL, ["spark: found a string", "expected a section"]),
        (MINIMAL + "[mirror]\nmode = 'history'", ["mirror.mode: unknown key"]),
        ("[source]\ndsn = shop", ["not valid TOML", "line 2"]),
    ],
)
def test_a_mistake_names_file_key_what_was_found_and_what_was_expected(text: str, told: list[str]) -> None:
    message = mistakes(text)
    assert "pgtide.toml" in message
    for part in told:
        assert part in message


def test_all_mistakes_are_told_at_once() -> None:
    message = mistakes('[source]\ntables = 5\nslot = "A"\n[mirror]\nformat = "delta"\n[logg]\n')
    assert "5 mistakes" in message
    for key in ("source.dsn", "source.tables", "source.slot", "mirror.format", "logg"):
        assert f"pgtide.toml: {key}: " in message


def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTIDE_SNAPSHOT__CONNECTIONS", "many")
    monkeypatch.setenv("PGTIDE_SOURCE__SLTO", "x")
    message = mistakes(MINIMAL)
    assert 'PGTIDE_SNAPSHOT__CONNECTIONS: snapshot.connections: found "many", expected a whole number' in message
    assert "PGTIDE_SOURCE__SLTO: source.slto: unknown key; did you mean 'slot'?" in message


@pytest.mark.parametrize(
    "text",
    [
        '[source]\ndns = "postgresql://u:hunter2@h/d"',
        'source = "postgresql://u:hunter2@h/d"',
        '[source]\ndsn = ["postgresql://u:hunter2@h/d"]',
        '[source]\ndsn = "host=h password=a hunter2"',
        '[source]\ndsn = "postgresql://u:hunter2@h:notaport:5/d?x"',
        MINIMAL + '[spark]\nconf = { secret = ["hunter2"] }',
    ],
)
def test_no_mistake_repeats_a_secret(text: str) -> None:
    assert "hunter2" not in mistakes(text)


def test_printing_a_configuration_shows_no_connection_string() -> None:
    config = load('[source]\ndsn = "host=h password=hunter2"\n[spark]\nconf = { "fs.s3a.secret.key" = "hunter2" }')
    assert "hunter2" not in repr(config)
    assert "hunter2" not in str(config)


def test_a_log_on_s3_is_flushed_less_often_and_spools_into_a_folder_of_its_own(tmp_path: Path) -> None:
    config = load(MINIMAL + '[log]\npath = "s3://bucket/shop/log/"\n')
    assert config.log_location == "s3://bucket/shop/log"
    assert config.log.flush_interval_ms == 1000
    assert config.spool_path == tmp_path / "pgtide-data/spool/bucket/shop/log"
    chosen = load(MINIMAL + '[log]\npath = "s3://bucket"\nflush_interval_ms = 50\n[capture]\nspool_path = "spool"\n')
    assert (chosen.log.flush_interval_ms, chosen.spool_path) == (50, tmp_path / "spool")
    assert load(MINIMAL).log_location == str(load(MINIMAL).log_path)


def test_a_configuration_cannot_be_changed_and_survives_pickling(tmp_path: Path) -> None:
    config = load(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.source.slot = "other"  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.log_path == tmp_path / "pgtide-data/log"


@pytest.mark.parametrize(
    ("patterns", "name", "meant"),
    [
        (["public.*"], "public.orders", True),
        (["public.*"], "audit.orders", False),
        (["public.*", "!public.audit_*"], "public.audit_log", False),
        (["!public.audit_*", "public.*"], "public.audit_log", False),
        (["!public.audit_*", "public.*"], "public.orders", True),
        (["*.orders"], "eu.orders", True),
        (["public.order?"], "public.orders", True),
        (["public.Orders"], "public.orders", False),
        (["public.*"], "public.with.dot", True),
    ],
)
def test_patterns_mean_tables(patterns: list[str], name: str, meant: bool) -> None:
    assert matches(patterns, name) is meant
