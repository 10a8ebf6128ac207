"""Private and public images and the model between them: what is sent, the utility that is left, scores of attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize, one_hot

from situs.audit.scores import denormalise, match_patches, psnr, ssim
from situs.audit.split.decoder import Learned, learn
from situs.audit.split.joint import TRIED, Borders, Joint, PublicSide, joint, public_side
from situs.backbones.base import Backbone, Stream
from situs.core.random import bits
from situs.core.tokens import patchify
from situs.data.sampler import epoch_order
from situs.errors import SitusError, counted
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.veil import Veil, Words, exchange
from situs.methods.supervised import multi_label_loss
from situs.models import Model, open_model
from situs.models.data import AnyModel, opened

PIECE = 32
"""Samples that are embedded at a time."""


NONE = Veil()


class Truth(NamedTuple):
    """Of each row that was sent, the sample and the row of the stream it is; of each channel, the clear one.

    sample, row: [n, R]. channels: [D].
    """

    sample: Tensor
    row: Tensor
    channels: Tensor


class View(NamedTuple):
    """What arrived, [n, R, D], and the truth about it."""

    seen: Tensor
    truth: Truth


def counted_words(seed: int, *parts: int) -> Words:
    """Random words from a seed, so that a measurement can be repeated; an owner's come from a key."""

    def words(purpose: str, count: int) -> Tensor:
        stream = f"split:{purpose}:{':'.join(map(str, parts))}"
        return bits(seed, 0, torch.zeros(1, dtype=torch.long), stream, (count,)).flatten()

    return words


def check_places(backbone: Backbone) -> None:
    """Refuses a model whose blocks get positions beside the tokens: no order of rows hides them from its server."""
    if (why := row_refusal(backbone) or row_leak(backbone)) is not None:
        raise SitusError(
            f"{backbone.name}: this audit does not apply, because in this model no permutation of the tokens (the rows "
            f"of the hidden states) can hide their order: {why}"
        )


def open_base(base: AnyModel, model: Model, seed: int, shape: Callable[[Backbone], str], **options: Any) -> Model:
    """The model before fine-tuning, which an attacker knows; refused where its shape, in words, differs. options: of
    `open_model`."""
    named = isinstance(base, str | Path)
    old = opened(open_model(base, seed=seed, device=model.device, **options) if named else base, seed)
    ours, theirs = shape(model.backbone), shape(old.backbone)
    if ours != theirs:
        reason = f"{old.name}: {theirs}, but {model.name} {ours}; the base must be the model before fine-tuning"
        raise SitusError(reason, field="base")
    return old


@torch.no_grad()
def streams(backbone: Backbone, images: Iterable[Tensor]) -> Tensor:
    """The streams that enter the blocks, [n, R, D] float64, for batches of images."""
    check_places(backbone)
    positions = backbone.positions()
    return torch.cat([backbone.assemble(backbone.embed(batch), positions).z.double().cpu() for batch in images])


@torch.no_grad()
def send(
    z: Tensor, veil: Veil, words: Words, *, prefix: int, grid: tuple[int, ...], scale: float,
    channels: Tensor | None = None,
) -> View:  # fmt: skip
    """The streams z [n, R, D] as one batch that a client under this veil sends.

    scale: what a noise's σ is a multiple of. channels: [D], the key's order, which stays from step to step while rows
    get a new one; None draws one.
    """
    count, rows, width = z.shape
    if not veil.columns:
        channels = torch.arange(width)
    elif channels is None:
        channels = words("columns", width).argsort(stable=True)
    drawn = veil.draw(words, (count, rows, width), prefix, grid)
    seen, _, _ = veil.apply(z, None, drawn, prefix=prefix, scale=scale, channels=(channels, channels))
    sample = torch.arange(count)[:, None].expand(count, rows).clone()
    row = torch.arange(rows).expand(count, rows).clone()
    if veil.exchanging(count):
        for numbers in (sample, row):
            numbers[:, prefix:] = exchange(numbers[:, prefix:], drawn["defence"])
    if veil.rows:
        sample, row = (numbers.gather(1, drawn["rows"]) for numbers in (sample, row))
    return View(seen, Truth(sample, row, channels))


NEAREST = 5


@dataclass(frozen=True)
class Kept:
    """The utility that is left. cosine: mean similarity with the undefended features. neighbours: the share of the
    nearest five that still are. knn, probe: leave-one-out accuracy on labelled images. accuracy: of the model's own
    classifier. None: could not be measured."""

    cosine: float
    neighbours: float | None = None
    knn: float | None = None
    probe: float | None = None
    accuracy: float | None = None

    def numbers(self) -> dict[str, float | None]:
        """As JSON holds them."""
        values = asdict(self)
        return {"feature_cosine": values.pop("cosine"), **values}


def cosine(features: Tensor, plain: Tensor) -> float:
    """The mean similarity of features [n, D] with the undefended ones."""
    return float(cosine_similarity(features, plain).mean())


def neighbours(features: Tensor, plain: Tensor) -> float | None:
    """The share of each sample's nearest five by undefended features [n, D] that are among its nearest five here."""
    if len(features) <= 2 * NEAREST:
        return None
    here, there = (_nearest(vectors) for vectors in (features, plain))
    return float((here[:, :, None] == there[:, None]).any(dim=2).double().mean())


def leave_one_out_knn(features: Tensor, labels: Tensor) -> float:
    """The share of samples whose class most of the nearest five others have; of classes that tie, the nearest's."""
    near = labels[_nearest(features)]  # [n, k]
    votes = (near[:, :, None] == near[:, None]).double().sum(dim=2)
    first = (votes - torch.arange(near.shape[1]) / near.shape[1]).argmax(dim=1)  # an earlier one wins a tie
    return float((near.gather(1, first[:, None])[:, 0] == labels).double().mean())


def leave_one_out_probe(features: Tensor, labels: Tensor) -> float:
    """The accuracy of a ridge regression onto the classes, each sample judged by one fitted to the others."""
    x = features.double()
    x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-12)
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    hat = x @ torch.linalg.solve(x.T @ x + len(x) * 0.1 * eye, x.T)
    wanted, leverage = one_hot(labels).double(), hat.diagonal()[:, None]
    answer = (hat @ wanted - leverage * wanted) / (1 - leverage)  # as if the sample had not been fitted to
    return float((answer.argmax(dim=1) == labels).double().mean())


def _nearest(features: Tensor) -> Tensor:
    """[n, k]: the others with the highest cosine, the nearest first."""
    unit = normalize(features.double(), dim=-1)
    alike = (unit @ unit.T).fill_diagonal_(-torch.inf)
    return alike.topk(min(NEAREST, len(unit) - 1), dim=1).indices


LOOKED_AT = 24
"""The most pictures for SSIM and feature similarity, which cost far more than the attack itself."""

SSIM_WINDOW = 11

ENOUGH = 10
"""Public tokens per channel from which the covariance of tokens is known well enough."""

DECODING = 1000
"""Numbers of steps from here on belong to a decoder that learns on public images."""


class Stage:
    """Private and public images, and what is computed from them once. The attacker has the public ones.

    z: [n, R, D] private streams. pictures: [n, C, H, W] in [0, 1]. patches: [m, N, P], the public images. labels: [n],
    [n, K] of 1, 0 and -1 (nobody knows) where an image has any number of classes, or None; `unnamed` says why they are
    not the classifier's, where they are not.
    """

    def __init__(
        self, model: Model, inputs: Tensor, public: int, mean: Tensor, std: Tensor, *, old: Model | None = None,
        labels: Tensor | None = None, unnamed: str | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.seed, self.unnamed = model, seed, unnamed
        self.backbone = model.backbone.eval()
        self.old = None if old is None else old.backbone.eval()
        height, width = self.backbone.grid  # images: a grid of two sides
        self.grid = height, width
        self.patch = inputs.shape[2] // height, inputs.shape[3] // width
        self.mean, self.std = mean.flatten().cpu().double(), std.flatten().cpu().double()
        pixels = denormalise(inputs.cpu(), self.mean.tolist(), self.std.tolist())
        self.public, self.inputs = inputs[:public], inputs[public:]
        self.patches, self.pictures = patchify(pixels[:public], self.patch), pixels[public:]
        self.public_labels, self.labels = (None, None) if labels is None else labels.cpu().tensor_split([public])
        self.z = streams(self.backbone, self.inputs.split(PIECE))
        self.channels = counted_words(seed, 9)("columns", self.z.shape[2]).argsort(stable=True)
        self._known: dict[bool, Tensor] = {}
        self._sides: dict[tuple[str, bool], PublicSide] = {}
        self._joints: dict[str, Joint] = {}
        self._outs: dict[tuple[str, bool], Tensor] = {}
        self._decoders: dict[str, Learned] = {}

    @property
    def thin(self) -> str | None:
        """Why public images are too few for the statistics of tokens; None where they are not."""
        tokens, width = len(self.patches) * self.patches.shape[1], self.z.shape[2]
        if tokens >= ENOUGH * width:
            return None
        return f"{counted(len(self.patches), 'public images')} have {tokens} tokens of {width} channels"

    @cached_property
    def borders(self) -> Borders:
        """How public images go on from patch to patch."""
        return Borders.of(self.patches, (*self.patch, self.pictures.shape[1]), self.grid)

    def side(self, defence: Veil, old: bool = False) -> PublicSide:
        """What the attacker knows under a defence, of the model or of the one before fine-tuning; fitted once."""
        key = str(defence), old
        if key not in self._sides:
            backbone = self.old if old else self.backbone
            assert backbone is not None
            if old not in self._known:
                self._known[old] = streams(backbone, self.public.split(PIECE))
            self._sides[key] = public_side(backbone, self._known[old], self.patches, defence)
        return self._sides[key]

    def joint(self, defence: Veil) -> Joint:
        """What the whole image adds under noise, decided on public images that are held out; fitted once."""
        if (key := str(defence)) not in self._joints:
            side, held_out = self.side(defence), min(TRIED, len(self.patches) // 6)
            if not side.noise:
                return Joint()
            if not held_out:
                few = f"too few public images ({len(self.patches)})"
                return Joint(missing=f"{few} to learn how patches fit together at their borders")
            part = public_side(self.backbone, side.tokens[held_out:], self.patches[held_out:], defence)
            unseen = side.tokens[:held_out, len(side.prefix) :]
            try:
                part = replace(part, noise=side.noise)
                self._joints[key] = joint(side, part, unseen, self.patches[:held_out], self.grid)
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]  # images that are all alike
                self._joints[key] = Joint(
                    missing="the statistics of patch borders in public images could not be computed"
                )
        return self._joints[key]

    def decoder(self, defence: Veil) -> Learned:
        """What a decoder learns on public images under a defence, rows and channels in their order; learned once."""
        if str(defence) not in self._decoders:
            side = self.side(defence)
            options = {"prefix": len(side.prefix), "seed": self.seed, "device": self.model.device}

            def sent(z: Tensor, step: int) -> Tensor:
                if defence.kind != "noise":
                    return self.sent(z, defence, DECODING + step).seen
                chance = torch.Generator().manual_seed(DECODING * self.seed + step)  # quicker than counted words
                return z + side.noise**0.5 * torch.randn(z.shape, generator=chance, dtype=z.dtype)

            changes = defence.kind in ("noise", "batch-shuffle")
            self._decoders[str(defence)] = learn(sent, side.tokens, self.patches, changes=changes, **options)
        return self._decoders[str(defence)]

    def sent(self, z: Tensor, veil: Veil, number: int) -> View:
        """What the client sends of streams z at one step; another step, other rows and noise, the same channels."""
        side, words = self.side(veil.defence), counted_words(self.seed, number)
        layout = {"prefix": len(side.prefix), "grid": self.grid, "scale": side.scale}
        return send(z, veil, words, channels=self.channels, **layout)

    @torch.no_grad()
    def through(self, defence: Veil, public: bool = False) -> Tensor:
        """The blocks' output for defended tokens, rows in their order; permutations do not change it."""
        key = str(defence), public
        if key not in self._outs:
            prefix, weight, side = self.backbone.num_prefix, next(self.backbone.parameters()), self.side(defence)
            words, z = counted_words(self.seed, int(public)), side.tokens if public else self.z
            count, rows, width = z.shape
            drawn = defence.draw(words, (count, rows, width), prefix, self.grid)
            moved, _, back = defence.apply(z, None, drawn, prefix=prefix, scale=side.scale)
            parts = [self.backbone.blocks(Stream(part.to(weight), prefix)).z.cpu() for part in moved.split(PIECE)]
            self._outs[key] = back(torch.cat(parts))
        return self._outs[key]

    @torch.no_grad()
    def pooled(self, out: Tensor) -> Tensor:
        """Features [n, D] from what the blocks gave."""
        features = self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix))
        return self.backbone.pooled(features).cpu()

    def logits(self, out: Tensor) -> Tensor:
        """Answers [n, K] from what the blocks gave."""
        return self.backbone.head(self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix)))

    @property
    def several(self) -> bool:
        """Whether an image has any number of the classes."""
        return self.labels is not None and self.labels.dim() == 2

    def commonest(self) -> dict[str, float]:
        """The score of the commonest public labels for every image, where an image has any number of them."""
        if self.unlabelled is not None or not self.several:
            return {}
        assert self.labels is not None
        assert self.public_labels is not None
        guess = (self.public_labels > 0).sum(dim=0) > (self.public_labels == 0).sum(dim=0)
        known = self.labels >= 0
        return {"labels": float((guess.expand_as(known) == (self.labels > 0))[known].double().mean())}

    @property
    def unlabelled(self) -> str | None:
        """Why nothing can be said of labels, or None."""
        if self.labels is None or self.unnamed is not None:
            return self.unnamed or "the images have no labels"
        count = self.labels.shape[1] if self.several else int(self.labels.max()) + 1
        fits = count == self.backbone.num_classes if self.several else count <= self.backbone.num_classes
        if self.several and not bool((self.labels >= 0).any()):
            return "no label of the attacked images is known"
        if not (self.model.classifier and fits):
            return f"{self.model.name} has no trained classifier for the labels"
        return None

    @torch.no_grad()
    def keeps(self, defence: Veil) -> Kept:
        """The utility under a defence; public images count among the neighbours of labelled ones."""
        out = self.through(defence)
        features, plain = self.pooled(out), self.pooled(self.through(NONE))
        kept = Kept(cosine(features, plain), neighbours(features, plain))
        if self.labels is None or self.public_labels is None or self.several:
            return kept
        labels = torch.cat([self.public_labels, self.labels])
        if int(labels.bincount().max()) > 1:  # one image a class has no neighbour to be named by
            every = torch.cat([self.pooled(self.through(defence, public=True)), features])
            kept = replace(kept, knn=leave_one_out_knn(every, labels), probe=leave_one_out_probe(every, labels))
        if self.unlabelled is not None:
            return kept
        return replace(kept, accuracy=float((self.logits(out).argmax(dim=-1).cpu() == self.labels).double().mean()))

    def returned(self, defence: Veil) -> tuple[Tensor, Tensor]:
        """(the blocks' output, the gradient that comes back to it) [n, R, D], rows in their order."""
        assert self.labels is not None
        out = self.through(defence).clone().requires_grad_()
        logits, labels = self.logits(out), self.labels.to(self.model.device)
        loss = multi_label_loss(logits, labels, 0.0)[0] if self.several else cross_entropy(logits, labels)
        [gradient] = torch.autograd.grad(loss, out)
        return out.detach(), gradient

    def scores(self, images: Tensor) -> dict[str, float]:
        """Similarity of pictures [n, C, H, W] in [0, 1] to the private ones: means, and the most exposed one."""
        real, images = self.pictures.double(), images.double()
        quality = psnr(images, real)
        scores = {"psnr": float(quality.mean()), "best psnr": float(quality.max())}
        scores["patch psnr"] = float(match_patches(images, real, self.patch).psnr.mean())
        if min(real.shape[-2:]) >= SSIM_WINDOW:
            scores["ssim"] = float(ssim(images[:LOOKED_AT], real[:LOOKED_AT], torch.float32).mean())
        return {**scores, "fsim": self._features_alike(images[:LOOKED_AT])}

    @torch.no_grad()
    def _features_alike(self, images: Tensor) -> float:
        weight = next(self.backbone.parameters())
        shown = ((images - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)).to(weight)
        backbone = self.backbone
        features = backbone.pooled(backbone.encode(backbone.embed(shown), backbone.positions())).cpu()
        return float(cosine_similarity(features, self.pooled(self.through(NONE)[: len(images)])).mean())


@dataclass(frozen=True)
class Scene:
    """One veil under attack. side: public knowledge under its defence; old: that of a base model, or None.

    cache: what attackers share, made by the first that needs it.
    """

    stage: Stage
    veil: Veil
    side: PublicSide
    old: PublicSide | None
    view: View
    cache: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: Stage, veil: Veil) -> Scene:
        """What arrives at the first step, and what the attacker knows of it."""
        old = None if stage.old is None else stage.side(veil.defence, old=True)
        return cls(stage, veil, stage.side(veil.defence), old, stage.sent(stage.z, veil, 0))

    @property
    def size(self) -> int:
        """How many samples exchange their tokens; 0: none do."""
        return self.veil.exchanging(len(self.stage.z))

    def again(self, number: int) -> View:
        """All samples at another step: other rows and noise, and, as in another epoch, in other batches."""
        mixed = epoch_order(self.stage.seed, number, len(self.stage.z), stream="split.again")
        seen, truth = self.stage.sent(self.stage.z[mixed], self.veil, number)
        return View(seen, truth._replace(sample=mixed[truth.sample]))
