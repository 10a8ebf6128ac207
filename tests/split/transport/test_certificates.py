"""Certificates: what is made can be used, and what a peer would refuse is refused here, in one sentence."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import ssl
from types import SimpleNamespace

import pytest

from situs.errors import SitusError
from situs.split.transport import certificates
from situs.split.transport.certificates import DenyList, fingerprint, make_certificates, read_credentials


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "certs"
    make_certificates(out, hosts=("split.example", "10.1.2.3"), clients=("client", "ann"))
    return out


def test_what_is_made_is_private_and_can_be_read(folder) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "ann.key", "ann.pem", "ca.pem", "client.key", "client.pem", "server.key", "server.pem",
    ]  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all((folder / f"{name}.key").stat().st_mode & 0o777 == 0o600 for name in ("server", "client", "ann"))
    for name in ("server", "client", "ann"):
        assert b"PRIVATE" in read_credentials(folder, name).key
        assert "PRIVATE" not in repr(read_credentials(folder, name))
    der = ssl.PEM_cert_to_DER_cert((folder / "ann.pem").read_text())
    assert fingerprint((folder / "ann.pem").read_bytes()) == hashlib.sha256(der).hexdigest()
    with pytest.raises(SitusError, match="not empty"):
        make_certificates(folder)
    for name in ("../x", "", "a" * 65, "a b", "ca", "server"):
        with pytest.raises(SitusError, match=re.escape(f"clients={name!r}")):
            make_certificates(folder.parent / "other", clients=("a" * 64, name))
    assert not (folder.parent / "other").exists()


def test_the_lines_name_the_authority_and_the_fingerprint_of_each_certificate(tmp_path) -> None:
    first, *others = make_certificates(tmp_path / "certs", clients=("ann",), days=1)
    assert first == f"{tmp_path / 'certs' / 'ca.pem'}: the authority, valid for 1 day; its key is not stored"
    names = [tmp_path / "certs" / f"{name}.pem" for name in ("server", "ann")]
    assert others == [f"{name}: fingerprint {fingerprint(name.read_bytes())}" for name in names]


def test_certificates_have_the_extensions_that_each_use_needs(folder) -> None:
    """As RFC 5280 has it: whether a certificate may issue others is critical, and each other one has one use."""
    x509 = pytest.importorskip("cryptography.x509")
    uses = {"ca": None, "server": "serverAuth", "client": "clientAuth", "ann": "clientAuth"}
    for name, use in uses.items():
        made = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()).extensions
        basic = made.get_extension_for_class(x509.BasicConstraints)
        assert basic.critical and (basic.value.ca, basic.value.path_length) == (
            (True, 0) if use is None else (False, None)
        )
        shown = {type(each.value): each for each in made}
        assert (x509.SubjectAlternativeName in shown) == (name == "server")
        if use is not None:
            usage = shown[x509.ExtendedKeyUsage]
            assert [each._name for each in usage.value] == [use] and not usage.critical
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "split.example"]
    assert [*map(str, names.get_values_for_type(x509.IPAddress))] == ["127.0.0.1", "::1", "10.1.2.3"]


def test_what_a_peer_would_refuse_is_refused_here(folder, tmp_path) -> None:
    other, old = tmp_path / "other", tmp_path / "old"
    make_certificates(other)
    make_certificates(old, days=0)
    with pytest.raises(SitusError, match=r"ca\.pem: expired on"):
        read_credentials(old, "client")
    with pytest.raises(SitusError, match=r"bob\.pem: cannot be read: no such file"):
        read_credentials(folder, "bob")
    (other / "client.pem").write_bytes((folder / "client.pem").read_bytes())
    with pytest.raises(SitusError, match="does not belong to the private key"):
        read_credentials(other, "client")
    (other / "client.key").write_bytes((folder / "client.key").read_bytes())
    with pytest.raises(SitusError, match=r"was not issued by ca\.pem"):
        read_credentials(other, "client")
    (other / "client.key").chmod(0o644)
    with pytest.raises(SitusError, match="other users can read this key"):
        read_credentials(other, "client")
    (other / "server.pem").write_bytes(b"nonsense")
    with pytest.raises(SitusError, match="cannot be read as PEM"):
        read_credentials(other, "server")


def test_a_list_of_the_denied_is_read_again_when_it_changes(folder, tmp_path) -> None:
    file = tmp_path / "deny"
    pem = (folder / "ann.pem").read_bytes()
    with pytest.raises(SitusError, match="cannot be read"):
        DenyList(file)
    file.write_text("# nobody\n")
    denied = DenyList(file)
    assert not denied("ann", pem)
    file.write_text("bob\nann  # left us\n")
    assert denied("ann", b"") and denied("bob", b"") and not denied("client", pem)
    number = fingerprint(pem).upper()
    file.write_text(":".join(number[i : i + 2] for i in range(0, 64, 2)))
    assert denied("any name", pem) and not denied("ann", b"")
    file.unlink()
    assert denied("any name", pem)  # a list that is gone denies whom it denied
    assert not DenyList(None)("ann", pem)


def test_a_certificate_is_valid_from_its_first_minute_to_its_last(folder, monkeypatch) -> None:
    made = certificates._x509().load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    first, last = made.not_valid_before_utc, made.not_valid_after_utc
    assert last - first == dt.timedelta(days=30, minutes=5)  # a clock that is a little behind sees it too
    second = dt.timedelta(seconds=1)
    for now, said in (
        (first - second, rf"ca\.pem: is not valid before {first:%Y-%m-%d %H:%M} UTC"),
        (last + second, rf"ca\.pem: expired on {last:%Y-%m-%d %H:%M} UTC"),
        (first, None),
        (last, None),
    ):
        clock = SimpleNamespace(now=lambda _, now=now: now)
        monkeypatch.setattr(certificates, "dt", SimpleNamespace(UTC=dt.UTC, datetime=clock))
        if said is None:
            assert read_credentials(folder, "client").certificate
            continue
        with pytest.raises(SitusError, match=said) as told:
            read_credentials(folder, "client")
        assert told.value.field == "tls"
