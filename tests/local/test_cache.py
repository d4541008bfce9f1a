"""The cache: a folder that exists is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgtide.local.cache import cache_folder, made_once
from pgtide.local.jars import _artifact, lakehouse_jars


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(aside: Path) -> None:
        calls.append(aside)
        (aside / "file").write_text("content")

    first = made_once(tmp_path / "deep" / "folder", make)
    second = made_once(tmp_path / "deep" / "folder", make)
    assert first == second == tmp_path / "deep" / "folder"
    assert (first / "file").read_text() == "content"
    assert len(calls) == 1
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["folder"]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail(aside: Path) -> None:
        (aside / "half").write_text("")
        raise RuntimeError("no more disk")

    with pytest.raises(RuntimeError, match="no more disk"):
        made_once(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def fast(aside: Path) -> None:
        (aside / "file").write_text("fast")

    def slow(aside: Path) -> None:
        (aside / "file").write_text("slow")
        made_once(folder, fast)

    assert (made_once(folder, slow) / "file").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [folder]


def test_the_environment_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGTIDE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("jar", "artifact"),
    [
        ("zstd-jni-1.5.7-3.jar", "zstd-jni"),
        ("com.github.luben_zstd-jni-1.5.7-3.jar", "zstd-jni"),
        ("io.delta_delta-spark_4.1_2.13-4.4.0.jar", "delta-spark_4.1_2.13"),
        ("org.roaringbitmap_RoaringBitmap-0.9.25.jar", "RoaringBitmap"),
    ],
)
def test_a_library_is_known_by_its_name_whoever_named_the_file(jar: str, artifact: str) -> None:
    assert _artifact(jar) == artifact


def test_the_jars_are_those_of_iceberg_and_delta_and_none_that_spark_ships() -> None:
    import pyspark

    artifacts = {_artifact(jar.name) for jar in lakehouse_jars()}
    shipped = {_artifact(jar.name) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    assert any(name.startswith("iceberg-spark-runtime") for name in artifacts)
    assert any(name.startswith("delta-spark_") for name in artifacts)
    assert not artifacts & shipped
