"""Audits of captured uploads: what is certified is true, and without references nothing ever passes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_captured import Sent, numpy_list
from torch import Tensor

import situs
from situs.audit.attacks.base import Attack, Ready, Recovery
from situs.audit.cases import CERTIFIED, EXACT, certified_psnr
from situs.audit.client import victim_gradients
from situs.audit.scores import denormalise
from situs.audit.uploads import UploadAudit
from situs.audit.victim import load_test_set
from situs.cli.main import main
from situs.errors import SitusError
from situs.gate import ABOVE, NOT_JUDGED
from situs.pages import make_page

HALF = ((0.5,) * 3, (0.5,) * 3)


@pytest.fixture(scope="module")
def sent() -> Sent:
    return Sent()


def audited(sent: Sent, upload: Any, *defences: str, **asked: Any) -> Any:
    asked = {"attacks": ["patchembed", "tokens"], "fail_above": "psnr=20"} | asked
    return situs.audit_gradients(sent.module, upload=upload, defences=defences or ("auto",), **asked)


def noisy(sent: Sent, sigma: float) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {name: g + sigma * torch.randn(g.shape, generator=chance) for name, g in sent.gradients.items()}


def test_what_is_certified_is_the_image(sent: Sent) -> None:
    """Of gradients, weights and a difference, without any reference: above, and the picture is the image."""
    uploads = [sent.gradients, numpy_list(sent.after), sent.difference]
    for upload, kind in zip(uploads, ("gradient", "weights", "difference"), strict=True):
        audit = audited(sent, upload)
        assert isinstance(audit, UploadAudit) and audit.uploads[0].sent == kind
        assert audit.ruling.status == ABOVE and audit.tone == "bad"
        [pair] = [pair for pair in audit.attacked if pair.attack == "patchembed"]
        [exposure] = pair.exposures
        error = float((pair.shown - denormalise(sent.image, *HALF)).square().mean())
        assert exposure.metric == CERTIFIED and exposure.above
        assert -10 * math.log10(max(error, 1e-20)) >= min(exposure.value, EXACT)
        stopped = replace(audit, stopped="Ctrl-C").summary().sentence
        assert stopped.startswith("A partial result: stopped by Ctrl-C. 1 of 1 image in 1 upload can be read")


def test_what_does_not_apply_is_listed_with_its_reason(sent: Sent) -> None:
    both, one = audited(sent, sent.gradients), audited(sent, sent.gradients, attacks=["patchembed"])
    titles = [[table.title for table in audit.summary().tables] for audit in (both, one)]
    assert [("Attacks that do not apply or are not exact" in each) for each in titles] == [True, False]


def test_the_sentence_the_table_and_the_figure_say_what_each_attack_certifies(sent: Sent) -> None:
    audit = audited(sent, sent.gradients, "none", attacks=["april", "patchembed"])
    summary = audit.summary()
    shown = {row[0]: row[1:4] for row in summary.tables[0].rows}
    assert shown == {"april": ["none", "0 of 1", None], "patchembed": ["none", "1 of 1", "no error"]}
    assert summary.sentence == (
        "1 of 1 image in 1 upload can be read. The attacker can prove without the originals that the result is "
        "right. Best attack: patchembed. Stated defence: none."
    )
    assert summary.numbers == (("1 of 1", "images certified"),)
    [figure] = audit.figures()
    assert [name for name, _ in figure.values[0]] == ["april, none", "patchembed, none"]


def test_nothing_certified_is_not_called_private(sent: Sent) -> None:
    audit = audited(sent, noisy(sent, 1e-2), "noise=1e-2", attacks=["patchembed"])
    assert audit.mark == "Not proved private"
    assert [row[2:4] for row in audit.summary().tables[0].rows] == [["0 of 1", None]] * 2
    assert audit.summary().sentence == (
        "In 1 upload, no image is certified: the attacker cannot prove that any image was recovered. This does not "
        "prove privacy: there are no reference images, and the upload may reveal more than was recovered. The "
        "equations fit only if you gave the correct batch, noise and local steps."
    )


def test_an_upload_that_no_attack_applies_to_is_said_to_be_refused(sent: Sent) -> None:
    empty = {name: torch.zeros_like(g) if "patch_embed" in name else g for name, g in sent.gradients.items()}
    audit = audited(sent, empty, "none", attacks=["patchembed"])
    [row] = audit.summary().tables[0].rows
    assert row == ["patchembed", "none", "not attacked here", *[None] * 5] and not audit.figures()
    assert "This does not prove privacy." in audit.summary().sentence and audit.tone == "unsure"


class Guesses(Attack):
    """Gives back nothing but labels, two for each of two uploads."""

    name, about = "guesses", "guesses labels"

    def prepare(self, *_: Any) -> Ready:
        return Ready(None)

    def recover(self, _: Any, uploads: Any, *__: Any) -> Recovery:
        labels = torch.tensor([[1, 3], [0, 4]])
        return Recovery(torch.zeros(2 * len(uploads), 3, 16, 16), [{} for _ in uploads], labels=labels[: len(uploads)])


def test_inferred_labels_are_told_of_each_image_and_never_called_right(sent: Sent) -> None:
    """Nobody knows the true ones."""
    audit = audited(sent, [sent.gradients] * 2, "none", attacks=[Guesses()], batch=2)
    facts = [fact for pair in audit.numbers()["pairs"] for fact in pair["facts"]]
    assert [fact["labels_inferred"] for fact in facts] == ["1, 3", "1, 3", "0, 4", "0, 4"]
    assert not any("labels_right" in fact for fact in facts)
    assert audit.ruling.status == NOT_JUDGED


@pytest.mark.parametrize("attacks", [["crafted"], ["patchembed", "crafted-lora"]])
def test_an_attack_that_chooses_the_weights_does_not_take_uploads_of_others(sent: Sent, attacks: list[str]) -> None:
    with pytest.raises(
        SitusError, match=f"attacks={attacks[-1]}: this attack needs a server that chooses the"
    ) as caught:
        audited(sent, sent.gradients, attacks=attacks)
    assert caught.value.fields == ("attacks", "server")


def test_without_references_nothing_passes(sent: Sent) -> None:
    """Noise that hides everything, stated or not, and gradients of another model: inconclusive."""
    chance = torch.Generator().manual_seed(2)
    foreign = {name: torch.randn(g.shape, generator=chance) for name, g in sent.gradients.items()}
    for upload, stated in ((noisy(sent, 1e-2), "noise=1e-2"), (noisy(sent, 1e-2), "none"), (foreign, "noise=1")):
        audit = audited(sent, upload, stated)
        assert audit.ruling.status == NOT_JUDGED and audit.tone == "unsure"
        assert "there are no reference images" in audit.ruling.sentence
        assert "psnr is not defined" not in audit.ruling.sentence
        assert not any(exposure.above for pair in audit.pairs for exposure in pair.exposures)


def test_zeros_are_no_equations(sent: Sent) -> None:
    """A zero gradient of the patch embedding fits an image of zeros, which is not the one behind the upload."""
    empty = {name: torch.zeros_like(g) if "patch_embed" in name else g for name, g in sent.gradients.items()}
    for upload in (empty, [empty, empty]):
        audit = audited(sent, upload, attacks=["patchembed"])
        assert audit.ruling.status == NOT_JUDGED
        assert "patch_embed.proj.weight is not sent" in audit.pairs[0].why("refused")
    with pytest.raises(SitusError, match="upload 2: has other tensors than upload 1"):
        audited(sent, [sent.gradients, empty])


def test_stated_noise_is_not_believed(sent: Sent) -> None:
    """A client that states noise and sends none is read all the same."""
    audit = audited(sent, sent.gradients, "noise=1e-1")
    outcomes = {judged.defence: judged.outcome for judged in audit.ruling.judgements}
    assert outcomes["none"] == "above" and audit.ruling.status == ABOVE


def test_a_certificate_promises_no_more_than_it_keeps() -> None:
    """Facts that leave the image open, unsolved or doubtful promise nothing."""
    solid = {"fits": True, "rank": 4, "unknowns": 4, "open": 1e-4, "residual": 1e-7, "expected_residual": 1e-7}
    assert certified_psnr(solid, 0.0, HALF) == pytest.approx(46.02, abs=0.01)  # -20 log10(0.5 · 0.01)
    assert certified_psnr({**solid, "open": 0.9}, 0.0, HALF) == pytest.approx(6.48, abs=0.01)
    for change in ({"fits": False}, {"rank": 3}, {"verdict": "doubtful"}, {"unseen": 1}, {"hidden": 2}):
        assert certified_psnr({**solid, **change}, 0.0, HALF) is None
    tokens = {"fits": True, "proof": "yes", "sharp": True}
    assert certified_psnr(tokens, 0.0, HALF) > 30
    assert certified_psnr(tokens, 1e-9, HALF) is None  # noise may move what is not measured
    assert certified_psnr({**tokens, "sharp": False}, 0.0, HALF) is None
    assert certified_psnr({"fits": False, "bytes": True}, 0.0, HALF) == 200


def test_with_references_it_is_measured(sent: Sent) -> None:
    """The images behind an upload give scores, and the noise is measured, whatever is stated."""
    pictures = sent.pictures
    for upload in (sent.gradients, numpy_list(sent.after)):
        audit = situs.audit_gradients(
            sent.module, pictures, upload=upload, attacks=["patchembed"], fail_above="psnr=20"
        )
        assert not isinstance(audit, UploadAudit)
        assert audit.ruling.status == ABOVE and audit.pairs[0].exact == 1
    audit = situs.audit_gradients(
        sent.module, pictures, upload=noisy(sent, 1e-3), attacks=["patchembed"], defences=["noise=10"]
    )
    assert [float(defence.split("=")[1]) for defence in audit.about] == [pytest.approx(1e-3, rel=0.05)]
    other = [255 - pictures[0]]
    audit = situs.audit_gradients(sent.module, other, upload=sent.gradients, attacks=["patchembed"], fail_above="blind")
    assert audit.ruling.status == ABOVE  # another image is behind it, and that one is certified
    said = "1 image was recovered byte for byte, but is not in the data; to compare them, prepare the data"
    page, pair, verdict = make_page(audit).render(), audit.pairs[0], audit.summary().sentence
    assert (pair.exact, pair.to_the_byte, pair.others) == (0, 0, 1) and said in verdict and said in page
    assert "No image was recovered" not in page and "of them with the exact byte" not in verdict
    with pytest.raises(SitusError, match="has only 1 image, but 2 are needed for 2 uploads of 1 image each"):
        situs.audit_gradients(sent.module, pictures, upload=[sent.gradients, sent.gradients])


def test_the_noise_of_several_uploads_is_measured_by_the_images_of_each(sent: Sent) -> None:
    pictures = [sent.pictures[0], 255 - sent.pictures[0]]
    uploads, chance = list[dict[str, Tensor]](), torch.Generator().manual_seed(0)
    for image in load_test_set(sent.victim, pictures, 2).pixels:
        clean = victim_gradients(sent.victim.trains, image[None], torch.tensor([2]))
        uploads.append({name: g + 1e-3 * torch.randn(g.shape, generator=chance) for name, g in clean.items()})
    audit = situs.audit_gradients(sent.module, pictures, upload=uploads, attacks=["patchembed"], defences=["noise=10"])
    assert [float(defence.split("=")[1]) for defence in audit.about] == [pytest.approx(1e-3, rel=0.05)]


def test_an_upload_of_other_images_carries_a_caveat(sent: Sent) -> None:
    pictures = [255 - sent.pictures[0]]
    audit = situs.audit_gradients(sent.module, pictures, upload=noisy(sent, 1e-2), attacks=["patchembed"],
                                  defences=["noise=1e-2"], fail_above="blind")  # fmt: skip
    assert audit.ruling.status == NOT_JUDGED


def model_file(folder: Path) -> str:
    (folder / "mine.py").write_text(
        "import timm, torch\n\ndef build():\n    torch.manual_seed(0)\n"
        "    shape = dict(img_size=16, patch_size=4, embed_dim=48, depth=1, num_heads=2, num_classes=5)\n"
        "    return timm.create_model('vit_tiny_patch16_224', **shape)\n\n"
        "def loss(logits, labels):\n    return (logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]).mean()\n"
    )
    return f"{folder / 'mine.py'}:build"


def test_the_verb(
    sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({f"module.{name}": g for name, g in sent.gradients.items()}, "up.safetensors")
    command = ["audit", "gradients", model_file(tmp_path), "--upload", "up.safetensors", "--fail-above", "psnr=20"]
    command += ["--attacks", "patchembed", "--loss", f"{tmp_path / 'mine.py'}:loss", "--junit", "j.xml"]
    assert main([*command, "--out", "out"]) == ABOVE
    shown = capsys.readouterr().out
    assert "1 of 1 image in 1 upload can be read" in shown
    numbers = json.loads(Path("out/upload.json").read_text())
    assert numbers["schema"] == "situs-audit-upload/1" and numbers["gate"]["outcome"] == "above"
    assert Path("out/upload.html").is_file() and "failure" in Path("j.xml").read_text()
    whole = Path("up.safetensors").read_bytes()
    Path("up.safetensors").write_bytes(whole[:1000])
    assert main([*command, "--out", "none"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "damaged, truncated" in said and "--upload" in said
    assert not Path("none").exists()
    for flags in (["--sent", "weights"], ["--data", "samples", "--settings", "a", "--upload", "up.safetensors"]):
        assert main(["audit", "gradients", model_file(tmp_path), *flags]) == 2


def test_labels_without_images_are_refused(sent: Sent) -> None:
    with pytest.raises(SitusError, match="needs the images and labels of the upload"):
        audited(sent, sent.gradients, attacks=["matching"], labels="known")


def test_rounded_uploads_are_read_by_their_type(sent: Sent) -> None:
    half = {name: g.to(torch.bfloat16) for name, g in sent.gradients.items()}
    audit = audited(sent, half, attacks=["patchembed"])
    assert audit.pairs[0].why("inexact") and "bfloat16" in audit.pairs[0].why("inexact")


@pytest.mark.parametrize("sigma", [1e-7, 1e-6, 1e-5])
def test_the_certified_figure_is_kept(sent: Sent, sigma: float) -> None:
    """Under noise too small to hide the image, the recovered picture is as close as its certificate promises."""
    audit = audited(sent, noisy(sent, sigma), f"noise={sigma}", attacks=["patchembed"])
    pair = next(pair for pair in audit.attacked if pair.defence != "none")
    [exposure] = pair.exposures
    error = float((pair.shown - denormalise(sent.image, *HALF)).square().mean())
    assert -10 * math.log10(max(error, 1e-20)) >= exposure.value - 3
