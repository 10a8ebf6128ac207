"""Losses of other methods, added to a method's own loss: position as an auxiliary task of one backbone.

The other method sees the same batch, augmented as it is, makes its own draws, and its loss is added with a weight. What
it learns beside the backbone (a position head, a decoder) stands under `others.NAME` and is dropped on export.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from situs.config import from_dict
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import create_method, method_class
from situs.methods.base import Batch, Draws, Method, Output

FORM = "NAME:weight=NUMBER, and further fields of that method as :field=value"


class AddedLoss(NamedTuple):
    """A loss to add. name: the method's. config: its settings."""

    name: str
    weight: float
    config: Any


def parse(text: str) -> AddedLoss:
    """Parses "mp3:weight=0.1:mask_ratio=0.5"; refused if the method learns from labels or words."""
    name, *fields = text.split(":")
    kind = method_class(name)
    if kind.needs_targets:
        raise SitusError(field="added", value=text, allowed=f"a method that learns without labels, not {name}")
    settings: dict[str, Any] = {}
    for field in fields:
        key, sign, value = field.partition("=")
        if not (key and sign and value):
            raise SitusError(field="added", value=text, allowed=f"of the form {FORM}")
        settings[key] = _value(value)
    weight = settings.pop("weight", None)
    if type(weight) not in (int, float) or not (0 <= weight < math.inf):
        raise SitusError(field="added", value=text, allowed=f"of the form {FORM}, with a weight of 0 or more")
    return AddedLoss(name, float(weight), from_dict(kind.Config, settings))


def _value(text: str) -> Any:
    """A number, true or false, or the text itself."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def add_losses(method: Method, added: Sequence[AddedLoss]) -> Method:
    """The same method, which also bears the added losses; its class is derived from what it was."""
    if not added:
        return method
    if len({loss.name for loss in added}) < len(added):
        raise SitusError(field="added", value=",".join(loss.name for loss in added), allowed="each method once")
    others = nn.ModuleDict()
    for loss in added:
        other = create_method(loss.name, method.backbone, loss.config)
        del other._modules["backbone"]  # the main method's, and counted once: no part of the other
        object.__setattr__(other, "backbone", method.backbone)
        others[loss.name] = other
    method.__class__ = type(type(method).__name__, (WithLosses, type(method)), {})
    assert isinstance(method, WithLosses)
    method.others, method.weights = others, {loss.name: loss.weight for loss in added}
    return method


class WithLosses(Method):
    """Laid over a method's class by `add_losses`. others: methods by name, on the same backbone. weights: of each."""

    others: nn.ModuleDict
    weights: dict[str, float]

    def _each_other(self) -> Iterator[tuple[str, Method]]:
        for name, other in self.others.items():
            assert isinstance(other, Method)
            yield name, other

    def draw(self, batch: Batch, when: When) -> Draws:
        """Its own draws, and those of the others as NAME.key."""
        draws = super().draw(batch, when)
        for name, other in self._each_other():
            draws |= {f"{name}.{key}": value for key, value in other.draw(batch, when).items()}
        return draws

    def forward(self, batch: Batch, draws: Draws) -> Output:
        output = super().forward(batch, {key: value for key, value in draws.items() if "." not in key})
        loss, metrics = output.loss, dict(output.metrics)
        for name, other in self._each_other():
            prefix = f"{name}."
            added = other(batch, {key[len(prefix) :]: draws[key] for key in draws if key.startswith(prefix)})
            loss = loss + self.weights[name] * added.loss
            metrics |= {f"{name}_loss": added.loss.detach()}
            metrics |= {f"{name}_{key}": value for key, value in added.metrics.items()}
        return Output(loss, metrics, output.extras)

    def no_decay(self) -> set[str]:
        return super().no_decay() | {
            f"others.{name}.{key}" for name, other in self._each_other() for key in other.no_decay()
        }

    def decayed(self) -> set[str]:
        return super().decayed() | {
            f"others.{name}.{key}" for name, other in self._each_other() for key in other.decayed()
        }
