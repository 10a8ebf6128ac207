"""Defences do what they say, on gradients by name; what is no batch of normalised images is refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import nn

from situs.audit import DEFENCES, Clip, MaskedJigsaw, Noise, NoPositionGradient, create_attack, create_defence
from situs.audit.client import rounded, victim_gradients
from situs.audit.defences import Defence, NoDefence, Step, Together
from situs.audit.defences.base import threat_facts
from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.findings import ACTIVE, HONEST
from situs.methods import create_method


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit(depth=1, patch_size=8, num_classes=5).eval()


X, Y = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 2])


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([g.flatten().double() for g in gradients.values()]).norm())


DEFAULTS = {
    "accumulate": {"parts": 2},
    "clip": {"norm": 1.0, "multiplier": 0.01},
    "clip-batch": {"norm": 1.0},
    "dropout": {"rate": 0.1},
    "exclude": {"pattern": r"(^|\.)(head|classifier|fc)\."},
    "fedavg": {"steps": 2, "lr": 0.01},
    "fedavg-adam": {"steps": 1, "lr": 0.001},
    "mjp": {"mask_ratio": 0.03},
    "noise": {"sigma": 0.001},
    "percentile": {"percentile": 10.0, "gamma": 0.01},  # NVFlare's own, and so are those of svt
    "svt": {"share": 0.1, "epsilon": 0.1, "noise": 0.1, "gamma": 1e-5, "tau": 1e-6},
    "topk": {"share": 0.1},
    "withhold": {"depth": 0},
}
"""The settings of a defence that is named alone."""


@pytest.mark.parametrize("name", DEFENCES)
def test_a_defence_without_settings_has_the_documented_ones(name: str) -> None:
    assert asdict(create_defence(name)) == DEFAULTS.get(name, {})


@pytest.mark.parametrize("name", DEFENCES)
def test_contract(name: str, backbone: Any) -> None:
    defence = create_defence(name)
    before = {n: p.clone() for n, p in backbone.named_parameters()}
    one, two = (victim_gradients(backbone, X[:2], Y[:2], step=Step(seed=1), defence=defence) for _ in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)
    shapes = {n: p.shape for n, p in backbone.named_parameters()}
    assert all(g.shape == shapes[n] for n, g in one.items() if n in shapes)
    assert set(shapes) - set(one) == set(shapes) & defence.withheld(backbone)
    assert set(shapes) - set(one) <= {"model.pos_embed"} or name in ("exclude", "withhold")
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in backbone.named_parameters())
    assert defence.about and defence.known
    assert defence.name == name


def test_noise_has_its_deviation_and_differs_between_samples(backbone: Any) -> None:
    clear = victim_gradients(backbone, X, Y)
    first, second = (
        victim_gradients(backbone, X, Y, defence=Noise(0.5), ids=torch.arange(3) + 7 * i) for i in range(2)
    )
    added = torch.cat([(first[n] - clear[n]).flatten() for n in clear])
    assert abs(float(added.std()) - 0.5) < 0.01
    assert not torch.equal(first["model.pos_embed"], second["model.pos_embed"])


def test_clipping_is_per_sample(backbone: Any) -> None:
    alone = [victim_gradients(backbone, X[i : i + 1], Y[i : i + 1]) for i in range(3)]
    bound = 0.5 * min(map(norm, alone))
    found = victim_gradients(backbone, X, Y, defence=Clip(bound, 0.0))
    for name, gradient in found.items():
        expected = sum(g[name] * (bound / norm(g)) for g in alone) / 3
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    loose = victim_gradients(backbone, X[:1], Y[:1], defence=Clip(1e6, 0.0))
    torch.testing.assert_close(loose["model.pos_embed"], alone[0]["model.pos_embed"])


def test_local_steps_are_those_of_sgd(backbone: Any) -> None:
    """The FedAvg update by torch's own SGD on a copy."""
    found = victim_gradients(backbone, X, Y, step=Step(local_steps=3, lr=0.1))
    copy = deepcopy(backbone)
    optimiser = torch.optim.SGD(copy.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(copy(X), Y).backward()
        optimiser.step()
    for (name, end), start in zip(copy.named_parameters(), backbone.parameters(), strict=True):
        torch.testing.assert_close(found[name], (start - end) / 0.3, rtol=1e-3, atol=1e-5)


def test_types_and_methods(backbone: Any) -> None:
    half = victim_gradients(backbone, X, Y, step=Step(dtype=torch.bfloat16))
    assert {g.dtype for g in half.values()} == {torch.bfloat16}
    method = create_method("mjp", backbone)
    own = victim_gradients(method, X, Y, defence=NoDefence())
    assert {"unknown", "model.pos_embed"} <= set(own)
    assert any(name.startswith("dal.") for name in own)


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        ((X * 50).to(torch.uint8), Y, "uint8"),
        (X.abs() * 100, Y, "not normalised"),
        (X * float("nan"), Y, "NaN or infinity"),
        (X, Y.float(), "integers"),
        (X, Y[:2], r"must be \[B, C, H, W\]"),
        (X[0], Y, r"must be \[B, C, H, W\]"),
    ],
)
def test_mistakes(backbone: Any, images: torch.Tensor, labels: torch.Tensor, said: str) -> None:
    with pytest.raises(SitusError, match=said):
        victim_gradients(backbone, images, labels)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fog", "clip, clip-batch, .*mjp, no-pe-gradient, noise, none"),
        ("noise=1+fog", "fog"),
        ("clip=1:2:3", "clip has at most 2 settings"),
        ("fedavg=1.5", "fedavg=1.5: must be a whole number"),
        ("fedavg=2:0", "rate=0.0: must be in"),
        ("accumulate=0", "accumulate=0: must be a whole number"),
        ("dropout=1", "dropout=1.0: must be in"),
        ("int8=3", "has no setting"),
        ("noise=loud", "is not a number"),
        ("noise=-1", "noise=.*: must be in"),
        ("noise=inf", "noise=inf: must be in"),
        ("noise=nan", "noise=.*: must be in"),
        ("noise=-inf", "noise=.*: must be in"),
        ("clip=0", "clip=.*: must be in"),
        ("clip=-2", "clip=.*: must be in"),
        ("clip=inf", "clip=.*: must be in"),
        ("clip=nan", "clip=.*: must be in"),
        ("mjp=nan", "mjp=.*: must be in"),
        ("none=3", "has no setting"),
        ("mjp=2", "mjp=.*: must be in"),
    ],
)
def test_defences_by_name(text: str, said: str) -> None:
    assert create_defence("noise=1e-4") == Noise(1e-4)
    assert create_defence("clip=0.5").label == "clip C=0.5, noise 0.01·C"
    assert create_defence("clip=0.5:2") == Clip(0.5, 2.0)
    assert create_defence("noise=1e+3+none+mjp=0.5") == Together((Noise(1000.0), NoDefence(), MaskedJigsaw(0.5)))
    with pytest.raises(SitusError, match=said) as caught:
        create_defence(text)
    assert caught.value.field == "defences"


@pytest.mark.parametrize(
    ("text", "changed", "label", "control"),
    [
        ("none", {}, "none", "none"),
        ("noise=0.5", {}, "noise σ=0.5", "none"),
        ("noise=0", {}, "noise σ=0", "noise"),
        ("clip=0.5:0", {}, "clip C=0.5, noise 0·C", "clip"),
        ("clip-batch=2", {}, "clip-batch C=2", "clip-batch"),
        ("fp16", {"dtype": torch.float16}, "fp16", "none"),
        ("bf16", {"dtype": torch.bfloat16}, "bf16", "none"),
        ("int8", {"dtype": torch.int8}, "int8", "none"),
        ("autocast", {"autocast": True}, "autocast", "none"),
        ("dropout=0.2", {"dropout": 0.2}, "dropout p=0.2", "none"),
        ("accumulate=3", {"batch": 6, "parts": 3}, "accumulate 3 batches", "accumulate"),
        ("accumulate=1", {"batch": 2, "parts": 1}, "accumulate 1 batch", "accumulate"),
        ("fedavg=3:0.5", {"local_steps": 3, "lr": 0.5}, "fedavg k=3, rate 0.5", "fedavg"),
        (
            "fedavg-adam=3:0.5",
            {"local_steps": 3, "lr": 0.5, "adam": True},
            "fedavg-adam k=3, rate 0.5",
            "fedavg-adam",
        ),
        ("mjp=0.3", {}, "mjp γ=0.3", "mjp"),
        ("withhold=0", {}, "withhold the embedding", "withhold"),
        ("withhold=1", {}, "withhold the embedding and 1 block", "withhold"),
        ("withhold=2", {}, "withhold the embedding and 2 blocks", "withhold"),
        ("fedavg=3:0.5+fp16", {"local_steps": 3, "lr": 0.5, "dtype": torch.float16}, "fedavg k=3, rate 0.5 + fp16",
         "together"),
    ],
)  # fmt: skip
def test_what_a_defence_makes_of_the_step_and_what_is_left_of_it_in_a_control(
    text: str, changed: dict[str, Any], label: str, control: str
) -> None:
    """A control has no noise, no rounding and no dropout; what is exact stays."""
    defence, step = create_defence(text), Step(2, seed=7)
    assert defence.step(step) == replace(step, **changed) and defence.label == label
    assert defence.noiseless.name == control
    assert control in ("none", "together") or defence.noiseless == defence
    assert defence.noiseless.noise_level(1) == 0 and defence.noiseless.step(step).dtype == torch.float32
    assert (defence.hidden_share is None) is ("mjp" not in text) and defence.per_sample is text.startswith("clip=")


def test_attacks_by_name() -> None:
    assert create_attack("april").name == "april"
    with pytest.raises(SitusError, match=r"april, .*matching, patchembed"):
        create_attack("magic")


def test_steps_are_made_in_full_float32_and_leave_the_users_choice(backbone: Any) -> None:
    """A GPU's TF32 would pass for a defence."""
    seen = []
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    backbone.model.head.register_forward_hook(
        lambda *_: seen.append((matmul.fp32_precision, convolution.fp32_precision))
    )
    before = matmul.fp32_precision, convolution.fp32_precision
    matmul.fp32_precision = convolution.fp32_precision = "tf32"
    try:
        victim_gradients(backbone, X, Y)
        assert seen == [("ieee", "ieee")]
        assert matmul.fp32_precision == convolution.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before


@pytest.mark.parametrize("multiplier", [-1.0, float("inf"), float("nan")])
def test_noise_without_end_is_refused_for_clipping_too(multiplier: float) -> None:
    with pytest.raises(SitusError, match="multiplier"):
        Clip(1.0, multiplier)


@pytest.mark.parametrize(
    ("name", "fields", "withheld"),
    [
        ("vit_tiny_patch16_224", {}, {"model.pos_embed"}),
        # A norm behind the patch embedding: there is no stem, and still the table is not sent.
        ("vit_tiny_patch16_224", {"model_args": {"embed_norm_layer": nn.LayerNorm}}, {"model.pos_embed"}),
        ("vit_relpos_small_patch16_224", {}, None),
        ("eva02_tiny_patch14_224", {}, {"model.pos_embed"}),
    ],
)
def test_every_gradient_of_a_position_is_withheld(name: str, fields: dict[str, Any], withheld: set[str] | None) -> None:
    torch.manual_seed(0)
    model = small_vit(32, name=name, width=48, heads=4, patch_size=8, num_classes=5, **fields).eval()
    defence = NoPositionGradient()
    assert defence.refuses(model) is None
    x = torch.randn(1, 3, 32, 32)
    everything, sent = (victim_gradients(model, x, torch.tensor([1]), defence=each) for each in (NoDefence(), defence))
    missing = everything.keys() - sent.keys()
    assert (
        missing == withheld if withheld else all("relative_position" in each or "rel_pos" in each for each in missing)
    )
    assert missing
    # Whatever is left, no gradient of a loss on the positions alone arrives in it.
    places = model.positions()
    parts = [part for part in (places.table, places.bias and places.bias.values) if part is not None]
    left = [p for each, p in model.named_parameters() if each in sent]
    held = torch.autograd.grad(torch.stack([part.sum() for part in parts]).sum(), left, allow_unused=True)
    assert all(g is None for g in held)


def test_the_vector_of_hidden_patches_is_withheld_too(backbone: Any) -> None:
    method = MaskedJigsaw(0.2).method(backbone)
    sent = victim_gradients(method, X, Y, defence=NoPositionGradient())
    assert not {"model.pos_embed", "unknown"} & sent.keys()


def test_where_no_position_is_trained_nothing_can_be_withheld() -> None:
    fixed = create_backbone("vit_tiny_patch16_224", img_size=32, positions="sincos", model_args={"depth": 1})
    assert "nothing is withheld" in str(NoPositionGradient().refuses(fixed))


def test_noise_is_drawn_anew_for_every_name_and_every_sample(backbone: Any) -> None:
    """As large as stated, and no draw is used twice: what is in two uploads or two names cannot be averaged away."""

    def noise(number: int, seed: int = 0, defence: Defence | None = None) -> dict[str, torch.Tensor]:
        given: Any = {"step": Step(seed=seed), "ids": torch.tensor([number])}
        plain = victim_gradients(backbone, X[:1], Y[:1], **given)
        sent = victim_gradients(backbone, X[:1], Y[:1], defence=defence or Noise(0.1), **given)
        return {name: (sent[name] - plain[name]).flatten().double() for name in plain}

    drawn = noise(0)
    whole = torch.cat(list(drawn.values()))
    assert float(whole.std()) == pytest.approx(0.1, rel=0.05) and abs(float(whole.mean())) < 0.01
    square = ["model.blocks.0.attn.proj.weight", "model.blocks.0.attn.qkv.weight", "model.patch_embed.proj.weight"]
    rows = [drawn[name][:256] for name in square]
    rows += [noise(1)[square[0]], noise(0, seed=1)[square[0]], noise(0, defence=Clip(1e9, 1e-10))[square[0]]]
    apart = torch.corrcoef(torch.stack([row[:256] for row in rows[:-1]])) - torch.eye(5)
    assert float(apart.abs().max()) < 0.3  # 256 numbers each: a deviation of 1/16
    assert float(rows[-1].std()) == pytest.approx(0.1, rel=0.2)
    assert all(torch.equal(one, other) for one, other in zip(drawn.values(), noise(0).values(), strict=True))


def test_a_parameter_that_takes_no_part_is_sent_as_zeros(backbone: Any) -> None:
    backbone.register_parameter("spare", nn.Parameter(torch.ones(3)))
    try:
        sent = victim_gradients(backbone, X, Y)
    finally:
        del backbone.spare
    assert sent["spare"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("device", "count"), [("cpu", 3), pytest.param("cuda", 14_000, marks=pytest.mark.gpu)])
def test_biases_alone_have_the_gradients_that_they_have_among_all(backbone: Any, device: str, count: int) -> None:
    """cuda: more than 65,536 rows, where torch computes no gradient of a LayerNorm's bias alone."""
    backbone = deepcopy(backbone).to(device)
    x, y = X[:1].repeat(count, 1, 1, 1).to(device), torch.arange(count, device=device) % 5
    every = victim_gradients(backbone, x, y)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(name.endswith(".bias"))
    biases = victim_gradients(backbone, x, y)
    assert set(biases) == {name for name in every if name.endswith(".bias")}
    assert [name for name, parameter in backbone.named_parameters() if parameter.requires_grad] == [*biases]
    for name, gradient in biases.items():
        torch.testing.assert_close(gradient, every[name], rtol=1e-4, atol=1e-6)


# --- how a step is made -----------------------------------------------------------------------------------------------


def test_local_steps_of_adam_are_torchs_own(backbone: Any) -> None:
    backbone, x = deepcopy(backbone).double(), X.double()  # a bias of keys has no gradient but rounding
    found = victim_gradients(
        backbone, x, Y, step=Step(dtype=torch.float64), defence=create_defence("fedavg-adam=3:0.01")
    )
    copy = deepcopy(backbone)
    optimiser = torch.optim.Adam(copy.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(copy(x), Y).backward()
        optimiser.step()
    for (name, end), start in zip(copy.named_parameters(), backbone.parameters(), strict=True):
        torch.testing.assert_close(found[name], (start - end) / 0.03, rtol=1e-6, atol=1e-6)


def test_batches_that_are_added_up_are_one_batch_and_local_steps_walk_through_them(backbone: Any) -> None:
    x, y = torch.cat([X, X[:1] + 1]), torch.tensor([0, 4, 2, 1])
    whole = victim_gradients(backbone, x, y)
    for name, gradient in victim_gradients(backbone, x, y, defence=create_defence("accumulate=2")).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)
    walked = victim_gradients(backbone, x, y, defence=create_defence("fedavg=2:0.1+accumulate=2"))
    first = victim_gradients(backbone, x[:2], y[:2])
    moved = deepcopy(backbone)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter -= 0.1 * first[name]
    for name, gradient in victim_gradients(moved, x[2:], y[2:]).items():
        torch.testing.assert_close(walked[name], (first[name] + gradient) / 2, rtol=1e-4, atol=1e-6)
    with pytest.raises(SitusError, match=r"3 samples .* 2 batches"):
        victim_gradients(backbone, X, Y, defence=create_defence("accumulate=2"))


def test_int8_has_even_steps_and_one_scale_a_tensor(backbone: Any) -> None:
    clear, found = (victim_gradients(backbone, X, Y, defence=create_defence(name)) for name in ("none", "int8"))
    for name, gradient in found.items():
        step = float(clear[name].abs().max()) / 127
        levels = gradient.double() / step
        assert float((levels - levels.round()).abs().max()) < 1e-4 and len(gradient.unique()) <= 255
        assert float((gradient - clear[name]).abs().max()) <= 0.501 * step
    assert not rounded(torch.zeros(3), torch.int8).any()


def test_a_batch_clipped_as_a_whole_keeps_its_direction(backbone: Any) -> None:
    clear = victim_gradients(backbone, X, Y)
    found = victim_gradients(backbone, X, Y, defence=create_defence(f"clip-batch={0.5 * norm(clear)}"))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, 0.5 * clear[name])


def test_dropout_draws_for_each_sample_and_leaves_the_model_and_torchs_chance(backbone: Any) -> None:
    clear, state = victim_gradients(backbone, X[:1], Y[:1]), torch.get_rng_state()
    made = [
        victim_gradients(backbone, X[:1], Y[:1], defence=create_defence("dropout=0.5"), ids=torch.tensor([i]))
        for i in (0, 0, 1)
    ]
    table = "model.pos_embed"
    assert torch.equal(made[0][table], made[1][table]) and not torch.equal(made[0][table], made[2][table])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(victim_gradients(backbone, X[:1], Y[:1])[table], clear[table])
    # pos_drop zeroes half of the stream, and with it the gradients of the table there.
    assert 0.3 < float((made[0][table] == 0).double().mean()) < 0.7
    bare = create_backbone("vit_tiny_patch16_224", img_size=16, patch_size=8, model_args={"depth": 1})
    assert create_defence("dropout").refuses(bare) is None
    assert create_defence("dropout").refuses(create_backbone("resnet18", img_size=32)) is not None


def test_mixed_precision_is_near_and_not_equal(backbone: Any) -> None:
    clear, found = (victim_gradients(backbone, X, Y, defence=create_defence(name)) for name in ("none", "autocast"))
    off = norm({name: found[name] - clear[name] for name in clear}) / norm(clear)
    assert 1e-4 < off < 5e-2 and {g.dtype for g in found.values()} == {torch.float32}


def test_defences_at_once_do_what_each_does(backbone: Any) -> None:
    both = create_defence("clip=0.5:0.2+no-pe-gradient+noise=0.3+bf16")
    assert both.per_sample and both.noise_level(2) == pytest.approx((0.05**2 + 0.3**2) ** 0.5)
    assert both.noiseless == create_defence("none+no-pe-gradient+none+none") and both.hidden_share is None
    found = victim_gradients(backbone, X, Y, defence=both)
    assert "model.pos_embed" not in found and {g.dtype for g in found.values()} == {torch.bfloat16}
    assert create_defence("int8+mjp=0.5").hidden_share == 0.5
    assert "The attacker knows" in both.described and " + " in both.label


def test_noise_comes_behind_the_clipping_of_a_batch_and_has_the_deviation_that_the_attacker_is_told(
    backbone: Any,
) -> None:
    both = create_defence("noise=1e-3+clip-batch=0.01")
    assert both.label == "clip-batch C=0.01 + noise σ=0.001"
    clipped = victim_gradients(backbone, X, Y, defence=create_defence("clip-batch=0.01"))
    found = victim_gradients(backbone, X, Y, defence=both)
    added = torch.cat([(found[name] - g).flatten() for name, g in clipped.items()])
    assert float(added.std()) == pytest.approx(both.noise_level(len(X)), rel=0.05)


@pytest.mark.parametrize("text", ["int8+int8", "int8+fp16", "fedavg=8+fedavg=2", "fedavg+fedavg-adam", "mjp=0.5+mjp=0"])
def test_two_defences_that_set_the_same_thing_are_refused(text: str) -> None:
    with pytest.raises(SitusError, match="change the same setting") as caught:
        create_defence(text)
    assert caught.value.field == "defences"
    create_defence("noise=1e-3+noise=1e-4+withhold=0+no-pe-gradient+dropout")


def test_only_a_server_that_chooses_the_weights_is_called_malicious() -> None:
    honest, active = threat_facts(HONEST), threat_facts(ACTIVE)
    assert honest.keys() == active.keys()
    assert "malicious server" in active["who"] and "chooses the weights" in active["does"]
    assert "malicious" not in honest["who"] and "chooses" not in honest["does"]
    assert {name for name in honest if honest[name] != active[name]} == {"model", "who", "does"}
