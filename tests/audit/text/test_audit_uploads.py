"""Captured uploads of language models: made by transformers itself, read by the attack, and never passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_texts import write_folder
from torch import Tensor

import situs
from situs.cli.main import main
from situs.errors import SitusError
from situs.gate import ABOVE, NOT_JUDGED

RATE = 0.5
LINES = ("w3 w7 w1 w9", "w4 w3 w8 w2")


class Client:
    """A client's folder, and its round by transformers: gradients, and the weights before and after."""

    def __init__(self, folder: Path, kind: str, **fields: Any) -> None:
        import transformers

        self.folder = write_folder(folder / kind.replace(" ", "-"), kind, width=64, **fields)
        self.texts = folder / "lines.txt"
        self.texts.write_text("\n".join(LINES))
        auto = transformers.AutoModelForCausalLM if kind in ("gpt2", "llama") else None
        auto = auto or transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(self.folder).eval()
        batch = transformers.AutoTokenizer.from_pretrained(self.folder)(list(LINES), return_tensors="pt")
        labels = batch["input_ids"] if kind in ("gpt2", "llama") else torch.tensor([1, 0])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(**batch, labels=labels).loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.optim.SGD(model.parameters(), lr=RATE).step()
        self.after = {name: value.clone() for name, value in model.state_dict().items()}
        self.difference = {name: value - self.after[name] for name, value in before.items()}

    def audit(self, upload: Any, *defences: str, **asked: Any) -> Any:
        asked = {"batch": 2, "fail_above": "tokens=0.5"} | asked
        return situs.audit_texts(self.folder, self.texts, upload=upload, defences=defences or ("none",), **asked)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(tmp_path_factory.mktemp("bert"), "bert")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_sentences_come_back_from_gradients_of_transformers(kind: str, tmp_path: Path) -> None:
    client = Client(tmp_path, kind, **({"tie_word_embeddings": True} if kind == "llama" else {}))
    audit = client.audit(client.gradients)
    [finding] = audit.findings
    assert finding.whole == 2 and audit.ruling.status == ABOVE
    assert "word gradient sent" in finding.defence and "upload 1 (gradient)" in audit.provenance.facts["uploads"]


def test_weights_with_names_that_a_state_dict_has_twice(tmp_path: Path) -> None:
    client = Client(tmp_path, "gpt2")
    assert {*client.after} > {*client.gradients}  # the head is the embedding
    audit = client.audit(client.after, f"fedavg=1:{RATE}")
    assert audit.provenance.facts["uploads"] == "upload 1 (weights)"
    assert audit.ruling.status in (ABOVE, NOT_JUDGED)
    assert audit.findings[0].shares["words"] > 0


def test_noise_and_other_sentences_are_inconclusive(bert: Client, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    noisy = {name: g + torch.randn(g.shape, generator=chance) for name, g in bert.gradients.items()}
    for stated in ("noise=1", "none"):
        audit = bert.audit(noisy, stated)
        assert audit.ruling.status == NOT_JUDGED and not audit.findings[0].whole
        assert all(read.picked is None for finding in audit.findings for read in finding.reads)
    other = tmp_path / "other.txt"
    other.write_text("w40 w41 w42\nw43 w44 w45")
    audit = situs.audit_texts(bert.folder, other, upload=bert.gradients, batch=2, fail_above="tokens=0.5")
    assert audit.ruling.status == NOT_JUDGED and not audit.findings[0].whole


def test_stated_noise_is_not_believed(bert: Client) -> None:
    audit = bert.audit(bert.gradients, "noise=1")
    assert len(audit.findings) == 2 and audit.findings[1].whole == 2 and audit.ruling.status == ABOVE


def test_words_are_read_where_sentences_cannot_be_tested(bert: Client) -> None:
    """Zeros beside the gradient of the words, one missing matrix of the first block, or one beyond half precision."""
    empty = {name: g if "word_embeddings" in name else torch.zeros_like(g) for name, g in bert.gradients.items()}
    dense = next(name for name in bert.gradients if name.endswith("attention.output.dense.weight"))
    part = {name: g for name, g in bert.gradients.items() if name != dense}
    beyond = {name: g.half() for name, g in part.items()}
    beyond[dense] = torch.full_like(bert.gradients[dense].half(), torch.inf)
    audits = [
        bert.audit(upload, stated, fail_above="words=0.5")
        for upload, stated in ((empty, "none"), (part, f"exclude={dense}"), (beyond, "none"))
    ]
    for audit in audits:
        assert audit.ruling.status == ABOVE and audit.findings[0].shares["words"] == 1
    for audit in audits[:2]:
        assert any("is not sent, so words cannot be tested" in remark.text for remark in audit.findings[0].remarks)


def test_equations_that_cannot_be_solved_are_a_gap(bert: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise np.linalg.LinAlgError("the matrix contains infinity or NaN")

    monkeypatch.setattr("situs.audit.text.audit.encoder_sentences", fail)
    audit = bert.audit(bert.gradients)
    assert audit.ruling.status == ABOVE  # by rows of words and places
    assert any("cannot be solved: the matrix" in remark.text for remark in audit.findings[0].remarks)


def test_what_is_not_sent_is_stated(bert: Client) -> None:
    embedding = next(name for name in bert.gradients if "word_embeddings" in name)
    part = {name: g for name, g in bert.gradients.items() if name != embedding}
    with pytest.raises(SitusError, match=r"lacks 1 of .*word_embeddings.*exclude=PATTERN"):
        bert.audit(part)
    audit = bert.audit(part, "exclude=word_embeddings")
    assert audit.ruling.status == ABOVE and all("withheld" in finding.defence for finding in audit.findings)
    assert max(finding.whole for finding in audit.findings) == 2


def test_mistakes_are_one_sentence(bert: Client, tmp_path: Path) -> None:
    def wrong(**asked: Any) -> str:
        with pytest.raises(SitusError) as raised:
            bert.audit(**{"upload": bert.gradients, **asked})
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "has only 2 sentences, but count=4" in wrong(upload=[bert.gradients, bert.gradients])
    assert "server=active" in wrong(server="active")
    alone = wrong(upload=None, sent="weights")
    assert alone.startswith("sent=weights") and "captured upload" in alone
    broken: dict[str, Tensor] = {**bert.gradients, "classifier.bias": torch.zeros(7)}
    assert "classifier.bias has shape [7]" in wrong(upload=broken)


def test_the_verb(bert: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(bert.gradients, "up.safetensors")
    words = [
        "audit",
        "texts",
        str(bert.folder),
        "--data",
        str(bert.texts),
        "--upload",
        "up.safetensors",
        "--batch",
        "2",
    ]
    assert main([*words, "--fail-above", "tokens=0.5", "--out", "out"]) == ABOVE
    assert "2 of 2 sentences" in capsys.readouterr().out and Path("out/texts.html").is_file()
    Path("up.safetensors").write_bytes(Path("up.safetensors").read_bytes()[:1000])
    assert main([*words, "--out", "none"]) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1 and "damaged, truncated" in sentence and "--upload" in sentence
    assert main(["audit", "gradients", str(bert.folder), "--upload", "up.safetensors"]) == 2
    assert "situs audit texts" in capsys.readouterr().err
