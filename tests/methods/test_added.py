from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from safetensors.torch import load_file

import situs
from situs.cli.main import main
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import MP3, Batch, DropPos, DropPosConfig, MP3Config, Supervised
from situs.methods.added import add_losses, parse

SMALL = "--data samples --data.count 64 --data.img-size 28 --batch 16 --epochs 2 --device cpu --backbone.patch-size 7"
SMALL += " --backbone vit_tiny_patch16_224 --backbone.model-args.depth 1 --backbone.model-args.embed-dim 24"
SMALL += " --backbone.model-args.num-heads 2"


def batch() -> Batch:
    torch.manual_seed(1)
    images = torch.randn(3, 3, 8, 12, dtype=torch.float64)
    return Batch(images, torch.tensor([5, 900, 31]), {"label": torch.tensor([1, 0, 3])})


def supervised(*added: str) -> Any:
    torch.manual_seed(0)
    method = Supervised(small_vit((8, 12), num_classes=4, positions="sincos"))
    return add_losses(method, [parse(text) for text in added]).double()


def test_the_losses_and_gradients_are_those_of_each_method_alone() -> None:
    both = supervised("mp3:weight=.3:mask_ratio=0.5", "droppos:weight=2:decoder_width=16:decoder_heads=2:affinity=none")
    when = When(seed=4, epoch=2)
    output = both(batch(), both.draw(batch(), when))
    output.loss.backward()
    gradients = {name: value.grad for name, value in both.named_parameters()}
    alone = [
        (1.0, Supervised(both.backbone), ""),
        (0.3, MP3(both.backbone, MP3Config(mask_ratio=0.5)), "others.mp3."),
        (
            2.0,
            DropPos(both.backbone, DropPosConfig(decoder_width=16, decoder_heads=2, affinity=None)),
            "others.droppos.",
        ),
    ]
    loss, wanted = (
        torch.zeros((), dtype=torch.float64),
        {name: torch.zeros_like(p) for name, p in both.named_parameters()},
    )
    for weight, method, prefix in alone:
        method = method.double()
        state = both.state_dict()
        method.load_state_dict(
            {name: state[name if name.startswith("backbone.") else prefix + name] for name in method.state_dict()}
        )
        for parameter in method.parameters():
            parameter.grad = None
        part = weight * method(batch(), method.draw(batch(), when)).loss
        part.backward()
        loss = loss + part.detach()
        for name, parameter in method.named_parameters():
            if parameter.grad is not None:
                wanted[name if name.startswith("backbone.") else prefix + name] += parameter.grad
    assert torch.allclose(output.loss.detach(), loss, atol=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(torch.zeros(()).double() if gradient is None else gradient, wanted[name], atol=1e-6), name
    assert {"mp3_loss", "mp3_position_accuracy", "droppos_loss"} <= output.metrics.keys()


def test_a_method_with_draws_of_its_own_gets_those_alone() -> None:
    torch.manual_seed(0)
    droppos = DropPos(small_vit((8, 12), positions="sincos"), DropPosConfig(decoder_width=16, decoder_heads=2)).double()
    when = When(seed=4, epoch=2)
    draws = droppos.draw(batch(), when)
    alone = droppos(batch(), draws)
    both = add_losses(droppos, [parse("mp3:weight=.3:mask_ratio=0.5")]).double()
    all_draws = both.draw(batch(), when)
    assert [key for key in all_draws if "." not in key] == [*draws] and {"mp3.order"} == all_draws.keys() - draws.keys()
    output = both(batch(), all_draws)
    assert float(output.loss) == pytest.approx(float(alone.loss + 0.3 * output.metrics["mp3_loss"]), rel=1e-6)
    assert torch.equal(output.extras["places"], alone.extras["places"])


def test_the_backbone_counts_once_and_tables_are_spared_by_weight_decay() -> None:
    both = supervised("droppos:weight=1:decoder_width=16:decoder_heads=2")
    names = [name for name, _ in both.named_parameters()]
    assert len(names) == len(set(names)) and not [name for name in names if "others.droppos.backbone" in name]
    assert names == [name for name in both.state_dict() if name in names]
    assert both.no_decay() == {"others.droppos.mask_token"} and isinstance(both, Supervised)


def test_weight_0_trains_to_the_same_bits_and_the_run_is_judged_exported_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["pretrain", "--method", "supervised", *SMALL.split(), "--backbone.drop-path", "0"]
    assert main([*flags, "--out", str(tmp_path / "alone")]) == 0
    assert main([*flags, "--with", "mp3:weight=0", "--out", str(tmp_path / "zero")]) == 0
    assert main([*flags, "--with", "mp3:weight=.5:mask_ratio=.5", "--out", str(tmp_path / "both")]) == 0
    printed = capsys.readouterr()
    assert "supervised + 0.5 mp3 on vit_tiny_patch16_224" in printed.out + printed.err
    assert "mp3 position accuracy" in printed.out + printed.err
    for name in ("alone", "zero", "both"):
        assert main(["export", str(tmp_path / name), "--out", str(tmp_path / f"{name}-exported")]) == 0
    alone, zero, both = (load_file(tmp_path / f"{n}-exported" / "model.safetensors") for n in ("alone", "zero", "both"))
    assert alone.keys() == zero.keys() == both.keys()
    assert all(torch.equal(alone[name], zero[name]) for name in alone)
    assert not all(torch.equal(alone[name], both[name]) for name in alone)
    assert main(["pretrain", "--resume", str(tmp_path / "both"), "--epochs", "3", "--device", "cpu"]) == 0
    result: Any = situs.evaluate_accuracy(tmp_path / "both", "samples", count=64)
    assert result.accuracy.count == 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("supervised:weight=1", "learns without labels, not supervised"),
        ("mp3", "NAME:weight=NUMBER"),
        ("mp3:weight=-1", "with a weight of 0 or more"),
        ("mp3:weight=nan", "with a weight of 0 or more"),
        ("mp3:weight=1:mask_ratio", "NAME:weight=NUMBER"),
        ("mp3:weight=1:mask_ratio=2", "mask_ratio=2"),
        ("mp3:weight=1:nosuch=2", "nosuch"),
        ("nosuch:weight=1", "unknown method 'nosuch'"),
    ],
)
def test_what_is_no_added_loss_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SitusError, match=sentence):
        parse(text)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--with", "mp3:weight=1,mp3:weight=2"], "each method once"),
        (["--with", "mp3:weight=1", "--dp.epsilon", "8"], "added losses"),
        (
            ["--with", "mp3:weight=1", "--tuning.parts", "head", "--init", "vit_tiny_patch16_224"],
            "but tuning.parts is head",
        ),
    ],
)
def test_what_it_cannot_be_added_to_is_one_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "--method", "supervised", *SMALL.split(), *flags, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
