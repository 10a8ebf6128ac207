"""Attention as torch computes it, and its weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ * scale + bias) v: q [B, H, S, d], k and v [B, H, K, d] -> [B, S, H * d].

    bias: added to the logits, or bool, False where a key is masked. scale: None for 1/√d.
    """
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return mixed.transpose(1, 2).flatten(2)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ * scale + bias), the weights inside `attend`, in float32 at least: [B, H, S, K]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        is_mask = bias.dtype == torch.bool
        logits = logits.masked_fill(~bias, float("-inf")) if is_mask else logits + bias.to(dtype)
    return logits.softmax(dim=-1)
