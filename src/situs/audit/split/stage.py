"""Both sides' images and the model between them: what an attack is given, and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from situs.audit.scores.metrics import denormalise, match_patches, psnr, ssim
from situs.audit.split.borders import Borders
from situs.audit.split.order import PublicSide, public_side
from situs.audit.split.view import NONE, PIECE, Setting, View, counted_words, send, streams
from situs.backbones.base import Stream
from situs.core.tokens import patchify
from situs.locks.features import Defence, defend
from situs.models import Model

LOOKED_AT = 24
"""Pictures at most that SSIM and feature similarity are means over: they cost far more than the attack itself."""

SSIM_WINDOW = 11


class Stage:
    """Private and public images, and what is computed of them once. The attacker has the public ones.

    z: [n, R, D] private streams. pictures: [n, C, H, W] in [0, 1]. patches: [m, N, P], the public images. labels: [n]
    or None.
    """

    def __init__(
        self, model: Model, inputs: Tensor, public: int, mean: Tensor, std: Tensor, *, old: Model | None = None,
        labels: Tensor | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.seed = model, seed
        self.backbone = model.backbone.eval()
        self.old = None if old is None else old.backbone.eval()
        height, width = self.backbone.grid  # images: a grid of two sides
        self.grid = height, width
        self.patch = inputs.shape[2] // height, inputs.shape[3] // width
        self.mean, self.std = mean.flatten().cpu().double(), std.flatten().cpu().double()
        pixels = denormalise(inputs.cpu(), self.mean.tolist(), self.std.tolist())
        self.public, self.inputs = inputs[:public], inputs[public:]
        self.patches, self.pictures = patchify(pixels[:public], self.patch), pixels[public:]
        self.labels = None if labels is None else labels[public:].cpu()
        self.z = streams(self.backbone, self.inputs.split(PIECE))
        self.channels = counted_words(seed, 9)("columns", self.z.shape[2]).argsort(stable=True)
        self._sides: dict[tuple[str, bool], PublicSide] = {}
        self._outs: dict[str, Tensor] = {}

    @cached_property
    def borders(self) -> Borders:
        """How public images go on from patch to patch."""
        return Borders.of(self.patches, (*self.patch, self.pictures.shape[1]), self.grid)

    def side(self, defence: Defence, old: bool = False) -> PublicSide:
        """What the attacker knows under a defence, of the model or of the one before fine-tuning; fitted once."""
        key = str(defence), old
        if key not in self._sides:
            backbone = self.old if old else self.backbone
            assert backbone is not None
            known = streams(backbone, self.public.split(PIECE))
            self._sides[key] = public_side(backbone, known, self.patches, defence)
        return self._sides[key]

    def sent(self, z: Tensor, setting: Setting, number: int) -> View:
        """What the client sends of streams z at one step; another step, other rows and noise, the same channels."""
        side, words = self.side(setting.defence), counted_words(self.seed, number)
        given = {"prefix": len(side.prefix), "grid": self.grid, "scale": side.scale}
        return send(z, setting, words, channels=self.channels, **given)

    @torch.no_grad()
    def through(self, defence: Defence) -> Tensor:
        """What the blocks give for defended tokens, rows where they belong; permutations change nothing of it."""
        if str(defence) not in self._outs:
            prefix, weight = self.backbone.num_prefix, next(self.backbone.parameters())
            words, scale = counted_words(self.seed, 0), self.side(defence).scale
            moved, back = defend(self.z, defence, words, prefix=prefix, grid=self.grid, scale=scale)
            parts = [self.backbone.blocks(Stream(each.to(weight), prefix)).z.cpu() for each in moved.split(PIECE)]
            self._outs[str(defence)] = back(torch.cat(parts))
        return self._outs[str(defence)]

    @torch.no_grad()
    def pooled(self, out: Tensor) -> Tensor:
        """Features [n, D] from what the blocks gave."""
        features = self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix))
        return self.backbone.pooled(features).cpu()

    def logits(self, out: Tensor) -> Tensor:
        """Answers [n, K] from what the blocks gave."""
        return self.backbone.head(self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix)))

    @property
    def unlabelled(self) -> str | None:
        """Why nothing can be said of labels, or None."""
        if self.labels is None:
            return "the images have none"
        if not self.model.classifier or int(self.labels.max()) >= self.backbone.num_classes:
            return f"{self.model.name} has no trained classifier for them"
        return None

    def keeps(self, defence: Defence) -> tuple[float, float | None]:
        """(mean cosine of the pooled features with the undefended ones, top-1 or None where labels say nothing)."""
        out = self.through(defence)
        cosine = float(cosine_similarity(self.pooled(out), self.pooled(self.through(NONE))).mean())
        if self.labels is None or self.unlabelled is not None:
            return cosine, None
        with torch.no_grad():
            return cosine, float((self.logits(out).argmax(dim=-1).cpu() == self.labels).double().mean())

    def returned(self, defence: Defence) -> tuple[Tensor, Tensor]:
        """(what the blocks gave, the gradient that comes back to it) [n, R, D], rows where they belong."""
        assert self.labels is not None
        out = self.through(defence).clone().requires_grad_()
        [gradient] = torch.autograd.grad(cross_entropy(self.logits(out), self.labels.to(self.model.device)), out)
        return out.detach(), gradient

    def scores(self, images: Tensor) -> dict[str, float]:
        """How alike pictures [n, C, H, W] in [0, 1] are to the private ones: means, and the one that came back best."""
        real, images = self.pictures.double(), images.double()
        quality = psnr(images, real)
        found = {"psnr": float(quality.mean()), "best psnr": float(quality.max())}
        found["patch psnr"] = float(match_patches(images, real, self.patch).psnr.mean())
        if min(real.shape[-2:]) >= SSIM_WINDOW:
            found["ssim"] = float(ssim(images[:LOOKED_AT], real[:LOOKED_AT]).mean())
        return {**found, "fsim": self._features_alike(images[:LOOKED_AT])}

    @torch.no_grad()
    def _features_alike(self, images: Tensor) -> float:
        weight = next(self.backbone.parameters())
        shown = ((images - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)).to(weight)
        backbone = self.backbone
        found = backbone.pooled(backbone.encode(backbone.embed(shown), backbone.positions())).cpu()
        return float(cosine_similarity(found, self.pooled(self.through(NONE)[: len(images)])).mean())


@dataclass(frozen=True)
class Scene:
    """One setting under attack. side: public knowledge under its defence; old: that of a base model, or None."""

    stage: Stage
    setting: Setting
    side: PublicSide
    old: PublicSide | None
    view: View

    @classmethod
    def of(cls, stage: Stage, setting: Setting) -> Scene:
        """What arrives at the first step, and what the attacker knows of it."""
        old = None if stage.old is None else stage.side(setting.defence, old=True)
        return cls(stage, setting, stage.side(setting.defence), old, stage.sent(stage.z, setting, 0))

    def send(self, z: Tensor, number: int) -> Tensor:
        """What arrives of streams z at another step."""
        return self.stage.sent(z, self.setting, number).seen
