"""Images to patches and back, and taking tokens by index.

A patch's pixels are laid out (row in patch, column in patch, channel): the layout of the papers' x_p. Grids may
be rectangular, and so may patches. A grid is a plain `(height, width)`; positions count it row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from situs.errors import SitusError

Size = int | tuple[int, ...]
"""One number for a square, or (height, width)."""


Grid = tuple[int, ...]
"""How many tokens along each side: (height, width) of an image, (length,) of a sequence."""


def pair(size: Size) -> tuple[int, int]:
    """`4` -> `(4, 4)`; `(4, 8)` stays."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def grid_of(image_size: Size, patch_size: Size) -> tuple[int, int]:
    """The grid (h, w) of an image cut in patches; refuses a patch size that does not divide the image."""
    (height, width), (ph, pw) = pair(image_size), pair(patch_size)
    if ph < 1 or pw < 1 or height % ph or width % pw:
        reason = f"img_size={height}x{width}: must be a multiple of the patch size {ph}x{pw}"
        raise SitusError(reason, field=("img_size", "patch_size"))
    return height // ph, width // pw


def patchify(images: Tensor, patch_size: Size) -> Tensor:
    """images: [B, C, H, W] -> patches: [B, N, P_h * P_w * C], positions row by row."""
    batch, channels, height, width = images.shape
    ph, pw = pair(patch_size)
    h, w = grid_of((height, width), patch_size)
    cells = images.reshape(batch, channels, h, ph, w, pw)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, h * w, ph * pw * channels)


def unpatchify(patches: Tensor, grid: tuple[int, ...], patch_size: Size) -> Tensor:
    """patches: [B, N, P_h * P_w * C] on `grid` -> images: [B, C, H, W]; the inverse of `patchify`."""
    batch, count, pixels = patches.shape
    (h, w), (ph, pw) = grid, pair(patch_size)
    if count != h * w or pixels % (ph * pw):
        raise SitusError(
            f"patches of shape {tuple(patches.shape)} do not fill a grid of {h}x{w} patches, each of {ph}x{pw} pixels"
        )
    cells = patches.reshape(batch, h, w, ph, pw, pixels // (ph * pw))
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, h * ph, w * pw)


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """The tokens at `index`: out[b, k] = tokens[b, index[b, k]].

    tokens: [B, N, ...] (B may be 1); index: [K], shared by the batch, or [B, K]. -> [B, K, ...]
    """
    if index.dim() == 1:
        return tokens.index_select(1, index)
    tail = tokens.shape[2:]
    full = index.view(*index.shape, *(1 for _ in tail)).expand(*index.shape, *tail)
    return tokens.expand(index.shape[0], *tokens.shape[1:]).gather(1, full)


def mask_of(index: Tensor, count: int) -> Tensor:
    """The boolean mask of an index: index [B, K] of positions -> mask [B, N], True where a position is in the index."""
    mask = index.new_zeros((*index.shape[:-1], count), dtype=index.dtype).bool()
    return mask.scatter(-1, index, True)


def put_at(patches: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each patch at its position, several at one position averaged: a solved jigsaw puzzle.

    patches: [B, K, ...]; places: [B, K] in [0, count) -> ([B, count, ...], filled [B, count] bool); a position without
    a patch is 0.
    """
    batch, _, *tail = patches.shape
    full = places.view(*places.shape, *(1 for _ in tail)).expand_as(patches)
    sums = patches.new_zeros(batch, count, *tail).scatter_add(1, full, patches)
    hits = patches.new_zeros(batch, count).scatter_add(1, places, patches.new_ones(places.shape))
    return sums / hits.clamp(min=1).view(batch, count, *(1 for _ in tail)), hits > 0


def fill(patches: Tensor, mask: Tensor) -> Tensor:
    """Replaces padding by the mean of the sample's real patches, so the mean over all patches equals the mean over the
    real ones.

    patches: [B, N, D]; mask: [B, N] bool. The maximum over all patches is unchanged too.
    """
    real = mask.unsqueeze(-1)
    mean = (patches * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
    return torch.where(real, patches, mean)
