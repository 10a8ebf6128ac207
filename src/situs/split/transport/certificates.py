"""Certificates for mutual TLS in a folder, checked before anything is sent, and a list of denied ones.

ca.pem                     the authority that both sides trust
server.pem server.key      what the server shows        client.pem client.key      what the client shows
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from situs.errors import SitusError, counted, missing_extra, reason_of
from situs.files import make_folder, write_bytes

AUTHORITY = "ca"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Credentials:
    """The certificate and key of one side and the authority that it trusts, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError as error:
        raise missing_extra("cryptography", "split", "a certificate") from error
    return x509


def make_certificates(
    out: str | Path, *, hosts: Sequence[str] = (), clients: Sequence[str] = ("client",), days: int = 30
) -> list[str]:
    """Writes a temporary authority and a pair for the server and each client to a new folder; returns a line on each.

    hosts: names and addresses of the server beside this machine's. The authority's key is not stored, so nobody can
    issue further certificates.
    """
    x509 = _x509()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SitusError(f"{out}: is not empty; certificates need a new folder", field="out")
    for name in clients:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name in ("ca", "server"):
            raise SitusError(
                field="clients", value=name, allowed="letters, digits, '.', '_' or '-', and not ca or server"
            )
    make_folder(out)
    out.chmod(0o700)
    now = dt.datetime.now(dt.UTC)
    root = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "situs split, to try it out")])

    def issue(name: Any, public: Any, *, use: Any = None, ca: bool = False) -> Any:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        )
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if use == ExtendedKeyUsageOID.SERVER_AUTH:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([*map(_place, (*LOOPBACK, *hosts))]), critical=False
            )
        return builder.sign(root, SHA256())

    authority = issue(issuer, root.public_key(), ca=True)
    write_bytes(out / f"{AUTHORITY}.pem", authority.public_bytes(Encoding.PEM))
    lines = [f"{out / 'ca.pem'}: the authority, valid for {counted(days, 'days')}; its key is not stored"]
    for name in ("server", *clients):
        key = ec.generate_private_key(ec.SECP256R1())
        use = ExtendedKeyUsageOID.SERVER_AUTH if name == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = issue(subject, key.public_key(), use=use).public_bytes(Encoding.PEM)
        write_bytes(out / f"{name}.pem", certificate)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_bytes(out / f"{name}.key", secret, private=True)
        lines.append(f"{out / name}.pem: fingerprint {fingerprint(certificate)}")
    return lines


def _place(host: str) -> Any:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def read_credentials(folder: str | Path, name: str) -> Credentials:
    """The credentials of one side; refused if a peer would refuse them: expired, or of another authority."""
    x509, folder = _x509(), Path(folder)
    files = [folder / f"{AUTHORITY}.pem", folder / f"{name}.pem", folder / f"{name}.key"]
    authority, certificate, key = map(_read, files)
    if os.name == "posix" and stat.S_IMODE(files[2].stat().st_mode) & 0o077:
        raise SitusError(f"{files[2]}: other users can read this key; run chmod 600 on it first", field="tls")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        trusted, shown = x509.load_pem_x509_certificate(authority), x509.load_pem_x509_certificate(certificate)
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        raise SitusError(
            f"{folder}: {', '.join(file.name for file in files[:2])} or {files[2].name} cannot be read as PEM (a key "
            f"with a password is not supported): {str(error)[:120]}",
            field="tls",
        ) from None
    _check_time(files[0], trusted)
    _check_time(files[1], shown)
    if private.public_key() != shown.public_key():
        raise SitusError(
            f"{files[1]}: this certificate does not belong to the private key {files[2].name}", field="tls"
        )
    try:
        shown.verify_directly_issued_by(trusted)
    except (ValueError, TypeError, InvalidSignature):
        raise SitusError(
            f"{files[1]}: was not issued by {files[0].name}, so the other side would refuse it", field="tls"
        ) from None
    return Credentials(authority, certificate, key)


def _check_time(path: Path, certificate: Any) -> None:
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        raise SitusError(f"{path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", field="tls")
    if now < certificate.not_valid_before_utc:
        raise SitusError(
            f"{path}: is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC", field="tls"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {reason_of(error)}", field="tls") from None


def fingerprint(pem: bytes) -> str:
    """The SHA-256 of a certificate, as openssl prints it but without colons and in lower case."""
    match = _PEM.search(pem)
    return hashlib.sha256(base64.b64decode(match[1])).hexdigest() if match else ""


class DenyList:
    """A file of fingerprints or common names, one on each line, read again whenever it changes. # starts a comment."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._stamp: tuple[int, ...] | None = None
        self._names: frozenset[str] = frozenset()
        if self.path is not None:
            self._look(first=True)

    def _look(self, *, first: bool = False) -> None:
        assert self.path is not None
        try:
            status = self.path.stat()
            stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
            if stamp != self._stamp:
                lines = [line.partition("#")[0].strip() for line in self.path.read_text(encoding="utf-8").splitlines()]
                self._names = frozenset(line.replace(":", "").lower() for line in lines if line)
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            if first:
                raise SitusError(f"{self.path}: cannot be read: {error}", field="deny") from None
            # A list that can no longer be read stays in force.

    def __call__(self, name: str, pem: bytes) -> bool:
        """Whether this certificate is denied."""
        if self.path is None:
            return False
        self._look()
        return name.replace(":", "").lower() in self._names or fingerprint(pem) in self._names
