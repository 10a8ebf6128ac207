"""Which chosen weights `situs.audit.check_weights` notices, and which honest ones it takes for chosen.

    python benchmarks/chosen.py                                        # random weights and crafted ones
    python benchmarks/chosen.py --honest runs/a runs/b exports/bert    # with trained ones: runs, exports, model folders
    python benchmarks/chosen.py --texts minilm/                        # crafted text models too
    python benchmarks/chosen.py --honest … --held-out minigpt/         # and with others that set no limit
    python benchmarks/chosen.py --honest … --calibrate                 # the limits that these honest weights set

Each path of --honest counts as one training; PATH+PATH joins the stages of one. Each is measured as it is and in six
hard forms: in half precision, in 8 and in 4 bits, with half or nine tenths of its numbers pruned, with a fifth of its
neurons pruned. Limits are set on honest weights alone (`limits`); --held-out names trainings that set none.
False alarms are counted as they are + in hard forms, with the limits of the package, and with limits set without that
training, all its stages and forms.

Crafted weights are those of `situs.audit.attacks.crafted`; the evading ones change them so that the attack can still
undo it. Beside each stands how many of 6 images or sentences it still reads exactly.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.attacks import crafted as attack
from situs.audit.attacks.crafted import PLACE, ChosenWeights, Plan, craft, deviation_of, plan_of
from situs.audit.chosen import MEASURES, Measure, Values, check_weights, measure
from situs.audit.client import victim_gradients
from situs.audit.stem import to_images
from situs.audit.text.crafted import craft_text, crafted_sentences
from situs.audit.text.victim import open_text_victim, text_gradients
from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.models import open_model
from situs.models.open import RANDOM

Upload = dict[str, Tensor]
Undo = Callable[[Upload], Upload]
Evasion = Callable[[Backbone], tuple[Backbone, Undo]]
Scores = dict[str, float]
Honest = dict[str, dict[str, Values]]

SMALL = {"depth": 5, "embed_dim": 96, "num_heads": 2}
WIDE = SMALL | {"embed_dim": 192, "num_heads": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_patch16_224": {"img_size": 64},
    "deit3_small_patch16_224": {"img_size": 64, "model_args": {"depth": 3}},
    "beit_base_patch16_224": {"img_size": 64, "model_args": {"depth": 2, "embed_dim": 192, "num_heads": 3}},
    "eva02_tiny_patch14_224": {"img_size": 70, "model_args": {"depth": 3}},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56,
        "model_args": {"embed_dim": 48, "depths": (2, 2), "num_heads": (2, 4)},
    },
    "vit_small_patch16_rope_mixed_224": {"img_size": 64, "model_args": {"depth": 3}},
    "vit_small_patch14_reg4_dinov2": {"img_size": 70, "model_args": {"depth": 3}},
    "vit_relpos_small_patch16_224": {"img_size": 64, "model_args": {"depth": 3}},
}
TEXTS: dict[str, dict[str, Any]] = {
    **{f"{name}Model": {} for name in ("Bert", "Roberta", "Electra", "Albert")},
    **{f"{name}ForCausalLM": {"num_key_value_heads": 2} for name in ("Llama", "Mistral", "Qwen2")},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 80},
    "DistilBertModel": {"dim": 96, "n_layers": 3, "n_heads": 4, "hidden_dim": 384},
}
SENTENCES = [
    "the cat sat on the old red mat",
    "we met at noon near the river",
    "rain fell all night over the town",
    "she reads a long book every week",
    "two men carry a heavy box upstairs",
    "my train was late again this morning",
]
SIZES = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 384}


MARGIN = 4.0
"""Limit of a measure, in multiples of the highest value of all honest trainings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", nargs="*", default=[], help="trained models; PATH+PATH: stages of one training")
    parser.add_argument("--held-out", nargs="*", default=[], help="trained models that set no limit")
    parser.add_argument("--texts", nargs="*", default=[], help="folders of text models, whose weights are crafted too")
    parser.add_argument("--calibrate", action="store_true", help="print the limits that the honest weights set")
    parser.add_argument("--few", action="store_true", help="a few random and crafted models alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    honest, held_out = measured(honest_models(args.honest, args.few)), measured(trained_models(args.held_out))
    if args.calibrate:
        for name, (usual, limit) in limits(honest).items():
            print(f"{name}: usual {usual:.3g}, limit {limit:.3g}")
        return
    table_of_false_alarms(honest, "without its own limits")
    if held_out:
        table_of_false_alarms(held_out, "")
    scores = table_of_crafted("crafted", itertools.chain(crafted_models(args.few), crafted_texts(args.texts)))
    if not args.few:
        scores |= table_of_crafted("crafted, held out", held_out_crafted())
    alarms = [max(score(v, MEASURES).values()) for stages in (honest | held_out).values() for v in stages.values()]
    print_roc(alarms, [max(by.values()) for by in scores.values()])
    table_of_measures(honest, scores)
    tables_of_changes(args.few)


def measured(models: Iterable[tuple[str, str, Backbone]]) -> Honest:
    """Training -> name of the model, with its hard form behind a comma -> its values."""
    values: Honest = {}
    for training, name, model in models:
        values.setdefault(training, {})[name] = measure(model)[0]
    return values


def score(values: Values, measures: Mapping[str, Measure]) -> Scores:
    """The score of every measure."""
    return {name: measures[name].score(value) for name, (value, _) in values.items()}


def limits(honest: Honest) -> dict[str, tuple[float, float]]:
    """The usual value and the limit of every measure, by the rule of `situs.audit.chosen`."""
    result = {}
    for name, shape in MEASURES.items():
        by_training = [[v[name][0] for v in stages.values() if name in v] for stages in honest.values()]
        highest = sorted(max(values) for values in by_training if values)
        if shape.scale == "times" and highest:  # the other by its exact law
            result[name] = (highest[len(highest) // 2], MARGIN * highest[-1])
    return result


def without(honest: Honest, training: str) -> dict[str, Measure]:
    """The measures with the limits that all other trainings set."""
    bounds = limits({name: values for name, values in honest.items() if name != training})
    return {
        name: shape._replace(usual=bounds[name][0], limit=bounds[name][1]) if name in bounds else shape
        for name, shape in MEASURES.items()
    }


def table_of_false_alarms(honest: Honest, left_out: str) -> None:
    """How many models of each training are taken for chosen, as they are and in hard forms; with left_out also with
    limits that were set without the training."""
    header = ["honest training", "models", "false alarms", *([left_out] if left_out else []), "highest score", "by"]
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    total = [0] * 6
    for training, stages in honest.items():
        others = without(honest, training) if left_out else MEASURES
        counts = [0] * 6
        highest: list[tuple[float, str]] = []
        for name, values in stages.items():
            by, alone, hard = score(values, MEASURES), score(values, others), 3 * (", " in name)
            counts[hard] += 1
            counts[hard + 1] += max(by.values()) > 1
            counts[hard + 2] += max(alone.values()) > 1
            highest += [(most, measure_name) for measure_name, most in alone.items()]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        most, first = max(highest)
        print(f"| {training} | {_cells(counts, left_out)} | {most:.2f} | {first} |", flush=True)
    print(f"| all | {_cells(total, left_out)} | | |")


def _cells(counts: Sequence[int], left_out: str) -> str:
    """Models, alarms and alarms without the own limits: as they are + in hard forms."""
    return " | ".join(f"{counts[n]} + {counts[n + 3]}" for n in range(3 if left_out else 2))


def table_of_crafted(title: str, models: Iterable[tuple[str, Backbone, int]]) -> dict[str, Scores]:
    """Prints a row for each crafted model, and gives their scores by measure."""
    print(f"\n| {title} | exact of 6 | score | noticed | by |\n|---|---|---|---|---|")
    scores: dict[str, Scores] = {}
    for name, model, exact in models:
        by = scores[name] = score(measure(model)[0], MEASURES)
        first, most = max(by.items(), key=lambda item: item[1])
        print(f"| {name} | {exact} | {most:.2f} | {'yes' if most > 1 else 'no'} | {first} |", flush=True)
    return scores


def table_of_measures(honest: Honest, crafted: Mapping[str, Scores]) -> None:
    """False alarms of each measure if a training is left out, and the crafted models that it alone notices."""
    print("\n| measure | alarms, training left out | crafted noticed | by it alone |\n|---|---|---|---|")
    apart = {training: without(honest, training) for training in honest}
    alarms = [score(v, apart[training]) for training, stages in honest.items() for v in stages.values()]
    for name in MEASURES:
        by = [scores for scores in crafted.values() if scores.get(name, 0) > 1]
        alone = sum(sum(number > 1 for number in scores.values()) == 1 for scores in by)
        print(f"| {name} | {sum(scores.get(name, 0) > 1 for scores in alarms)} | {len(by)} | {alone} |")


def print_roc(honest: Sequence[float], crafted: Sequence[float]) -> None:
    """Hits and false alarms at thresholds, and the area under the curve."""
    print("\n| threshold | crafted noticed | honest taken for chosen |\n|---|---|---|")
    for threshold in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0):
        hits, alarms = (sum(number > threshold for number in numbers) for numbers in (crafted, honest))
        print(f"| {threshold:g} | {hits} of {len(crafted)} | {alarms} of {len(honest)} |")
    area = sum((c > h) + (c == h) / 2 for c in crafted for h in honest) / max(1, len(crafted) * len(honest))
    print(f"\nArea under the curve {area:.4f}; the operating point is 1.")


# --- honest weights --------------------------------------------------------------------------------------------------


def honest_models(paths: Sequence[str], few: bool) -> Iterator[tuple[str, str, Backbone]]:
    """(training, name, model): trained models as they are and in hard forms, and random ones."""
    yield from trained_models(paths)
    images = dict(list(FAMILIES.items())[:2]) if few else FAMILIES
    for name, shape in images.items():
        yield f"random {name}", name, create_backbone(name, num_classes=10, **shape).eval()
    for name, entries in ({} if few else TEXTS).items():
        yield f"random {name}", name, text_model(name, entries)


def trained_models(paths: Sequence[str]) -> Iterator[tuple[str, str, Backbone]]:
    """Trained models as they are and in hard forms."""
    for path in paths:
        for stage in path.split("+"):
            model = open_model(stage, any_weights=True).backbone
            yield path, stage, model
            for form, change in FORMS.items():
                yield path, f"{stage}, {form}", change(deepcopy(model))


def text_model(name: str, entries: Mapping[str, Any]) -> Backbone:
    """A random text model of transformers."""
    import transformers

    kind = getattr(transformers, name)
    own = dict(entries) if "n_embd" in entries or "dim" in entries else SIZES | dict(entries)
    known = own | {"vocab_size": 300, "max_position_embeddings": 80}
    return create_backbone(kind(kind.config_class(**known)).eval())


def matrices(model: Backbone) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "emb" not in name and "wte" not in name]


@torch.no_grad()
def rounded(model: Backbone, steps: int) -> Backbone:
    """Every row in 2 · steps + 1 numbers."""
    for weight in matrices(model):
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / steps
        weight.copy_((weight / scale).round() * scale)
    return model


@torch.no_grad()
def pruned(model: Backbone, share: float) -> Backbone:
    """The smallest numbers of every matrix are 0."""
    for weight in matrices(model):
        weight *= weight.abs() >= weight.abs().flatten().kthvalue(int(share * weight.numel())).values
    return model


@torch.no_grad()
def without_neurons(model: Backbone, share: float) -> Backbone:
    """The smallest neurons of every MLP are 0."""
    for block in model.parts():
        for up in block.mlp.up:
            rows = up.weight if type(up).__name__ == "Linear" else up.weight.T
            rows[rows.norm(dim=1).argsort()[: int(share * len(rows))]] = 0
    return model


FORMS: dict[str, Callable[[Backbone], Backbone]] = {
    "half precision": lambda model: model.half().float(),
    "8 bits": lambda model: rounded(model, 127),
    "4 bits": lambda model: rounded(model, 7),
    "half pruned": lambda model: pruned(model, 0.5),
    "nine tenths pruned": lambda model: pruned(model, 0.9),
    "a fifth of the neurons pruned": lambda model: without_neurons(model, 0.2),
}


# --- beside a public model -------------------------------------------------------------------------------------------


def tables_of_changes(few: bool) -> None:
    """Honest fine-tunings of a public model, and single tensors of it that a server wrote."""
    public = trained(vit(model_args=SMALL | {"init_values": 0.1}), "all", 1e-3)
    print("\n| training of a public model | noticed | score | by |\n|---|---|---|---|")
    for name, (part, rate) in dict(list(TUNINGS.items())[:2] if few else TUNINGS.items()).items():
        print(f"| {name} {_verdict(trained(public, part, rate), public)}", flush=True)
    fresh = vit(model_args=SMALL | {"init_values": 0.1})
    print(f"| from random weights {_verdict(public, fresh)}")
    print("\n| one tensor written | noticed | score | by | without the public model |\n|---|---|---|---|---|")
    for name, write in dict(list(WRITTEN.items())[:2] if few else WRITTEN.items()).items():
        changed = deepcopy(public)
        with torch.no_grad():
            write(changed.model)
        print(f"| {name} {_verdict(changed, public)} {_verdict(changed, RANDOM)[2:].split(' |')[0]} |", flush=True)


def _verdict(model: Backbone, public: Any) -> str:
    result = check_weights(model, public)
    noticed = "yes" if result.reasons else "inconclusive" if result.missing else "no"
    return f"| {noticed} | {result.score:.2f} | {result.readings[0].name} ({result.readings[0].layer}) |"


TUNINGS = {
    "all, 1e-3": ("all", 1e-3),
    "classifier alone": ("head", 1e-2),
    "all, 3e-3": ("all", 3e-3),
    "all, 1e-5": ("all", 1e-5),
    "biases alone": ("bias", 1e-3),
    "norms alone": ("norm", 1e-3),
    "last block": ("blocks.4", 1e-3),
    "position table": ("pos_embed", 1e-3),
    "patch embedding": ("patch_embed", 1e-3),
}
"""Way -> (what is trained: names that hold it; rate of Adam)."""


def trained(model: Backbone, part: str, rate: float) -> Backbone:
    """A copy after 60 steps of Adam on made-up images of ten classes."""
    model, images = deepcopy(model), pictures(64, model)
    labels = torch.arange(64) % 10
    weights = [p for name, p in model.named_parameters() if part == "all" or part in name]
    optimizer = torch.optim.Adam(weights, rate)
    chance = torch.Generator().manual_seed(0)
    for _ in range(60):
        some = torch.randint(64, (16,), generator=chance)
        optimizer.zero_grad()
        F.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
    return model.eval()


def _constants(table: Tensor, size: float) -> None:
    table[..., 5], table[..., 9] = size, -size


def _one_hot(weight: Tensor) -> None:
    size = weight.norm() / weight.flatten(1).shape[1] ** 0.5
    weight.zero_().flatten(1).fill_diagonal_(float(size))


def _places(table: Tensor) -> None:
    for bit in range(5):
        table[0, :, 20 + bit] = 30.0 * (2 * (torch.arange(table.shape[1]) >> bit & 1) - 1)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "one class × 1,000": lambda m: m.head.weight[3].mul_(1000),
    "position table, ± 300": lambda m: _constants(m.pos_embed, 300.0),
    "classifier of one channel": lambda m: m.head.weight.mul_(torch.arange(m.embed_dim) == 7),
    "classifier's bias": lambda m: m.head.bias.copy_(torch.tensor([0.0] + [-1e4] * 9)),
    "patch embedding × 1,000": lambda m: m.patch_embed.proj.weight.mul_(1000),
    "patch embedding of pixels": lambda m: _one_hot(m.patch_embed.proj.weight),
    "patch embedding's bias": lambda m: _constants(m.patch_embed.proj.bias, 100.0),
    "norm of eight channels": lambda m: m.blocks[1].norm2.weight[8:].zero_(),
    "norm × 1,000": lambda m: m.blocks[1].norm2.weight.mul_(1000),
    "norm's bias": lambda m: _constants(m.blocks[0].norm1.bias, 50.0),
    "norm of 0": lambda m: m.blocks[2].norm1.weight.zero_(),
    "position table, bits": lambda m: _places(m.pos_embed),
    "position table of 0": lambda m: m.pos_embed.zero_(),
    "class token": lambda m: _constants(m.cls_token, 100.0),
    "biases of queries": lambda m: m.blocks[1].attn.qkv.bias[:4].fill_(1e3),
    "scale of a branch of 0": lambda m: m.blocks[3].ls1.gamma.zero_(),
    "last norm": lambda m: m.norm.weight[8:].zero_(),
    "last norm's bias": lambda m: _constants(m.norm.bias, 100.0),
    "biases of an MLP": lambda m: m.blocks[0].mlp.fc1.bias.copy_(torch.linspace(-9, 9, 384)),
}
"""One tensor of a public model that a server writes."""


# --- crafted weights -------------------------------------------------------------------------------------------------


def vit(**shape: Any) -> Backbone:
    torch.manual_seed(0)
    asked = {"img_size": 16, "patch_size": 4, "num_classes": 10, "model_args": SMALL} | shape
    return create_backbone("vit_tiny_patch16_224", **asked).eval()


def pictures(count: int, model: Backbone) -> Tensor:
    """Smooth random images of different brightness."""
    chance = torch.Generator().manual_seed(count)
    channels, sides = model.input.channels, model.input.shape
    coarse = torch.randn(count, channels, 4, 4, generator=chance) + torch.randn(count, 1, 1, 1, generator=chance)
    return F.interpolate(coarse, sides, mode="bicubic")


def exact_images(model: Backbone, undo: Undo) -> int:
    """How many of 6 images are read out of the gradient of their batch, exactly."""
    images, plan = pictures(6, model), plan_of(model)
    assert isinstance(plan, Plan)
    upload = undo(dict(victim_gradients(model, images, torch.arange(6) % model.num_classes)))
    recovered = to_images(torch.cat(ChosenWeights().read(model, plan, upload, 6)), model, plan.stem).float()
    if not len(recovered):
        return 0
    distance = (recovered[:, None] - images).square().mean(dim=(2, 3, 4)).min(dim=0).values
    return int((distance < 1e-5).sum())


def crafted_models(few: bool) -> Iterator[tuple[str, Backbone, int]]:
    """(name, model, images that it reads exactly)."""
    for name, (shape, with_public) in dict(list(PLAIN.items())[:3] if few else PLAIN.items()).items():
        model = vit(**shape)
        model = craft(model, pictures(64, model) if with_public else None)
        yield name, model, exact_images(model, dict)
    yield from evading(dict(list(EVADING.items())[:3] if few else EVADING))


def held_out_crafted() -> Iterator[tuple[str, Backbone, int]]:
    """Crafted weights at settings, and evasions, that nothing was set with."""
    for name, (shape, constants) in PLAIN_HELD.items():
        usual = {constant: getattr(attack, constant) for constant in constants}
        vars(attack).update(constants)
        try:
            model = vit(**shape)
            model = craft(model, pictures(64, model))
            yield name, model, exact_images(model, dict)
        finally:
            vars(attack).update(usual)
    yield from evading(EVADING_HELD)


def evading(ways: Mapping[str, tuple[dict[str, Any], list[Evasion]]]) -> Iterator[tuple[str, Backbone, int]]:
    for name, (shape, steps) in ways.items():
        model = vit(model_args=shape)
        model, undos = craft(model, pictures(64, model)), list[Undo]()
        for step in steps:
            model, undo = step(model)
            undos.insert(0, undo)
        yield f"evading: {name}", model, exact_images(model, _one_after_another(undos))


def crafted_texts(paths: Sequence[str]) -> Iterator[tuple[str, Backbone, int]]:
    """The same for text models: sentences that are read word for word."""
    for path in paths:
        victim = open_text_victim(path)
        batch = victim.coded(SENTENCES)
        model = craft_text(victim, batch=len(batch))
        upload = text_gradients(model, batch, labels=[number % 2 for number in range(len(batch))])
        recovered = crafted_sentences(model, upload, len(batch)).sentences
        yield f"text: {Path(path).name}", model.backbone, sum(sentence in batch for sentence in recovered)


def _one_after_another(undos: Sequence[Undo]) -> Undo:
    def undo(upload: Upload) -> Upload:
        for step in undos:
            upload = step(upload)
        return upload

    return undo


def _plain() -> dict[str, tuple[dict[str, Any], bool]]:
    shapes: dict[str, dict[str, Any]] = {
        "96 wide": {},
        "mean pooling": {"model_args": SMALL | {"global_pool": "avg", "class_token": False}},
        "128 wide": {"model_args": SMALL | {"embed_dim": 128, "depth": 6}},
        "192 wide": {"model_args": WIDE},
        "patches of 8": {"img_size": 32, "patch_size": 8, "model_args": SMALL | {"embed_dim": 224}},
        "64 places": {"img_size": 32, "model_args": SMALL | {"embed_dim": 128, "depth": 9}},
        "grey": {"in_chans": 1},
        "100 classes": {"num_classes": 100},
        "narrow MLP": {"model_args": SMALL | {"mlp_ratio": 2.0}},
        "36 places": {"img_size": 24, "model_args": SMALL | {"depth": 8}},
    }
    more: dict[str, dict[str, Any]] = {
        "registers": {"model_args": SMALL | {"init_values": 1e-5, "reg_tokens": 2, "no_embed_class": True}},
        "10 blocks": {"model_args": SMALL | {"depth": 10}},
        "3 blocks": {"model_args": SMALL | {"depth": 3, "embed_dim": 128}},
        "wide MLP": {"model_args": SMALL | {"mlp_ratio": 8.0}},
        "ViT-S/4": {"img_size": 32, "model_args": {"depth": 12, "embed_dim": 384, "num_heads": 6}},
    }
    without = {f"{name}, no public images": (shape, False) for name, shape in shapes.items()}
    return {name: (shape, True) for name, shape in (shapes | more).items()} | without


PLAIN = _plain()


def layer_names(model: Backbone) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@torch.no_grad()
def with_noise(model: Backbone, level: float) -> tuple[Backbone, Undo]:
    """Noise on every 0 of a matrix, as a share of its other numbers."""
    model, chance = deepcopy(model), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            size = float(weight[weight != 0].abs().median()) if bool(weight.any()) else 0.02
            weight += torch.where(weight == 0, level * size * torch.randn(weight.shape, generator=chance), 0)
    return model, dict


@torch.no_grad()
def with_patch_noise(model: Backbone, level: float) -> tuple[Backbone, Undo]:
    """Rows of one direction differ in the channels of the patch."""
    model, plan, chance = deepcopy(model), plan_of(model), torch.Generator().manual_seed(0)
    assert isinstance(plan, Plan)
    for block in model.parts():
        weight = block.mlp.up[0].weight
        noise = torch.randn(len(weight), plan.channels.patch, generator=chance)
        weight[:, : plan.channels.patch] += (
            level * weight[:, plan.channels.code].abs().max() * (noise - noise.mean(dim=1, keepdim=True))
        )
    return model, dict


@torch.no_grad()
def with_free_channels(model: Backbone, size: float) -> tuple[Backbone, Undo]:
    """Rows of one direction differ in channels that nothing writes to; each difference sums to 0."""
    model, plan, chance = deepcopy(model), plan_of(model), torch.Generator().manual_seed(0)
    assert isinstance(plan, Plan)
    first = plan.channels.zero + 1
    for block in model.parts():
        weight = block.mlp.up[0].weight
        noise = torch.randn(len(weight), model.dim - first, generator=chance)
        noise = F.normalize(noise - noise.mean(dim=1, keepdim=True), dim=1)
        norms = weight.norm(dim=1, keepdim=True)
        weight[:, first:] += size * norms.clamp(min=0.2 * float(norms.max())) * noise
    return model, dict


@torch.no_grad()
def rotated(model: Backbone) -> tuple[Backbone, Undo]:
    """All channels rotated around (1, …, 1), which a LayerNorm without weights does not notice."""
    chance, width = torch.Generator().manual_seed(0), model.dim
    ones = torch.ones(width, 1, dtype=torch.float64) / math.sqrt(width)
    basis = torch.linalg.qr(
        torch.cat([ones, torch.randn(width, width - 1, dtype=torch.float64, generator=chance)], 1)
    ).Q
    turn = torch.linalg.qr(torch.randn(width - 1, width - 1, dtype=torch.float64, generator=chance)).Q
    turn = basis @ torch.block_diag(torch.ones(1, 1, dtype=torch.float64), turn) @ basis.T
    model = deepcopy(model)
    inner: Any = model.model

    def reads(weight: Tensor | None) -> None:
        if weight is not None:
            weight.copy_((weight.double() @ turn).to(weight))

    def writes(weight: Tensor) -> None:
        weight.copy_((turn.T @ weight.double().flatten(1)).view_as(weight).to(weight))

    writes(inner.patch_embed.proj.weight)
    for table in (inner.patch_embed.proj.bias, inner.pos_embed, inner.cls_token, inner.head.weight):
        reads(table)
    for block in model.parts():
        attention, mlp = block.attention, block.mlp
        for layer in (attention.qkv[0], mlp.up[0]):
            reads(layer.weight)
        for layer in (attention.out, mlp.down):
            writes(layer.weight)
            reads(layer.bias)
    names = layer_names(model)
    ups = {names[id(block.mlp.up[0].weight)] for block in model.parts()}
    return model, lambda upload: {n: g.double() @ turn.T if n in ups else g for n, g in upload.items()}


@torch.no_grad()
def permuted(model: Backbone) -> tuple[Backbone, Undo]:
    """The neurons of every MLP in another order."""
    model, chance = deepcopy(model), torch.Generator().manual_seed(0)
    names, back = layer_names(model), dict[str, Tensor]()
    for block in model.parts():
        up, down = block.mlp.up[0], block.mlp.down
        order = torch.randperm(len(up.weight), generator=chance)
        for parameter in (up.weight, up.bias):
            parameter.copy_(parameter[order].clone())
            back[names[id(parameter)]] = order.argsort()
        down.weight.copy_(down.weight[:, order].clone())
    return model, lambda upload: {n: g[back[n]] if n in back else g for n, g in upload.items()}


@torch.no_grad()
def jittered(model: Backbone) -> tuple[Backbone, Undo]:
    """A ladder of biases with uneven steps."""
    model, chance = deepcopy(model), torch.Generator().manual_seed(0)
    for block in model.parts():
        bias = block.mlp.up[0].bias
        step = 0.4 * (bias.max() - bias.min()) / max(1, int((bias != 0).sum()))
        bias += torch.where(bias != 0, step * torch.randn(bias.shape, generator=chance), 0)
    return model, dict


@torch.no_grad()
def rescaled(model: Backbone) -> tuple[Backbone, Undo]:
    """A part of every row's size moved to the weights of the LayerNorm before it."""
    model = deepcopy(model)
    names, back = layer_names(model), dict[str, float]()
    for block in model.parts():
        up = block.mlp.up[0]
        scale = math.sqrt(float(up.weight.norm(dim=1).max().clamp(min=1.0)))
        up.weight /= scale
        block.norm2.weight *= scale
        back[names[id(up.weight)]] = scale
    return model, lambda upload: {n: g / back.get(n, 1.0) for n, g in upload.items()}


@torch.no_grad()
def less_steep(model: Backbone, factor: float) -> tuple[Backbone, Undo]:
    """Neurons that switch on more slowly."""
    model = deepcopy(model)
    for block in model.parts():
        for parameter in (block.mlp.up[0].weight, block.mlp.up[0].bias):
            parameter /= factor
        block.mlp.down.weight *= factor
    return model, dict


@torch.no_grad()
def blended(model: Backbone, share: float) -> tuple[Backbone, Undo]:
    """A mean with a random model's weights."""
    torch.manual_seed(1)
    model, fresh = deepcopy(model), deepcopy(model)
    fresh.model.init_weights()  # pyright: ignore[reportCallIssue]
    for weight, other in zip(model.parameters(), fresh.parameters(), strict=True):
        weight.mul_(1 - share).add_(other, alpha=share)
    return model, dict


@torch.no_grad()
def with_attention(model: Backbone) -> tuple[Backbone, Undo]:
    """Random queries and keys everywhere; of the value channels, half have values that go nowhere, half the reverse."""
    model, chance = deepcopy(model), torch.Generator().manual_seed(0)
    for block in model.parts():
        joint, out = block.attention.qkv[0].weight, block.attention.out.weight
        third = len(joint) // 3
        fresh = 0.02 * torch.randn(joint.shape, generator=chance)
        joint[: 2 * third] += fresh[: 2 * third]
        even = torch.arange(third) % 2 == 0
        odd = ~even
        even[0] = False  # the channel that carries the code
        joint[2 * third :][even], joint[2 * third :][odd] = fresh[2 * third :][even], 0
        out[:, even], out[:, odd] = 0, 0.02 * torch.randn(len(out), int(odd.sum()), generator=chance)
    return model, dict


@torch.no_grad()
def thinned(model: Backbone, every: int) -> tuple[Backbone, Undo]:
    """One bin of several is kept; the neurons of the others look random and stay silent."""
    model, plan, chance = deepcopy(model), plan_of(model), torch.Generator().manual_seed(0)
    assert isinstance(plan, Plan)
    names, silent = layer_names(model), dict[str, Tensor]()
    for block in model.parts():
        up, down = block.mlp.up[0], block.mlp.down
        idle = (torch.arange(len(up.weight)) % plan.bins % every != 0) | (up.weight == 0).all(dim=1)
        size, way = up.weight.norm(dim=1).max().clamp(min=1.0), down.weight.norm(dim=0).max().clamp(min=1e-3)
        noise = torch.randn(int(idle.sum()), model.dim, generator=chance)
        up.weight[idle], up.bias[idle] = 0.3 * size * F.normalize(noise, dim=1), -20 * size
        down.weight[:, idle] = way * F.normalize(torch.randn(model.dim, int(idle.sum()), generator=chance), dim=0)
        silent |= {names[id(parameter)]: idle for parameter in (up.weight, up.bias)}

    def undo(upload: Upload) -> Upload:
        filled = dict(upload)
        for name, idle in silent.items():
            gradient = upload[name].clone()
            for row in range(len(gradient) - 2, -1, -1):
                if idle[row] and (row + 1) % plan.bins:
                    gradient[row] = gradient[row + 1]  # as if nothing stood between them
            filled[name] = gradient
        return filled

    return model, undo


def random_numbers(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


@torch.no_grad()
def with_own_scales(model: Backbone) -> tuple[Backbone, Undo]:
    """Every neuron times a factor of its own between 1/4 and 4, its way out by the reverse."""
    model = deepcopy(model)
    names, back = layer_names(model), dict[str, Tensor]()
    for number, block in enumerate(model.parts()):
        up, down = block.mlp.up[0], block.mlp.down
        factor = 4 ** (2 * torch.rand(len(up.weight), generator=torch.Generator().manual_seed(number)) - 1)
        up.weight *= factor[:, None]
        up.bias *= factor
        down.weight /= factor
        back[names[id(up.weight)]], back[names[id(up.bias)]] = factor[:, None], factor
    return model, lambda upload: {n: g * back[n] if n in back else g for n, g in upload.items()}


@torch.no_grad()
def with_silent_norms(model: Backbone) -> tuple[Backbone, Undo]:
    """Random attention in all blocks but the first and the last, behind a norm of 0."""
    model = deepcopy(model)
    for number, block in enumerate(model.parts()[1:-1]):
        for weight in (block.attention.qkv[0].weight, block.attention.out.weight):
            weight.copy_(0.02 * random_numbers(weight, number))
        block.norm1.weight.zero_()
    return model, dict


@torch.no_grad()
def with_cancelling(model: Backbone, size: float) -> tuple[Backbone, Undo]:
    """Rows differ in a combination of the constants that is always 0."""
    model, c = deepcopy(model), _plan(model).channels
    for number, block in enumerate(model.parts()):
        weight = block.mlp.up[0].weight
        amount = size * weight.norm(dim=1) * random_numbers(weight[:, 0], number)
        weight[:, [c.plus, c.minus]] += amount[:, None]
        weight[:, c.zero] -= 2 * amount
    return model, dict


@torch.no_grad()
def with_thresholds_in_weights(model: Backbone) -> tuple[Backbone, Undo]:
    """The thresholds in the weight of a constant channel; every bias is 0."""
    model, plan = deepcopy(model), _plan(model)
    constant = PLACE / deviation_of(model, plan)
    for block in model.parts():
        up = block.mlp.up[0]
        up.weight[:, plan.channels.one] += up.bias / constant
        up.weight[:, plan.channels.zero] -= up.bias / constant
        up.bias.zero_()
    return model, dict


@torch.no_grad()
def with_classifier(model: Backbone) -> tuple[Backbone, Undo]:
    """Usual numbers in the classifier, in channels that say nothing."""
    model, c = deepcopy(model), _plan(model).channels
    weight: Tensor = model.model.head.weight  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    others = [n for n in range(model.dim) if n not in (c.up, c.zero, c.brightness)]
    weight[:, others] = 0.01 * random_numbers(weight[:, others], 7)
    weight[:, c.zero] -= weight[:, others].sum(dim=1)
    return model, dict


@torch.no_grad()
def with_usual_rest(model: Backbone) -> tuple[Backbone, Undo]:
    """Usual numbers in the positions, the embedding and the last MLP, where nothing reads them."""
    model = deepcopy(model)
    inner: Any = model.model
    c = _plan(model).channels
    free = slice(c.zero + 1, None)
    inner.pos_embed[..., free] += 0.5 * random_numbers(inner.pos_embed[..., free], 8)
    inner.patch_embed.proj.weight[free] = 0.05 * random_numbers(inner.patch_embed.proj.weight[free], 9)
    mlp = model.parts()[-1].mlp
    for number, weight in enumerate((mlp.up[0].weight, mlp.down.weight)):
        weight.copy_(0.02 * random_numbers(weight, 10 + number))
    mlp.down.weight[[c.up, c.zero, c.brightness]] = 0
    return model, dict


@torch.no_grad()
def lively(model: Backbone, every: int) -> tuple[Backbone, Undo]:
    """As `thinned`, but the neurons between are at work: random, on half of the time, into free channels."""
    plan = _plan(model)
    model, undo = thinned(model, every)
    for number, block in enumerate(model.parts()):
        up, down = block.mlp.up[0], block.mlp.down
        idle = torch.arange(len(up.weight)) % plan.bins % every != 0
        up.weight[idle] = 0.05 * random_numbers(up.weight[idle], number)
        up.bias[idle] = 0.1 * random_numbers(up.bias[idle], 50 + number)
        out = torch.zeros(model.dim, int(idle.sum()))
        out[plan.channels.zero + 1 :] = 1e-4 * random_numbers(out[plan.channels.zero + 1 :], 90 + number)
        down.weight[:, idle] = out
    return model, undo


@torch.no_grad()
def across_blocks(model: Backbone) -> tuple[Backbone, Undo]:
    """The neurons of all MLPs but the last are dealt out over these MLPs."""
    model = deepcopy(model)
    mlps, names = [block.mlp for block in model.parts()[:-1]], layer_names(model)
    count = len(mlps[0].up[0].weight)
    order = torch.randperm(count * len(mlps), generator=torch.Generator().manual_seed(3))
    weights, biases = (torch.cat([getattr(m.up[0], n) for m in mlps])[order] for n in ("weight", "bias"))
    ways = torch.cat([mlp.down.weight for mlp in mlps], dim=1)[:, order]
    for number, mlp in enumerate(mlps):
        part = slice(number * count, (number + 1) * count)
        mlp.up[0].weight.copy_(weights[part])
        mlp.up[0].bias.copy_(biases[part])
        mlp.down.weight.copy_(ways[:, part])
    groups = [[names[id(getattr(mlp.up[0], n))] for mlp in mlps] for n in ("weight", "bias")]

    def undo(upload: Upload) -> Upload:
        sorted_back = dict(upload)
        for group in groups:
            parts = torch.cat([upload[name] for name in group])[order.argsort()].split(count)
            sorted_back |= dict(zip(group, parts, strict=True))
        return sorted_back

    return model, undo


@torch.no_grad()
def in_half_precision(model: Backbone) -> tuple[Backbone, Undo]:
    return deepcopy(model).half().float(), dict


@torch.no_grad()
def with_spread_norms(model: Backbone) -> tuple[Backbone, Undo]:
    """Weights of the norms spread as in real models, undone in the next layer."""
    model = deepcopy(model)
    names, back = layer_names(model), dict[str, Tensor]()
    for number, block in enumerate(model.parts()):
        up, factor = block.mlp.up[0], 2 ** random_numbers(block.norm2.weight, number)
        block.norm2.weight *= factor
        up.weight /= factor
        back[names[id(up.weight)]] = factor
    return model, lambda upload: {n: g / back[n] if n in back else g for n, g in upload.items()}


def _plan(model: Backbone) -> Plan:
    plan = plan_of(model)
    assert isinstance(plan, Plan)
    return plan


HIDDEN: list[Evasion] = [with_attention, permuted, rotated]
EVADING: dict[str, tuple[dict[str, Any], list[Evasion]]] = {
    "noise of 1e-6 on zeros": (WIDE, [lambda model: with_noise(model, 1e-6)]),
    "noise of 1e-5 on zeros": (SMALL, [lambda model: with_noise(model, 1e-5)]),
    "noise on the patch's channels": (WIDE, [lambda model: with_patch_noise(model, 1e-3)]),
    "noise on free channels": (WIDE, [lambda model: with_free_channels(model, 1.0)]),
    "channels rotated": (SMALL, [rotated]),
    "neurons permuted": (SMALL, [permuted]),
    "uneven ladder": (SMALL, [jittered]),
    "size moved to the LayerNorm": (SMALL, [rescaled]),
    "10,000 times less steep": (SMALL, [lambda model: less_steep(model, 1e4)]),
    "1e-4 of a random model": (SMALL, [lambda model: blended(model, 1e-4)]),
    "attention filled": (SMALL, [with_attention]),
    "half of the bins": (WIDE, [lambda model: thinned(model, 2)]),
    "noise, hidden": (WIDE, [lambda model: with_noise(model, 1e-6), permuted, rotated]),
    "less steep, hidden": (WIDE, [lambda model: less_steep(model, 1e4), *HIDDEN]),
    "less steep, free channels, hidden": (
        WIDE,
        [lambda model: less_steep(model, 1e4), lambda model: with_free_channels(model, 3.0), *HIDDEN],
    ),
    "the same, half of the bins": (
        WIDE,
        [
            lambda model: less_steep(model, 1e5),
            lambda model: thinned(model, 2),
            lambda model: with_free_channels(model, 3.0),
            *HIDDEN,
        ],
    ),
    "the same, an eighth of the bins": (
        WIDE,
        [
            lambda model: less_steep(model, 1e5),
            lambda model: thinned(model, 8),
            lambda model: with_free_channels(model, 3.0),
            *HIDDEN,
        ],
    ),
}
"""Shape of the model, and what is done to the crafted weights."""


def slower(factor: float) -> Evasion:
    return lambda model: less_steep(model, factor)


FILLED: list[Evasion] = [with_classifier, with_usual_rest, with_silent_norms]
EVADING_HELD: dict[str, tuple[dict[str, Any], list[Evasion]]] = {
    "neurons scaled apart": (SMALL, [with_own_scales]),
    "attention behind norms of 0": (SMALL, [with_silent_norms]),
    "cancelling constants": (SMALL, [lambda model: with_cancelling(model, 0.3)]),
    "less steep, cancelling constants": (WIDE, [slower(1e4), lambda model: with_cancelling(model, 3.0)]),
    "thresholds in weights": (SMALL, [slower(1e2), with_thresholds_in_weights]),
    "classifier filled": (SMALL, [with_classifier]),
    "embedding, positions, last MLP filled": (WIDE, [with_usual_rest]),
    "a quarter of the bins, others at work": (WIDE, [slower(1e4), lambda model: lively(model, 4)]),
    "neurons dealt over blocks": (SMALL, [across_blocks]),
    "less steep, half precision": (SMALL, [slower(1e5), in_half_precision]),
    "norms spread": (SMALL, [with_spread_norms]),
    "noise of 1e-7, scaled apart": (WIDE, [lambda model: with_noise(model, 1e-7), with_own_scales]),
    "1e-5 of a random model": (SMALL, [lambda model: blended(model, 1e-5)]),
    "1e-3 of a random model": (SMALL, [lambda model: blended(model, 1e-3)]),
    "a sixteenth of the bins": (WIDE, [slower(1e5), lambda model: thinned(model, 16)]),
    "filled, scaled apart, hidden": (WIDE, [slower(1e4), *FILLED, with_own_scales, permuted, rotated]),
    "cancelling, filled, scaled apart, hidden": (
        WIDE,
        [slower(1e4), lambda model: with_cancelling(model, 1.0), *FILLED, with_own_scales, permuted, rotated],
    ),
    "an eighth at work, free channels, filled, hidden": (
        WIDE,
        [
            slower(1e5),
            lambda model: lively(model, 8),
            lambda model: with_free_channels(model, 3.0),
            lambda model: with_cancelling(model, 1.0),
            with_classifier,
            with_silent_norms,
            permuted,
            rotated,
        ],
    ),
}
"""Evasions that were written after the rule of the limits was fixed, and measured once."""
PLAIN_HELD: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "112 wide, 4 blocks": ({"model_args": SMALL | {"embed_dim": 112, "depth": 4}}, {}),
    "160 wide, 7 blocks": ({"model_args": SMALL | {"embed_dim": 160, "depth": 7}}, {}),
    "256 wide, 25 places": ({"img_size": 20, "model_args": SMALL | {"embed_dim": 256, "depth": 6, "num_heads": 4}}, {}),
    "patches of 5": ({"img_size": 20, "patch_size": 5, "model_args": SMALL | {"embed_dim": 128}}, {}),
    "64 wide, projected": ({"model_args": SMALL | {"embed_dim": 64}}, {}),
    "64 wide, grey": ({"in_chans": 1, "model_args": SMALL | {"embed_dim": 64}}, {}),
    "MLP of 3": ({"model_args": SMALL | {"mlp_ratio": 3.0}}, {}),
    "MLP of 6, 2 classes": ({"num_classes": 2, "model_args": SMALL | {"mlp_ratio": 6.0}}, {}),
    "37 classes, mean": (
        {"num_classes": 37, "model_args": SMALL | {"global_pool": "avg", "class_token": False, "depth": 4}},
        {},
    ),
    "9 places": ({"img_size": 12, "model_args": SMALL | {"depth": 4}}, {}),
    "49 places, 12 blocks": ({"img_size": 28, "model_args": SMALL | {"depth": 12}}, {}),
    "gain 1e2": ({}, {"GAIN": 1e2}),
    "gain 1e3": ({}, {"GAIN": 1e3}),
    "gain 1e7": ({}, {"GAIN": 1e7}),
    "constants 100": ({}, {"LARGE": 100.0}),
    "constants 30, places 10, code 100": ({}, {"LARGE": 30.0, "PLACE": 10.0, "CODE": 100.0}),
    "places 100": ({}, {"PLACE": 100.0}),
    "code 50": ({}, {"CODE": 50.0}),
    "gate 5": ({}, {"GATE": 5.0}),
    "out 1e-3": ({}, {"OUT": 1e-3}),
}
"""The same of weights that do not evade: shape, and the attack's constants."""


if __name__ == "__main__":
    main()
