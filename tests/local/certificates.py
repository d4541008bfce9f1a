"""A certificate that signed itself, and that nobody trusts yet."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: Path
    key: Path


def make_certificate(folder: Path, *hosts: str) -> Certificate:
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    names = ",".join(f"DNS:{host}" for host in hosts)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={hosts[0]}"]
    files = ["-addext", f"subjectAltName={names}", "-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return made
