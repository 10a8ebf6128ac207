"""What the server is shown: rows in a secret order, channels by a key, a defence on the patch tokens.

`View.show` gives what is sent and what brings the server's answer back; both are ordinary torch operations, so that
gradients find their way through them.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.permutation import invert
from situs.core.tokens import Grid, take
from situs.errors import SitusError
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.features import Back, Defence, defend, row_orders, secret_words
from situs.locks.groups import entrance_and_exit, residual_only
from situs.locks.key import SEED_BYTES, Key, derive
from situs.locks.manifest import permutations_of, read_manifest
from situs.locks.owner import own_groups
from situs.split.parts import bytes_of, layout

PERMUTED = ("rows", "columns")
NO_DEFENCE = Defence()


@dataclass(frozen=True)
class View:
    """How features are hidden. columns: (before the blocks, behind them) as gathers [D]; None: channels stay.

    scale: what a σ of noise is a multiple of. secret: what orders and noise follow from.
    """

    rows: bool = False
    columns: tuple[Tensor, Tensor] | None = None
    defence: Defence = NO_DEFENCE
    scale: float = 1.0
    secret: Key | None = None

    def show(
        self, z: Tensor, mask: Tensor | None, *, prefix: int, grid: Grid, at: tuple[str, ...] | None
    ) -> tuple[Tensor, Tensor | None, Back]:
        """What is sent for z [B, p + N, D] and mask [B, p + N]; what brings the blocks' output back.

        at: the run, step and part, which with the features themselves make orders and noise that no other message has:
        a step that comes again is shown as it was, and never other features with the same noise. None: drawn anew.
        """
        if self.secret is None or at is None:
            words = secret_words(Key(secrets.token_bytes(SEED_BYTES)))
        elif self.rows or self.defence.kind in ("noise", "batch-shuffle"):
            content = hashlib.sha256(bytes_of(z.cpu())).hexdigest()
            words = secret_words(self.secret, *at, content)
        else:
            words = secret_words(self.secret, *at)
        ways: list[Back] = []
        if self.defence.kind != "none":
            if mask is not None:
                raise SitusError(f"defence={self.defence}: takes no batches with padding", field="defence")
            z, back = defend(z, self.defence, words, prefix=prefix, grid=grid, scale=self.scale)
            ways.append(back)
        if self.rows:
            order = row_orders(words, *z.shape[:2]).to(z.device)
            z, mask, undo = take(z, order), None if mask is None else take(mask, order), invert(order)
            ways.append(lambda out: take(out, undo))
        if self.columns is not None:
            enter, leave = (key.to(z.device) for key in self.columns)
            z = z.index_select(-1, enter)
            ways.append(lambda out: out.index_select(-1, leave))
        return z, mask, lambda out: _through(out, ways)


def _through(out: Tensor, ways: list[Back]) -> Tensor:
    for back in reversed(ways):
        out = back(out)
    return out


def make_view(
    backbone: Backbone,
    permute: tuple[str, ...] = (),
    defence: Defence = NO_DEFENCE,
    *,
    key: Key | None = None,
    run: str = "",
    locked: str | Path | None = None,
    scale: float = 1.0,
) -> View:
    """The view that a client asked for; what this backbone cannot do is refused with the reason.

    run: names the run, so that no other has its orders. locked: the locked folder whose blocks the server holds;
    without one, the key makes a permutation of its own for blocks that were never clear.
    """
    for name in permute:
        if name not in PERMUTED:
            raise SitusError(field="permute", value=name, allowed=f"of {', '.join(PERMUTED)}")
    if "rows" in permute and (why := row_refusal(backbone) or row_leak(backbone)) is not None:
        raise SitusError(f"permute=rows: {backbone.name} refuses it: {why}", field="permute")
    if defence.kind in ("lowpass", "batch-shuffle") and "take" in backbone.refusals:
        raise SitusError(f"defence={defence}: {backbone.name} refuses it: {backbone.refusals['take']}", field="defence")
    if key is None and (permute or defence.kind != "none"):
        raise SitusError("permutations and defences are drawn from a key, and none is given", field="key")
    columns = None
    if "columns" in permute:
        assert key is not None
        columns = column_keys(backbone, key, run, locked)
    return View("rows" in permute, columns, defence, scale, key)


def column_permutations(backbone: Backbone, key: Key, run: str, locked: str | Path | None) -> dict[str, Tensor]:
    """group name -> permutation [size] of the residual channels, which the server's blocks are keyed with."""
    if locked is not None:
        manifest = read_manifest(Path(locked), key)
        names = {group.name for group in residual_only(own_groups(backbone, manifest))}
        return {name: p for name, p in permutations_of(manifest, key).items() if name in names}
    return derive(key, residual_only(backbone.groups()), layout(backbone), run)


def column_keys(backbone: Backbone, key: Key, run: str, locked: str | Path | None) -> tuple[Tensor, Tensor]:
    """The gathers before and behind the blocks."""
    keys = column_permutations(backbone, key, run, locked)
    first, last = entrance_and_exit(backbone.groups())
    return keys[first], invert(keys[last])
