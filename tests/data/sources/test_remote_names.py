"""Addresses: patterns, and what is shown of them."""

from __future__ import annotations

import pytest

from situs.data.sources.remote import check_address, expand, is_remote, redacted
from situs.errors import SitusError


def test_patterns():
    assert expand("https://h/a.tar") == ["https://h/a.tar"]
    assert expand("https://h/{098..101}.tar")[::3] == ["https://h/098.tar", "https://h/101.tar"]
    assert expand("s3://b/{train,val}/{9..10}.tar") == [
        *("s3://b/train/9.tar", "s3://b/train/10.tar", "s3://b/val/9.tar", "s3://b/val/10.tar")
    ]
    for bad in ("s3://b/{}.tar", "s3://b/{a}.tar", "s3://b/{5..3}.tar", "s3://b/{0..200000}.tar"):
        with pytest.raises(SitusError, match="must"):
            expand(bad)
    assert [len(expand(f"s3://b/{some}.tar")) for some in ("{1..100000}", "{0..9999}{0..9}")] == [100_000] * 2
    with pytest.raises(SitusError, match=r"b/\{0..100000\}: \{0..100000\} must count upwards, over at most 100,000"):
        expand("s3://b/{0..100000}")
    with pytest.raises(SitusError, match="matches 100,001 addresses; at most 100,000 are allowed"):
        expand("s3://b/{0..9090}-{1..11}.tar")
    with pytest.raises(SitusError, match="matches 1,000,000,000 addresses"):
        expand("s3://b/{0..999}{0..999}{0..999}.tar")


def test_what_is_remote():
    assert all(map(is_remote, ("http://h/x", "https://h", "s3://b/k", "gs://b", "file:///x", "hf://datasets/a")))
    assert not any(map(is_remote, ("photos", "/a/b", "C:\\x", "samples", "a:b", "./x://y")))


def test_nothing_secret_is_shown():
    assert redacted("no https://me:pw@host:8/a/b.tar?X-Signature=abc#f here") == "no https://host:8/a/b.tar here"
    assert "pw" not in redacted("https://me:pw@host/a?k=pw")
    assert redacted("no https://[me:pw@host/a here") == "no https://… here"  # no address at all
    with pytest.raises(SitusError, match=r"https://host/x.tar: must not contain a user or a password") as met:
        check_address("https://me:secret@host/x.tar")
    assert "secret" not in str(met.value)
    check_address("https://host/x.tar?token=1")
