"""The gradient of the position table on the patch rows, without what a loss on the table itself adds to it.

DAL, MJP's loss on the table, has a gradient that the attacker computes. Clipping shrinks it by the factor that it
leaves on all gradients, which he does not know but finds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.audit.attacks.base import Knowledge, known_numbers
from situs.audit.attacks.patchembed.equations import solve_pixels
from situs.audit.client import known_gradient
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import Stem, flat_weight, table_rows
from situs.methods.base import Method


def patch_rows(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> Tensor:
    """∂l/∂E_pos on the patch rows of one upload in float64, [N, D]; NaN where it overflowed."""
    rows = known_numbers(table_rows(upload[stem.table], stem))
    extra = known_gradient(method, upload, known.seed, known.epoch)
    if extra is None:
        return rows
    extra = extra.double()
    return rows - _factor(extra, rows, stem, upload, known) * extra


def _factor(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    """What clipping left of DAL's gradient `extra` [N, D]: a factor in [0, 1].

    The patch embedding's bias has the sum over all tokens; what the table and E_unk have beyond it is DAL's. A model
    without that bias is asked its equations: with any other factor the pixels meet them worse.
    """
    if not known.defence.per_sample:
        return 1.0
    if stem.bias is None or stem.bias not in upload:
        return _factor_that_fits(extra, rows, stem, upload, known)
    whole = extra.sum(dim=0)
    hidden = upload.get(UNKNOWN, torch.zeros_like(upload[stem.bias]))
    left = rows.sum(dim=0) + known_numbers(hidden) - known_numbers(upload[stem.bias])
    there = left.isfinite()
    whole, left = whole[there], left[there]
    return float((whole @ left / (whole @ whole).clamp(min=1e-300)).clamp(0, 1))


def _factor_that_fits(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    from scipy.optimize import minimize_scalar

    weight = flat_weight(known_numbers(upload[stem.weight]), stem)
    sigma, sent = known.defence.noise_level(known.batch), upload[stem.table].dtype

    def off(factor: float) -> float:
        return float(solve_pixels(weight[None], (rows - factor * extra)[None], sent, sigma).residual)

    best = min((off(step / 16), step / 16) for step in range(17))[1]
    around = (max(0.0, best - 1 / 16), min(1.0, best + 1 / 16))
    found: Any = minimize_scalar(off, bounds=around, method="bounded", options={"xatol": 1e-12})
    return float(found.x)
