"""Text MJP: who knows of hidden places gets every word back, and the gaps in any order; who does not gets less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.deadline import Deadline
from situs.audit.defences import Clip
from situs.audit.text.encoder import encoder_sentences
from situs.audit.text.recovered import UNNAMED, Recovered
from situs.audit.text.victim import TextVictim, text_gradients
from situs.backbones.hf.text import TextEncoder
from situs.core.when import When
from situs.data.batch import Batch
from situs.methods import MJP, MJPConfig

TEXTS = ("3 7 1 9 12 20", "4 3 8 2 9 31 40")


@pytest.fixture(scope="module")
def hiding(tmp_path_factory: pytest.TempPathFactory) -> TextVictim:
    made = victim(tmp_path_factory.mktemp("hidden"), "bert", width=64)
    torch.manual_seed(2)
    method = wide(MJP(made.backbone, MJPConfig(mask_ratio=0.4)))
    return replace(made, method=method)


def wide(method: MJP) -> MJP:
    """With a vector of unknown places that is as large as those of words, as after a training."""
    with torch.no_grad():
        method.unknown.mul_(15)
    return method.double().eval()


def attack(made: TextVictim, *texts: str, aware: bool) -> Recovered:
    truth = sentences(made, *texts)
    upload = text_gradients(made, truth, labels=[0, 1][: len(truth)], dtype=torch.float64)
    assert isinstance(made.backbone, TextEncoder)
    unknown = made.unknown if aware else None
    return encoder_sentences(made.backbone, upload, len(truth), torch.arange(len(WORDS)), Deadline(), unknown=unknown)


def hidden_of(made: TextVictim, *texts: str) -> list[list[int]]:
    """The hidden places of each sentence, by the step's own draws."""
    truth = sentences(made, *texts)
    ids = torch.zeros(len(truth), max(map(len, truth)), dtype=torch.int64)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(each) for each in truth])[:, None]
    assert made.method is not None
    draws = made.method.draw(Batch(ids, torch.arange(len(truth)), {}, mask), When(seed=0, epoch=0))
    return [row.nonzero()[:, 0].tolist() for row in draws["mask"]]


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS])
def test_who_knows_gets_every_word_and_the_places_that_are_told(hiding: TextVictim, texts: tuple[str, ...]) -> None:
    found, truth = attack(hiding, *texts, aware=True), sentences(hiding, *texts)
    assert len(found.sentences) == len(truth) and found.reason is None
    for sentence, gaps in zip(truth, hidden_of(hiding, *texts), strict=True):
        assert gaps  # something was hidden
        [own] = [each for each in found.sentences if sorted(each) == sorted(sentence)]
        assert all(own[place] == sentence[place] for place in range(len(sentence)) if place not in gaps)


def test_all_that_is_trained_is_sent(hiding: TextVictim) -> None:
    made = replace(hiding, method=MJP(hiding.backbone, MJPConfig(mask_ratio=0.4, dal="linear")).double().eval())
    truth, asked = sentences(made, TEXTS[0]), {"labels": [1], "dtype": torch.float64}
    sent, method = text_gradients(made, truth, **asked), made.method
    assert isinstance(method, MJP)
    backbone = {name for name, _ in made.backbone.named_parameters()}
    assert sent.keys() - backbone == {name for name, _ in method.named_parameters() if not name.startswith("backbone.")}
    ids = torch.tensor(truth)
    batch = Batch(ids, torch.arange(1), {"label": torch.tensor([1])}, torch.ones_like(ids, dtype=torch.bool))
    draws, step = method.draw(batch, When(seed=0, epoch=0)), torch.randn(64, dtype=torch.float64) * 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            method.unknown += sign * step
            losses.append(float(method(batch, draws).loss))
            method.unknown -= sign * step
    assert (losses[0] - losses[1]) / 2 == pytest.approx(float(sent["unknown"] @ step), rel=1e-5)
    norm = torch.stack([each.norm() for each in sent.values()]).norm()
    clipped = text_gradients(made, truth, defence=Clip(float(norm) / 2, 0.0), **asked)
    assert torch.allclose(clipped["unknown"], sent["unknown"] / 2, atol=1e-12)  # which counts in what is clipped


def test_who_does_not_know_gets_no_whole_sentence(hiding: TextVictim) -> None:
    found, truth = attack(hiding, *TEXTS, aware=False), sentences(hiding, *TEXTS)
    assert not {tuple(sorted(each)) for each in found.sentences} & {tuple(sorted(each)) for each in truth}
    known = {sentence[place] for sentence, gaps in zip(truth, hidden_of(hiding, *TEXTS), strict=True)
             for place in range(len(sentence)) if place not in gaps}  # fmt: skip
    assert known <= found.words  # words behind a hidden place are found all the same


def test_who_does_not_know_gets_the_other_words_of_one_sentence_at_their_places(hiding: TextVictim) -> None:
    found, text = attack(hiding, TEXTS[0], aware=False), TEXTS[0]
    [truth], [gaps], [own] = sentences(hiding, text), hidden_of(hiding, text), found.sentences
    last = max(place for place in range(len(truth)) if place not in gaps)
    assert own == tuple(UNNAMED if place in gaps else truth[place] for place in range(last + 1))
    assert gaps and "no complete sentence" in str(found.reason)


def test_who_knows_looks_behind_a_long_hidden_span(tmp_path: Path) -> None:
    """Ten hidden places in a row, and words behind them: he knows that a span may be long, and does not stop there."""
    made = victim(tmp_path, "bert", width=64, max_position_embeddings=40)
    torch.manual_seed(2)
    method = wide(MJP(made.backbone, MJPConfig(mask_ratio=0.5)))
    hide = torch.zeros(1, 22, dtype=torch.bool)
    hide[:, 6:16] = True
    method.draw = lambda *_, **__: {"mask": hide, "index": torch.arange(22)[None], "dal_weight": torch.tensor(0.0)}
    made, text = replace(made, method=method), " ".join(str(word) for word in range(3, 43, 2))
    found, [truth] = attack(made, text, aware=True), sentences(made, text)
    [own] = found.sentences
    assert sorted(own) == sorted(truth) and own[:6] == truth[:6] and own[16:] == truth[16:]


def test_a_sentence_longer_than_the_last_block_has_directions(tmp_path: Path) -> None:
    """Of the last block [CLS] alone is read: few directions, which refute no sentence that solves the first block."""
    made = victim(tmp_path, "bert", width=64)
    for text in (" ".join(str(word) for word in range(3, 31, 2)), "5 5 9 5 1 2 3 4 6 7 8"):
        found, [truth] = attack(made, text, aware=False), sentences(made, text)
        assert found.sentences == (truth,) and found.reason is None


def test_a_run_of_text_mjp_is_audited_by_both_attackers(tmp_path: Path) -> None:
    from sentences import write_set
    from tiny_texts import write_folder

    import situs

    folder, data = write_folder(tmp_path / "bert", "bert", width=64), write_set(tmp_path / "set")
    method = {"name": "mjp", "mask_ratio": 0.5}
    told = {"quiet": True, "device": "cpu", "validate_every": 0}
    run = situs.finetune(folder, data=data, out=tmp_path / "run", method=method, batch=8, steps=1, **told)
    (tmp_path / "lines.txt").write_text("w3 w7 w1 w9 w12 w20\n")
    audit = situs.audit_texts(run, tmp_path / "lines.txt", count=1)
    rows = {row.defence: row for row in audit.findings}
    assert list(rows) == [
        f"MJP {known}, word gradient {sent}" for known in ("known", "not known") for sent in ("sent", "withheld")
    ]
    aware, naive = (rows[f"MJP {known}, word gradient withheld"] for known in ("known", "not known"))
    assert aware.shares["words"] == 1 and naive.whole == 0 and "mjp" in audit.notes
    assert naive.shares["words"] < 1 == rows["MJP not known, word gradient sent"].shares["words"]  # its rows name them
    assert aware.shares["tokens"] >= naive.shares["tokens"]
