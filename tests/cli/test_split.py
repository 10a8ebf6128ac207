"""The verbs of split learning, from certificates to a merged run, and what they say of mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from situs.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
from served import serving

FLAGS = [  # no method: labels stay with the client, so that it is supervised
    "--backbone.name",
    "vit_tiny_patch16_224",
    "--backbone.patch-size",
    "7",
    "--backbone.num-classes",
    "10",
    "--backbone.drop-path",
    ".1",
    "--backbone.model-args.depth",
    "2",
    "--backbone.model-args.embed-dim",
    "16",
    "--backbone.model-args.num-heads",
    "2",
    "--data",
    "samples",
    "--data.img-size",
    "28",
    "--data.channels",
    "1",
    "--batch",
    "4",
    "--optim.lr",
    "1e-3",
    "--optim.clip",
    ".5",
    "--optim.ema",
    ".9",
    "--train.precision",
    "fp32",
    "--steps",
    "2",
    "--train.epochs",
    "none",
    "--train.save-every",
    "1",
]


def said(capsys, *words: str, status: int = 0) -> str:
    assert main(list(words)) == status
    told = capsys.readouterr()
    return told.out + told.err


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "certs"
    assert main(["split", "certs", "--out", str(out)]) == 0
    return out


def test_train_infer_and_merge(tmp_path, certs, capsys) -> None:
    from situs.split.transport.certificates import read_credentials

    tls = ("--tls", str(certs))
    with serving(tmp_path / "server", read_credentials(certs, "server")) as server:
        where = ("--server", server.address, *tls)
        run, whole = str(tmp_path / "split"), str(tmp_path / "whole")
        told = said(capsys, "split", "train", *where, *FLAGS, "--permute", "rows,columns", "--out", run)
        assert "done: 2 steps" in told and f"next: situs split infer {run} --server {server.address} --tls" in told
        assert (tmp_path / "split" / "owner.key").stat().st_mode & 0o777 == 0o600
        assert "is not empty" in said(capsys, "split", "train", *where, *FLAGS, "--out", str(tmp_path), status=2)
        told = said(capsys, "split", "train", *where, "--resume", run, "--steps", "3")
        assert "done: 3 steps" in told
        assert "recognises" in said(capsys, "split", "infer", run, *where, "--count", "50")
        assert "after 3 steps" in said(capsys, "split", "merge", run, str(tmp_path / "server"), "--out", whole)
        wrong = ["32" if word == "16" else word for word in FLAGS]
        told = said(capsys, "split", "train", *where, *wrong, "--out", str(tmp_path / "no"), status=2)
        assert "start both sides with the same preset and model" in told
        wrong = [*FLAGS, "--permute", "rows", "--backbone.positions", "relative"]
        told = said(capsys, "split", "train", *where, *wrong, "--out", str(tmp_path / "no2"), status=2)
        assert "permute=rows" in told and "(--permute)" in told and not (tmp_path / "no2").exists()


def test_without_a_server_it_is_an_ordinary_run(tmp_path, capsys) -> None:
    run, where = str(tmp_path / "run"), ("--server", "local")
    hide = ("--permute", "rows", "--defences", "noise=1")
    told = said(capsys, "split", "train", *where, *FLAGS, *hide, "--out", run)
    assert "done: 2 steps" in told and f"situs evaluate accuracy {run}" in told
    assert "done: 3 steps" in said(capsys, "split", "train", *where, "--resume", run, "--steps", "3")
    told = said(capsys, "split", "train", *where, "--resume", run, "--steps", "4", "--defences", "none", status=2)
    assert "defence='none': must be noise=1" in told and "(--defences)" in told
    assert "recognises" in said(capsys, "split", "infer", run, *where, "--count", "50", "--out", str(tmp_path / "page"))
    assert "top1" in (tmp_path / "page" / "accuracy.json").read_text()
    no = ("--out", str(tmp_path / "no"))
    told = said(capsys, "split", "train", *where, *FLAGS, "--permute", "columns", *no, status=2)
    assert "no effect without a server" in told and "(--permute)" in told and not (tmp_path / "no").exists()
    told = said(capsys, "split", "train", *where, *FLAGS, status=2)
    assert "give either a new folder or a run to resume" in told


def test_serve_says_what_is_wrong_and_stops_when_asked(tmp_path, certs, capsys, monkeypatch) -> None:
    out = ("--out", str(tmp_path / "server"))
    told = said(capsys, "split", "serve", *FLAGS, *out, status=2)
    assert "folder of certificates" in told and "(--tls, --plaintext)" in told
    told = said(capsys, "split", "serve", *FLAGS, *out, "--plaintext", "--listen", "0.0.0.0:0", status=2)
    assert "plaintext is allowed only on this machine" in told
    told = said(capsys, "split", "serve", *FLAGS, *out, "--plaintext", "--listen", "7443", status=2)
    assert "must be HOST:PORT" in told and "(--listen)" in told
    assert not (tmp_path / "server").exists()  # no folder is left behind
    told = said(capsys, "split", "serve", *FLAGS, *out, "--tls", str(tmp_path), status=2)
    assert "ca.pem: cannot be read: no such file" in told and "(--tls)" in told
    monkeypatch.setattr(
        "situs.train.interrupt.Interrupt.__enter__", lambda self: setattr(self, "requested", True) or self
    )
    told = said(capsys, "split", "serve", *FLAGS, *out, "--tls", str(certs), "--listen", "127.0.0.1:0")
    assert "listening on 127.0.0.1:" in told and "stopped; refused requests: none" in told


def test_what_is_wrong_with_certificates_and_ports_is_said_in_one_sentence(tmp_path, certs, capsys) -> None:
    from situs.split.transport.certificates import read_credentials

    old, other = tmp_path / "old", tmp_path / "other"
    said(capsys, "split", "certs", "--out", str(old), "--days", "0")
    said(capsys, "split", "certs", "--out", str(other))
    out, quick = ("--out", str(tmp_path / "run")), ("--patience", "0.1")
    with serving(tmp_path / "server", read_credentials(certs, "server")) as server:
        train = ("split", "train", "--server", server.address, *quick, *FLAGS, *out)
        for folder, reason in (
            (old, "ca.pem: expired on"),
            (other, "its certificate was issued by another authority, has expired, or is for another address"),
        ):
            told = said(capsys, *train, "--tls", str(folder), status=2)
            assert reason in told and len(told.strip().splitlines()) <= 2 and "Traceback" not in told
        listen = ("--listen", server.address, "--tls", str(certs), "--out", str(tmp_path / "second"))
        told = said(capsys, "split", "serve", *FLAGS, *listen, status=2)
        assert "the port is in use" in told and "(--listen)" in told
        told = said(capsys, "split", "serve", *FLAGS, "--tls", str(old), "--out", str(tmp_path / "third"), status=2)
        assert "expired on" in told and not (tmp_path / "third").exists()
    assert not (tmp_path / "run").exists()


def test_a_client_without_a_server_says_so_and_leaves_nothing(tmp_path, capsys) -> None:
    where = ("--server", "127.0.0.1:1", "--plaintext", "--patience", "0.1")
    told = said(capsys, "split", "train", *where, *FLAGS, "--out", str(tmp_path / "run"), status=2)
    assert "127.0.0.1:1: no answer for" in told and "nothing listens there (--server)" in told
    assert not (tmp_path / "run").exists()
    assert "the client's part" in said(capsys, "split", "infer", str(tmp_path), *where, status=2)
