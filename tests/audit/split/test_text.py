"""`audit split` on texts, from a model's folder to verdict, gate and page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_texts import write_folder

import situs
from situs.audit.deadline import Deadline
from situs.audit.split.prompts import Reading
from situs.audit.split.text import (
    PROMPTS,
    PromptAudit,
    Row,
    _coded,
    _Trial,
    audit_prompts,
    fixed_words,
    parse_depths,
    text_veils,
)
from situs.audit.text.recovered import Read
from situs.audit.text.result import finding_of
from situs.backbones.hf.text import open_tokeniser
from situs.cli.main import main
from situs.errors import SitusError
from situs.findings import Certificate
from situs.gate import ABOVE, NOT_JUDGED, Limit
from situs.locks.veil import Veil
from situs.models import open_model
from situs.pages import make_page
from situs.split.generate import open_writer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small models, and a file of texts."""
    folder, chance = tmp_path_factory.mktemp("texts"), torch.Generator().manual_seed(0)
    lines = [
        " ".join(f"w{int(word)}" for word in torch.randint(55, (int(count),), generator=chance))
        for count in torch.randint(3, 13, (64,), generator=chance)
    ]
    (folder / "texts.txt").write_text("\n".join(lines))
    made = {kind: write_folder(folder / kind, kind) for kind in ("llama", "bert")}
    return {**made, "texts": folder / "texts.txt"}


@pytest.fixture(scope="module")
def audit(files: dict[str, Path]) -> PromptAudit:
    noise = ("none", "noise=0.05", "noise=30")
    return audit_prompts(files["llama"], files["texts"], depth=("0", "last"), defences=noise, count=2, public=40)


def test_what_is_sent_is_read_unless_noise_hides_it(audit: PromptAudit) -> None:
    by_name = {finding.defence: finding for finding in audit.findings}
    for name in ("depth 0", "depth 0, columns", "depth 1", "depth 1, columns", "depth 1, noise=0.05"):
        finding = by_name[name]
        assert finding.whole == finding.count == 2 and finding.status == "done"
        assert all(certificate.holds for certificate in finding.certificates)
    for name in ("depth 0, noise=30", "depth 1, noise=30", "depth 1, noise=30 + columns"):
        assert by_name[name].whole == 0 and not any(one.holds for one in by_name[name].certificates)
        assert by_name[name].reasons and name in audit.verdict


def test_the_gate_fails_and_never_passes(audit: PromptAudit) -> None:
    ruling = replace(audit, limit=Limit("tokens", 0.5)).ruling
    assert ruling is not None
    status = {judged.defence: judged.status for judged in ruling.judgements}
    assert status["depth 0"] == status["depth 1, columns"] == ABOVE
    assert status["depth 1, noise=30"] == NOT_JUDGED  # a search that finds nothing proves nothing


def test_the_page_has_the_texts_beside_what_was_read(audit: PromptAudit) -> None:
    page = make_page(audit).render()
    assert make_page(audit).lead.startswith(
        'In the setting "depth 0", an honest server recovers 2 of 2 texts word for word, and '
        "100.0 % of the words of all texts."
    )
    assert "Threat model" in page and 'class="words"' in page and "does not know" in page
    assert audit.private and "words that the server reads, for each strength of the noise" in page
    plain = audit.without_pictures()
    assert 'class="words"' not in make_page(plain).render() and not plain.private
    words = json.dumps(audit.numbers())
    assert "w1" not in words and '"proved"' in words


def test_the_noise_is_as_strong_as_in_generation(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit had measured σ in the deviation of public texts. Behind a block nothing is generated."""
    scales, apply = list[float](), Veil.apply

    def noting(self: Veil, *given: Any, **options: Any) -> Any:
        scales.append(options["scale"])
        return apply(self, *given, **options)

    monkeypatch.setattr(Veil, "apply", noting)
    options: dict[str, Any] = {"defences": ("noise=0.5",), "permute": (), "count": 1, "public": 40}
    with open_writer(files["llama"], defence="noise=0.5") as writer:
        next(writer.tokens([5], max_tokens=1))
    audit_prompts(files["llama"], files["texts"], depth=(0, 1), **options)
    generated, first, deeper = scales
    assert generated == first != deeper
    trained = replace(open_model(files["llama"]), facts={"defence": "noise=2", "defence_scale": 7.0})
    audit_prompts(trained, files["texts"], **options)
    assert scales[3:] == [7.0]


@pytest.mark.parametrize("permute", [("rows",), pytest.param(("rows", "columns"), marks=pytest.mark.slow)])
def test_permuted_rows_are_read_at_depth_0_and_not_judged_deeper(
    permute: tuple[str, ...], files: dict[str, Path]
) -> None:
    count = 1 + len(permute)  # two short texts are too few for the order of columns, and three under noise
    options: dict[str, Any] = {"depth": (0, 1), "defences": ("none", "noise=0.05"), "public": 20}
    audit = audit_prompts(files["bert"], files["texts"], permute=permute, count=count, **options)
    by_name = {finding.defence: finding for finding in audit.findings}
    hidden = " + ".join(permute)
    names = ["depth 0", f"depth 0, {hidden}", "depth 0, noise=0.05", "depth 1"]
    if permute == ("rows",):
        names.append(f"depth 0, noise=0.05 + {hidden}")
    for name in names:
        assert by_name[name].whole == count and all(one.holds for one in by_name[name].certificates), name
    refused = by_name[f"depth 1, {hidden}"]
    assert refused.status == "refused" and "may still be readable" in refused.reasons[0]
    ruling = replace(audit, limit=Limit("tokens", 0.5)).ruling
    assert ruling is not None
    status = {judged.defence: judged.status for judged in ruling.judgements}
    assert (status[f"depth 0, {hidden}"], status[f"depth 1, {hidden}"]) == (ABOVE, NOT_JUDGED)


@pytest.mark.parametrize("kind", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_the_model_before_fine_tuning_is_enough_to_read_but_not_to_prove(kind: str, files: dict[str, Path]) -> None:
    torch.manual_seed(0)
    tuned = open_model(files[kind], any_weights=True)
    with torch.no_grad():
        for value in tuned.backbone.parameters():
            value += 0.02 * value.std(correction=0) * torch.randn_like(value)
    options: dict[str, Any] = {"depth": (0, 1), "permute": (), "count": 3, "public": 20}
    audit = audit_prompts(tuned, files["texts"], **options, base=files[kind])
    assert "before fine-tuning" in audit.provenance.facts["the server knows"]
    for finding in audit.findings:
        assert finding.whole == 3 and not any(one.holds for one in finding.certificates)
    for other in (files["bert" if kind == "llama" else "llama"], open_model("test_vit", weights="random")):
        with pytest.raises(SitusError, match="the base must be the model before fine-tuning") as caught:
            audit_prompts(tuned, files["texts"], **options, base=other)
        assert caught.value.field == "base"


def test_rows_of_a_model_with_a_causal_mask_cannot_be_permuted(files: dict[str, Path]) -> None:
    with pytest.raises(SitusError, match="causal mask"):
        audit_prompts(files["llama"], files["texts"], permute=("rows",), count=2, public=20)


def test_a_stopped_audit_says_so(files: dict[str, Path]) -> None:
    ticks = iter(range(10_000))
    deadline = Deadline(seconds=40, clock=lambda: float(next(ticks)))
    found = audit_prompts(files["llama"], files["texts"], depth=(1,), count=4, public=40, deadline=deadline)
    assert found.stopped is not None and "partial result" in found.verdict
    assert all(finding.status in ("stopped", "not_run") for finding in found.findings)
    assert found.findings[0].attacked and f"stopped after {found.findings[0].count} of 4 texts." in found.verdict
    page = make_page(found).render()
    assert "depth 1, stopped" in page
    nothing = replace(found, findings=[finding_of(str(row), 4, attack=PROMPTS) for row in found.rows])
    assert make_page(nothing).lead.startswith(
        "Nothing was attacked, so this page does not tell whether the texts are private."
    )
    with pytest.raises(SitusError, match=r"takes no images, .* give a \.txt file") as caught:
        situs.audit_split(open_model(files["bert"], any_weights=True), [])
    assert caught.value.field == "data"


@pytest.mark.parametrize(
    ("verdicts", "cut", "gap", "stopped"),
    [
        ([None, None, None], 0, None, None),
        (["b", "a", None], 0, "for 2 texts, not every word is proved right: b", None),
        (["b", "a", "a"], 0, "for 3 texts, not every word is proved right: a", None),
        (["", None, None], 1, "for 1 text, not every word is proved right: the search was stopped", "2 of 3 texts"),
        ([None, "a"], 0, "for 1 text, not every word is proved right: a", "2 of 3 texts"),
        ([None, None], 1, None, "1 of 3 texts"),
    ],
)
def test_a_setting_names_the_commonest_reason_and_how_many_texts_were_read(
    verdicts: list[str | None], cut: int, gap: str | None, stopped: str | None
) -> None:
    """Of three texts; None has a certificate. The first of several reasons that are as common."""
    readings = [
        Reading((1,), 1, 1, torch.zeros(1, 2), Certificate(verdict is None, order_known=True, verdict=verdict or ""), 1)
        for verdict in verdicts
    ]
    readings[:cut] = [reading._replace(cut=0) for reading in readings[:cut]]
    reads = [Read(f"text {number}", (1,), (1,), (True,)) for number in range(len(readings))]
    scenario: Any = SimpleNamespace(sentences=[(1,)] * 3)
    found = _Trial(scenario, Row(0, Veil()), reads=reads, readings=readings)._finding()
    assert (found.why("gap"), found.why("stopped")) == (gap, stopped)
    assert found.status == ("stopped" if stopped else "done") and len(found.certificates) == len(readings)


def test_cuts_and_veils() -> None:
    assert parse_depths(("0", "1", "half", "last", 1), 30) == (0, 1, 15, 29)
    for wrong in ("30", "-1", "middle"):
        with pytest.raises(SitusError, match="depth"):
            parse_depths((wrong,), 30)
    assert [str(veil) for veil in text_veils(("none", "noise=0.1"), ("columns",))] == [
        "none",
        "columns",
        "noise=0.1",
        "noise=0.1 + columns",
    ]
    for name, said in (("lowpass=0.3", "must be none, .* because the data are texts"), ("noise=-1", "must be noise=σ")):
        with pytest.raises(SitusError, match=f"defences='{name}': {said}"):
            text_veils((name,), ())
    assert str(Row(2, Veil(columns=True))) == "depth 2, columns"


def test_what_is_no_model_of_these_texts_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(SitusError, match=r"depth=.*half, last, or 0 to 1") as caught:
        audit_prompts(files["llama"], files["texts"], depth=())
    assert caught.value.field == "depth"
    with pytest.raises(SitusError, match=r"takes no texts, but texts\.txt contains texts"):
        audit_prompts(open_model("test_vit", weights="random"), files["texts"])
    model = open_model(files["llama"], any_weights=True)
    tokeniser = open_tokeniser(files["llama"])
    known = model.backbone.inner.get_input_embeddings().weight.shape[0]
    tokeniser.add_tokens(["unheard"])
    with pytest.raises(SitusError, match=f"gives the token id {known}, but .* has only {known} tokens"):
        _coded(model.backbone, tokeniser, ["w3 w4", "w3 unheard"], 8)
    assert len(_coded(model.backbone, tokeniser, ["w3 w4", f"w3 w{known - 3}"], 8)) == 2


def test_fixed_words_are_those_of_every_text(files: dict[str, Path]) -> None:
    assert fixed_words(open_tokeniser(files["bert"])) == ((2,), (3,))
    assert fixed_words(open_tokeniser(files["llama"])) == ((), ())


def test_what_the_tokeniser_adds_to_every_text_is_not_read(files: dict[str, Path]) -> None:
    """Under noise that hides everything, [CLS] and [SEP] were two words right of each text."""
    options: dict[str, Any] = {"defences": ("none", "noise=1000"), "permute": (), "count": 2, "public": 40}
    audit = audit_prompts(files["bert"], files["texts"], depth=(0, 1), **options)
    for finding in audit.findings:
        assert not any({2, 3} & {*read.truth} for read in finding.reads)
        share = finding.shares["tokens"]
        assert share is not None and (share < 0.2 if "noise" in finding.defence else share == 1)
    with pytest.raises(SitusError, match="0 different texts of two or more words"):
        audit_prompts(files["bert"], files["texts"], longest=3, **options)


def test_no_attacked_text_is_among_the_servers_own(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "twice.txt").write_text(files["texts"].read_text() + "\n" + files["texts"].read_text())
    with pytest.raises(SitusError, match="different texts of two or more words"):
        audit_prompts(files["llama"], tmp_path / "twice.txt", count=10, public=60)


def test_states_that_are_not_finite_are_one_sentence(files: dict[str, Path]) -> None:
    model = open_model(files["llama"], any_weights=True)
    with torch.no_grad():
        model.backbone.model.get_input_embeddings().weight[7, 3] = torch.inf
    with pytest.raises(SitusError, match="depth 0 contain NaN or infinity"):
        audit_prompts(model, files["texts"], count=2, public=40)


def test_the_columns_of_one_text_of_two_words(files: dict[str, Path]) -> None:
    found = audit_prompts(files["llama"], files["texts"], depth=(0, 1), count=1, public=40, longest=2).findings
    assert [finding.status for finding in found] == ["done"] * 4 and found[0].whole == 1


def test_from_the_command_line(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = [files["llama"], "--data", files["texts"], "--count", 2, "--public", 40, "--depth", "last"]
    assert main(["audit", "split", *map(str, words), "--permute", "columns", "--out", str(tmp_path)]) == 0
    assert "the server reads 2 of 2 texts word for word" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "split-audit.json").read_text())
    assert [each["defence"] for each in numbers["settings"]] == ["depth 1", "depth 1, columns"]
    assert (tmp_path / "split-audit.html").stat().st_mode & 0o077 == 0
    assert main(["audit", "split", *map(str, words), "--attacks", "order"]) == 2
    assert "attacks: is not used for texts" in capsys.readouterr().err
    assert main(["audit", "split", *map(str, words[:3])]) == 2
    assert "224 are needed: 200 public texts" in capsys.readouterr().err
