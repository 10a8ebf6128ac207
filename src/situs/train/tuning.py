"""Which weights of a pretrained model are trained: all, the classifier alone, or LoRA's products of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from situs.backbones.lora import add_lora, low_rank_names
from situs.backbones.weights import HEADS
from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, Positive
from situs.methods import classifies
from situs.methods.base import Method

_MODEL = "backbone.model."


@dataclass(frozen=True)
class TuningConfig(Checked):
    """Which parts of a model are trained, and the size of LoRA's matrices."""

    parts: Literal["all", "head", "lora"] = "all"
    """Trained weights: all, head (the classifier) or lora (the classifier and LoRA); new position embeddings are always
    trained."""

    rank: Count = 8
    """With parts=lora: rank of each low-rank product."""

    alpha: Positive = 16.0
    """With parts=lora: each low-rank product is scaled by alpha / rank."""

    targets: tuple[str, ...] = ("qkv",)
    """With parts=lora: the adapted layers. Give qkv (queries, keys and values of every block), blocks (every matrix of
    the blocks), or names of layers such as proj,fc1."""

    head: Literal["probe", "new"] | None = None
    """Initial weights of the classifier. probe: from a linear probe on the frozen features. new: random. Default: probe
    if there are at most 5,000 samples and the pretrained model uses positions, otherwise new."""

    def check(self) -> None:
        if not self.targets:
            raise SitusError(field="targets", value="", allowed="one or more names of layers")


def check_start(config: TuningConfig, init: str | None, *, new: bool) -> None:
    """Refuses to freeze weights that were never trained; for a new run also settings of LoRA without LoRA."""
    for name in ("rank", "alpha", "targets") if new and config.parts != "lora" else ():
        if (value := getattr(config, name)) != getattr(TuningConfig, name):
            shown = ",".join(value) if isinstance(value, tuple) else value
            reason = (
                f"tuning.{name}={shown}: applies only to LoRA (tuning.parts=lora), not to tuning.parts={config.parts}"
            )
            raise SitusError(reason, field=(f"tuning.{name}", "tuning.parts"))
    if config.parts != "all" and init is None:
        reason = (
            f"tuning.parts={config.parts}: freezes the other weights, which are random; give trained weights (init)"
        )
        raise SitusError(reason, field=("tuning.parts", "init"))


def attach(method: Method, config: TuningConfig) -> Method:
    """Adds LoRA's products where the config asks for them: after pretrained weights are loaded, before a checkpoint."""
    if config.parts == "lora":
        add_lora(method.backbone, config.rank, config.alpha, config.targets)
    return method


def freeze(method: Method, config: TuningConfig, *, new_positions: bool) -> None:
    """Freezes all but what the config names, new positions, and what the method itself adds."""
    if config.parts == "all":
        return
    trained = {f"backbone.{name}" for name in low_rank_names(method.backbone)}
    heads = {name for name, _ in method.named_parameters() if name.removeprefix(_MODEL).startswith(HEADS)}
    if not heads and not classifies(type(method)):
        raise SitusError(
            field="tuning.parts",
            value=config.parts,
            allowed=f"all, because the head of {method.backbone.name} is not known",
        )
    if new_positions:
        roles = method.backbone.roles()
        trained |= {f"backbone.{name}" for name, role in roles.items() if role.part in ("table", "position")}
    for name, parameter in method.named_parameters():
        if name.startswith("backbone.") and name not in trained | heads:
            parameter.requires_grad_(False)


def describe(config: TuningConfig) -> str:
    """What is trained, in words."""
    if config.parts == "lora":
        return f"the classifier, and LoRA matrices of rank {config.rank} in the layers {', '.join(config.targets)}"
    return {"all": "every weight", "head": "the classifier"}[config.parts]
