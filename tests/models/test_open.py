"""Every kind of model is opened as what it is: its logits are those of its own library's forward, bit for bit."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from builders import small_vit
from torch import Tensor, nn

from situs.audit import audit_gradients
from situs.config import from_dict
from situs.core.when import When
from situs.errors import SitusError
from situs.locks.key import new_key
from situs.locks.locking import lock
from situs.locks.owner import unlocking
from situs.measure import evaluate_accuracy
from situs.measure.accuracy import ClassAccuracy
from situs.models import Model, open_model
from situs.models.module import deduce_input
from situs.models.open import Unlock, spent_of
from situs.models.start import finetune_source
from situs.train.private import Spent
from situs.train.run import RunConfig, load_run, train_run

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2}
SHAPE: dict[str, Any] = {"img_size": 16, "patch_size": 4, "model_args": TINY}
NAME = "vit_tiny_patch16_224"
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))

OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(128, classes))

    def forward(self, x):
        return self.body(x)


def half():
    return Net().half()


def text():
    return "no module"


def any_size():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


made = Net()
"""


def plain() -> nn.Module:
    """timm's own model, in eval mode."""
    torch.manual_seed(1)
    made = timm.create_model(NAME, num_classes=3, img_size=16, patch_size=4, **TINY)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.2)
    return made.eval()


def timm_folder(folder: Path, made: nn.Module) -> Path:
    from situs.locks.folder import write_model

    backbone = small_vit(num_classes=3)
    backbone.model.load_state_dict(made.state_dict())
    folder.mkdir()
    write_model(backbone, folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What there is to open: an export, locked in three ways, weights, a Hugging Face folder, a file of one's own."""
    base = tmp_path_factory.mktemp("world")
    made = plain()
    torch.save(made.state_dict(), base / "weights.pt")
    timm_folder(base / "export", made)
    key = new_key(base / "owner.key")
    lock(base / "export", key, base / "locked")
    lock(base / "export", key, base / "sealed", seal=True)
    lock(base / "export", key, base / "kept", withhold=["blocks=1"], withheld=base / "second")
    (base / "own_net.py").write_text(OWN)
    return base


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def opener(world: Path, withheld: bool = False) -> Unlock:
    from situs.locks.key import load_key

    return unlocking(load_key(world / "owner.key"), world / "second" if withheld else None)


def logits(model: Model) -> Tensor:
    assert not model.backbone.training
    with torch.no_grad():
        return model.backbone(X)


def expected() -> Tensor:
    with torch.no_grad():
        return plain()(X)


def same(found: Tensor, wanted: Tensor) -> None:
    """Our attention and timm's add in another order: the last digits of float32 are free."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_an_export_a_weight_file_and_an_instance_give_what_timm_gives(world: Path) -> None:
    export = open_model(world / "export")
    same(logits(export), expected())
    assert (export.name, export.facts["kind"], export.data.size, export.data.path) == ("export", "export", (16, 16), "")
    for named in (
        open_model(f"{NAME}={world / 'weights.pt'}", num_classes=3, **SHAPE),
        open_model(NAME, weights=world / "weights.pt", num_classes=3, **SHAPE),
    ):
        same(logits(named), expected())
        assert (named.facts["kind"], named.facts["weights"], named.classifier) == ("name", "weights.pt", True)
    instance = open_model(plain())
    same(logits(instance), expected())
    assert instance.backbone.num_tokens == 16  # known by its class, so that it has tokens and positions
    assert open_model(instance) is instance


@pytest.mark.parametrize(("folder", "second"), [("locked", False), ("sealed", False), ("kept", True)])
def test_a_locked_folder_with_its_key_is_the_model_that_was_locked(folder: str, second: bool, world: Path) -> None:
    found = open_model(world / folder, unlock=opener(world, second))
    same(logits(found), expected())
    assert (found.name, found.locked, found.facts["locked"]) == (folder, False, "opened with its key")


def test_a_locked_folder_without_its_key_is_told_from_the_model(world: Path) -> None:
    found = open_model(world / "locked")
    assert not torch.allclose(logits(found), expected(), atol=1e-2)
    assert (found.name, found.locked) == ("locked (locked)", True)
    opened = open_model(world / "locked", unlock=opener(world))
    assert len({found.identity, opened.identity, open_model(world / "export").identity}) == 3
    assert open_model(world / "locked").identity == found.identity  # and so with every opening
    assert open_model(world / "locked", unlock=opener(world)).identity == opened.identity
    assert found.home == opened.home
    with pytest.raises(SitusError, match=r"sealed: is sealed .* unlock it first \(situs unlock\), and start from"):
        finetune_source(world / "sealed")
    for folder, said in (("sealed", "is sealed"), ("kept", "lacks the parts that were withheld")):
        with pytest.raises(SitusError, match=said):
            open_model(world / folder)
    with pytest.raises(SitusError, match="is not locked"):
        open_model(world / "export", unlock=opener(world))


def test_a_run_brings_its_method_its_data_and_its_epoch(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(24):
        place = tmp_path / "data" / "train" / str(number % 2) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number, 90, 255 - number)).save(place)
    config = from_dict(
        RunConfig,
        {
            "method": {"name": "supervised"},
            "backbone": {"name": NAME, "patch_size": 4, "model_args": TINY},
            "data": {"path": str(tmp_path / "data"), "img_size": 16, "batch": 12, "workers": 0, "held_out": 0.0},
            "train": {"epochs": 2, "seed": 0, "precision": "fp32"},
        },
    )
    train_run(config, out=tmp_path / "run", device="cpu")
    before = torch.random.get_rng_state()
    found = open_model(tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.no_grad():
        assert torch.equal(logits(found), load_run(tmp_path / "run").method.backbone(X))
    assert (found.facts["method"], found.facts["step"], found.classes) == ("supervised", 4, ("0", "1"))
    assert found.when == When(0, 1, 3 / 4, 3, 2)
    assert found.data.path == str(tmp_path / "data") and found.trained is found.method
    assert found.identity != open_model(plain()).identity
    with pytest.raises(SitusError, match=r"img_size=32: a run has its own"):
        open_model(tmp_path / "run", img_size=32)
    with pytest.raises(
        SitusError, match=r"^unknown option 'time_limit'; the options of a model are drop_path, example"
    ):
        open_model(tmp_path / "run", time_limit=32)
    (tmp_path / "run" / "split.json").touch()  # as beside the client's part of a split training
    with pytest.raises(
        SitusError, match=r"run: is the client's part .* lacks the server's blocks; .* situs split merge"
    ):
        open_model(tmp_path / "run")


@pytest.mark.parametrize(
    ("step", "keep_best", "newest", "epsilon", "counted"),
    [
        (20, False, 30, 2.0, 20),  # as it was logged
        (25, False, 30, "computed", 25),  # between two lines of the log
        (40, False, 40, "computed", 40),
        (9, False, 30, None, None),  # before its first line
        (20, True, 30, 3.0, 30),  # chosen by what all of its steps gave
        (20, True, None, 2.0, 20),
    ],
)
def test_privacy_is_counted_up_to_the_step_of_the_weights(
    step: int, keep_best: bool, newest: int | None, epsilon: Any, counted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, ...]] = []

    def computed(*given: float) -> float:
        asked.append(given)
        return 7.5

    monkeypatch.setattr("situs.models.open.epsilon_of", computed)
    records = [{"step": 5}, *({"step": s, "epsilon": s / 10, "noise_multiplier": 1.5, "sampling_rate": 0.01}
                              for s in (10, 20, 30))]  # fmt: skip
    dp = SimpleNamespace(delta=1e-5, clip=2.0)
    config = SimpleNamespace(dp=dp, train=SimpleNamespace(keep_best=keep_best))
    run = SimpleNamespace(records=lambda: records, facts=lambda: {} if newest is None else {"step": newest})
    loaded: Any = SimpleNamespace(config=config, run=run, checkpoint=SimpleNamespace(step=step))
    spent = spent_of(loaded)
    assert asked == ([(1.5, 0.01, counted, 1e-5)] if epsilon == "computed" else [])
    if counted is None:
        assert spent is None
    else:
        assert spent == Spent(7.5 if epsilon == "computed" else epsilon, 1e-5, 1.5, 2.0, counted)


@pytest.mark.parametrize("half", [False, True])
def test_a_hugging_face_folder_gives_what_transformers_gives(half: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    model = model.half() if half else model
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        answers = model.float()(X).logits
    for source in (tmp_path / "hf", f"hf:{tmp_path / 'hf'}", model):
        torch.testing.assert_close(logits(open_model(source)), answers, rtol=0, atol=0)


def test_a_model_of_words_is_opened_and_has_no_images(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(**sizes, vocab_size=30, max_position_embeddings=12)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    found = open_model(tmp_path / "bert")
    assert found.samples.kind == "text" and found.samples.size == (1, 12) and not found.classifier
    with pytest.raises(
        SitusError, match="bert: reads sentences, but only models that read images or clips are supported here"
    ):
        _ = found.data


def test_an_own_module_by_file_by_package_and_as_an_instance(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = open_model(f"{world / 'own_net.py'}:Net", img_size=16)
    net = by_file.backbone.model
    assert (by_file.name, by_file.facts["model"]) == ("own_net.py:Net", "own_net.py:Net")  # and no folder
    with torch.no_grad():
        answers = net(X)
    monkeypatch.chdir(world)
    for source in (f"{world / 'own_net.py'}:Net", "own_net.py:made", "own_net:Net", "own_net:made", net):
        found = open_model(source, img_size=16)
        assert torch.equal(logits(found), answers), source
        assert (found.facts["kind"], found.notes, found.data.size) == ("module", {}, (16, 16))
    assert logits(open_model("own_net:Net", img_size=16, model_args={"classes": 7})).shape == (2, 7)
    half = type(net)().half().eval()
    for source in ("own_net:half", half):
        found = open_model(source, img_size=16)
        assert torch.equal(logits(found), type(net)().half().float()(X))
        assert found.notes["precision"].startswith("weights in float16")
    assert next(half.parameters()).dtype == torch.float16  # the user's own is left as it is
    with pytest.raises(SitusError, match="runs only as a whole"):
        by_file.backbone.require("tokens")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("vit_tiny_patch16_224", {}, r"set weights to a file, to 'pretrained' .* or to 'random'"),
    ("{world}/weights.pt", {}, r"contains only weights; give MODEL as timm name and file, .*=.*weights.pt"),
    ("vit_tiny_patch16_224=x.pt", {"weights": "y.pt"}, r"weights=y.pt: .* has its own"),
    ("{world}/export", {"weights": "random"}, r"weights=random: a model's folder has its own"),
    ("{world}/locked", {"weights": "random"}, r"weights=random: a locked folder has its own"),
    ("{world}/own_net.py:any_size", {}, r"its image size cannot be deduced; set img_size"),
    ("{world}/own_net.py:Net", {"img_size": 16, "weights": "w.pt"}, r"has its own"),
    ("{world}/own_net.py:Net", {"img_size": 20}, "does not take images"),
    ("{world}/own_net.py:Net", {"img_size": 16, "model_args": {"width": 2}}, "called with width, it raised Type"),
    ("{world}/own_net.py:made", {"img_size": 16, "model_args": {"classes": 2}}, "is already a module"),
    ("{world}/own_net.py:Other", {"img_size": 16}, "has no attribute 'Other'"),
    ("{world}/own_net.py:text", {"img_size": 16}, "returns str; it must return an nn.Module"),
    ("{world}/none.py:Net", {"img_size": 16}, "there is no file"),
    ("vit_tiny_patch16_2240", {"weights": "random"}, "did you mean vit_tiny_patch16_224"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "given", "said"), WRONG)
def test_what_cannot_be_opened_is_one_sentence(source: str, given: dict[str, Any], said: str, world: Path) -> None:
    with pytest.raises(SitusError, match=said):
        open_model(source.format(world=world), **given)


def test_what_is_open_already_takes_no_settings_of_its_own() -> None:
    model = open_model(NAME, any_weights=True, device="meta", **SHAPE)
    assert open_model(model) is model
    for source, given, said in (
        (model, {"weights": "w.pt"}, "weights=w.pt: an open model has its own weights"),
        (model, {"img_size": 16}, "img_size=16: an open model has its own img_size"),
        (model.backbone, {"weights": "w.pt"}, "weights=w.pt: a module has its own weights"),
    ):
        with pytest.raises(SitusError, match=f"^{said}; do not set"):
            open_model(source, **given)


def test_random_weights_follow_the_seed_alone() -> None:
    first, second, other = (open_model(NAME, any_weights=True, seed=seed, **SHAPE) for seed in (1, 1, 2))
    assert torch.equal(logits(first), logits(second)) and not torch.equal(logits(first), logits(other))
    assert not first.classifier


def test_shapes_without_values(world: Path) -> None:
    for source, asked in ((NAME, SHAPE), (world / "export", {})):
        found = open_model(source, any_weights=True, device="meta", **asked)
        assert {weight.device.type for weight in found.backbone.parameters()} == {"meta"}
        assert found.backbone.num_tokens == 16


class Table(nn.Module):
    """Patches of 6 × 6, a class token and a position table; `declared` is an attribute that states a size."""

    def __init__(self, side: int, channels: int, declared: object = None, bilinear: bool = False) -> None:
        super().__init__()
        self.image_size, self.bilinear = declared, bilinear
        self.patches = nn.Conv2d(channels, 8, 6, 6)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, side * side + 1, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        places = self.places
        if self.bilinear:
            places = nn.functional.interpolate(places.mT, size=tokens.shape[1] + 1).mT
        return self.head((torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + places).mean(1))


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(13 * 13, 4))


@pytest.mark.parametrize(
    ("module", "size", "channels"),
    [
        (Table(5, 1), 30, 1),
        (Table(6, 3), 36, 3),
        (Table(6, 4), 36, 4),
        (Table(6, 3, (30, 48), bilinear=True), (30, 48), 3),
        (Table(6, 3, bilinear=True), 36, 3),  # it takes any, and its table has rows for 36
        (Table(6, 3, 99), 36, 3),  # it declares a size that it does not take
        (FLAT, 13, 1),
        (nn.Sequential(nn.Conv2d(2, 4, 4, 4), nn.Flatten(), nn.Linear(4 * 49, 3)).half(), 28, 2),
    ],
)
def test_the_size_of_an_own_module_is_deduced_where_it_takes_one_alone(module: Any, size: Any, channels: int) -> None:
    training = module.training
    found = open_model(module)
    assert (found.backbone.input.shape, found.backbone.input.channels) == (
        (size, size) if isinstance(size, int) else size,
        channels,
    )
    assert "deduced from the module" in found.notes["image size"] and module.training == training
    assert open_model(module, img_size=size, in_chans=channels).notes.keys() == found.notes.keys() - {"image size"}
    with pytest.raises(SitusError):
        open_model(module, img_size=size, in_chans=channels + 1)


@pytest.mark.parametrize("size", [16, 28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 384])
def test_usual_sizes_are_tried_on_a_module_that_shows_none(size: int) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-2:] != (size, size):
                raise RuntimeError("another size")
            return self.head(x[:, :, :1, :1]).flatten(1)

    assert deduce_input(Fixed()) == ((size, size), 3)


@pytest.mark.parametrize("layers", [(nn.Conv2d(3, 64, 3, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 5)),
                                    (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))])  # fmt: skip
def test_a_module_that_takes_several_sizes_asks_for_one(layers: Any) -> None:
    with pytest.raises(SitusError, match="its image size cannot be deduced") as caught:
        open_model(nn.Sequential(*layers))
    assert caught.value.field == "img_size"


def test_an_example_says_what_an_own_module_takes() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.mean(dim=(2, 3)))

    found = open_model(Mean().half(), example=torch.zeros(4, 2, 6, 10))
    assert (found.backbone.input.shape, found.backbone.input.channels) == ((6, 10), 2)
    assert "float16" in found.notes["precision"] and found.data.size == (6, 10)
    with pytest.raises(SitusError) as caught:
        open_model(Mean())
    assert caught.value.field == "img_size"
    assert open_model(plain(), example=X).backbone.num_tokens == 16
    with pytest.raises(SitusError) as caught:
        open_model(plain(), example=torch.zeros(1, 3, 32, 32))
    assert caught.value.field == "img_size"


def test_random_weights_are_those_of_seed_0_where_none_is_said() -> None:
    said = [{}, {"seed": 0}, {"seed": 1}]
    first, same, other = (open_model("test_vit", weights="random", **each).backbone.state_dict() for each in said)
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_a_module_stays_in_its_mode_and_is_measured_in_eval_mode() -> None:
    """Dropout and batch norm at work: the same numbers as of a copy in eval mode, and nothing of the module moves."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, 3)).train()
    module[0].eval()  # frozen, as in many own loops
    modes, state = [part.training for part in module.modules()], deepcopy(module.state_dict())
    data = [(torch.rand(3, 16, 16), index % 3) for index in range(6)]
    model, still = (open_model(each, img_size=16) for each in (module, deepcopy(module).eval()))
    found, wanted = (evaluate_accuracy(each, data) for each in (model, still))
    assert isinstance(found, ClassAccuracy)
    assert isinstance(wanted, ClassAccuracy)
    assert found.accuracy == wanted.accuracy
    for each in (module, model):
        size: dict[str, Any] = {"img_size": 16} if each is module else {}
        audit_gradients(each, data, count=1, attacks=["april"], defences=["none"], **size)
        assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
