"""The verbs of split learning, from certificates to a merged run, and what they say of mistakes."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from situs.cli.main import main
from situs.cli.split import ClientArgs
from situs.errors import SitusError

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
        assert "`situs split merge` joins both parts" in told and "were spent in the network" in told
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
    assert "folder of certificates" in told and "--tls" in told and "--plaintext" in told
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


class Writer:
    """A writer that says the words that it is given, backwards, and takes a second for each text."""

    def __init__(self) -> None:
        self.count, self.now, self.opened, self.asked = 0, 0.0, [], []

    @contextmanager
    def open(self, folder, call, **options):
        self.opened.append((folder, call, options))
        yield self

    def write(self, text, **words):
        self.asked.append(words)
        self.now += 1.0
        for piece in reversed(text.split()):
            self.count += 1
            yield f" {piece}"


@pytest.fixture
def writer(monkeypatch) -> Writer:
    made = Writer()
    monkeypatch.setattr("situs.split.generate.open_writer", made.open)
    monkeypatch.setattr("situs.cli.split.time.perf_counter", lambda: made.now)
    return made


def test_a_text_is_continued_on_the_same_line(tmp_path, writer, capsys) -> None:
    words = ("--max-tokens", "9", "--temperature", "0.5", "--seed", "3", "--defences", "noise=1", "--device", "cpu")
    assert main(["split", "infer", "run", "--server", "local", "--generate", "it was a sea", *words]) == 0
    told = capsys.readouterr()
    assert told.out == " sea a was it\n4 tokens, 4 tokens per second\n"
    assert writer.asked == [{"max_tokens": 9, "temperature": 0.5, "seed": 3}]
    assert writer.opened == [
        (Path("run"), None, {"key": None, "withheld": None, "defence": "noise=1", "device": "cpu"})
    ]


def test_each_line_of_a_file_is_continued_behind_itself(tmp_path, writer, capsys) -> None:
    (tmp_path / "prompts.txt").write_text("a b\nc d e\n")
    where = ("split", "infer", "run", "--server", "local", "--prompts", str(tmp_path / "prompts.txt"))
    assert main([*where]) == 0
    told = capsys.readouterr()
    assert told.out == "a b b a\nc d e e d c\n5 tokens, 2.5 tokens per second\n"
    assert writer.asked == [{"max_tokens": 128, "temperature": 0.0, "seed": 0}] * 2
    assert main([*where, "--generate", "x", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["texts"] == [
        {"prompt": "x", "text": " x"}, {"prompt": "a b", "text": " b a"}, {"prompt": "c d e", "text": " e d c"},
    ]  # fmt: skip
    assert (document["tokens"], document["seconds"]) == (11, 3.0)  # of both calls; three texts, a second each


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--generate", "x", "--count", "3"), "count: has no effect when text is generated; leave it out (--count)"),
        (("--generate", "x", "--data", "d"), "data: has no effect when text is generated; leave it out (--data)"),
        (("--generate", "x", "--permute", "rows"), "permute: has no effect when text is generated"),
        (("--defences", "noise=1"), "defence: cannot be changed, because the run keeps the defence of its training"),
        (("--permute", "rows"), "permute: applies only with server=local"),
    ],
)
def test_what_has_no_effect_on_inference_is_refused(words, said, tmp_path, capsys) -> None:
    where = ("--server", "127.0.0.1:1", "--plaintext")
    assert said in said_of(capsys, "split", "infer", str(tmp_path), *where, *words)


def said_of(capsys, *words: str) -> str:
    return said(capsys, *words, status=2)


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ({"plaintext": True}, ["--plaintext"]),
        ({"tls": Path("certs")}, ["--tls", Path("certs")]),
        ({"tls": Path("certs"), "name": "ann"}, ["--tls", Path("certs"), "--name", "ann"]),
        ({"plaintext": True, "key": Path("k")}, ["--plaintext", "--key", Path("k")]),
    ],
)
def test_the_flags_that_reach_the_same_server_again(given, again) -> None:
    assert ClientArgs(server="host:1", **given).again() == ["--server", "host:1", *again]


@pytest.mark.parametrize("given", [{}, {"tls": Path("x"), "plaintext": True}])
def test_either_certificates_or_plaintext(given) -> None:
    with pytest.raises(SitusError, match="give either --tls with a folder of certificates"):
        ClientArgs(server="host:1", **given).credentials("client")
    assert ClientArgs(server="host:1", plaintext=True).credentials("client") is None
