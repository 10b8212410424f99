"""The cluster's certificates: one authority per start, kept in the cluster's folder, readable by its owner only."""

from __future__ import annotations

import datetime
import ipaddress
import os
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path

_VALID = datetime.timedelta(days=365)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    _write(
        path,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


class Authority:
    """Signs certificates into a folder. ``NAME.crt`` and ``NAME.key`` belong together; the authority is ``ca.crt``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "twinpool-local-cluster")])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write(self.path("ca.crt"), certificate.public_bytes(serialization.Encoding.PEM))

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return self.folder / name

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + _VALID)
        )

    def sign(self, name: str, common_name: str, *, group: str = "", address: str = "") -> None:
        """Write ``name.crt`` and ``name.key``: for a client in ``group``, and for a server at ``address`` if given."""
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = self._builder(x509.Name(attributes), key.public_key())
        if address:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(address))]
            names += [x509.DNSName(n) for n in ("localhost", "kubernetes.default.svc")]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write(self.path(f"{name}.crt"), certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(self.path(f"{name}.key"), key)

    def key_pair(self, name: str) -> None:
        """Write a bare key pair, ``name.key`` and ``name.pub``: for service account tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(self.path(f"{name}.key"), key)
        _write(
            self.path(f"{name}.pub"),
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        )
