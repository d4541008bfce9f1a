"""Throw-away certificate authorities, and what they sign."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from pgtide.local import Tls


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, as files that libpq takes."""

    certificate: Path
    key: Path

    @property
    def options(self) -> dict[str, str]:
        """For a connection string."""
        return {"sslcert": str(self.certificate), "sslkey": str(self.key)}


class Authority:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._authority = trustme.CA()
        folder.mkdir()
        self.certificate = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.certificate))

    def for_server(self, host: str) -> Tls:
        signed = self._written(self._authority.issue_cert(host))
        return Tls(signed.certificate, signed.key, self.certificate)

    def for_client(self, user: str, *, expired: bool = False) -> Signed:
        end = datetime.now(UTC) + timedelta(days=-1 if expired else 1)
        leaf = self._authority.issue_cert(common_name=user, not_before=end - timedelta(days=2), not_after=end)
        return self._written(leaf)

    def _written(self, leaf: trustme.LeafCert) -> Signed:
        self._made += 1
        signed = Signed(self._folder / f"{self._made}.pem", self._folder / f"{self._made}.key")
        leaf.cert_chain_pems[0].write_to_path(str(signed.certificate))
        signed.key.touch(mode=0o600)
        leaf.private_key_pem.write_to_path(str(signed.key))
        return signed
