"""The trust store: Java reads what was written, and it holds what this machine trusts."""

from __future__ import annotations

import hashlib
import re
import ssl
import subprocess
from pathlib import Path

import pytest

from pgtide.local.java import java_home
from pgtide.local.trust import PASSWORD, machine_certificates, write_trust_store
from tests.local.certificates import make_certificate


def keytool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [
        java_home() / "bin" / "java",
        "-Duser.language=en",
        "-m",
        "java.base/sun.security.tools.keytool.Main",
    ]
    return subprocess.run(command + list(arguments), capture_output=True, text=True, timeout=60)


def fingerprints(listed: str) -> set[str]:
    return {found.replace(":", "").lower() for found in re.findall(r"SHA-?256\): *([0-9A-F:]{95})", listed)}


def test_java_reads_back_every_certificate_that_was_written(tmp_path: Path) -> None:
    store, certificates = tmp_path / "store.jks", machine_certificates()
    assert certificates
    write_trust_store(store, certificates)
    done = keytool("-list", "-keystore", store, "-storetype", "JKS", "-storepass", PASSWORD)
    assert done.returncode == 0, done.stdout
    assert fingerprints(done.stdout) == {hashlib.sha256(content).hexdigest() for content in certificates}
    assert done.stdout.count("trustedCertEntry") == len(certificates)


def test_java_finds_damage_by_the_digest(tmp_path: Path) -> None:
    store = tmp_path / "store.jks"
    write_trust_store(store, machine_certificates()[:1])
    content = bytearray(store.read_bytes())
    content[-30] ^= 1
    store.write_bytes(content)
    done = keytool("-list", "-keystore", store, "-storetype", "JKS", "-storepass", PASSWORD)
    assert done.returncode != 0
    assert "tampered" in done.stdout


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"])
def test_an_authority_that_a_variable_names_is_trusted_beside_the_system_s(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(machine_certificates())
    own = make_certificate(tmp_path, "authority.test")
    monkeypatch.setenv(variable, str(own.certificate))
    added = ssl.PEM_cert_to_DER_cert(own.certificate.read_text())
    assert added not in before
    assert set(machine_certificates()) - before == {added}


def test_a_folder_of_certificates_is_read_and_what_is_no_certificate_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_certificate(tmp_path, "authority.test")
    (tmp_path / "README").write_text("not a certificate")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path))
    assert ssl.PEM_cert_to_DER_cert(own.certificate.read_text()) in machine_certificates()
