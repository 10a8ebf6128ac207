"""The masked jigsaw puzzle on images and on tokens (MJP, Algorithm 1): block mask, then a shuffle inside it.

Shuffling tokens after a patch-wise embedding equals shuffling the image's patches before it, so methods shuffle
tokens, and images only where the model has none. Everything is a pure function of uniform noise in [0, 1).
"""

from __future__ import annotations

from torch import Tensor

from situs.core.masking import block_mask, block_noise_shape, jigsaw
from situs.core.tokens import patchify, take, unpatchify
from situs.errors import SitusError


def puzzle_noise_shape(grid: tuple[int, ...], ratio: float) -> tuple[int]:
    """The shape of the noise for one sample's puzzle: its block mask's, then one number per position."""
    return (block_noise_shape(grid, ratio)[0] + grid[0] * grid[1],)


def draw_puzzle(noise: Tensor, grid: tuple[int, ...], ratio: float) -> tuple[Tensor, Tensor]:
    """Mask (bool) and index (int64) of the masked jigsaw puzzle, both [B, N].

    noise: [B, *puzzle_noise_shape(grid, ratio)]. ratio: γ.
    """
    places = grid[0] * grid[1]
    mask = block_mask(noise[:, :-places], grid, ratio)
    return mask, jigsaw(mask, noise[:, -places:])


def jigsaw_images(images: Tensor, grid: tuple[int, ...], ratio: float, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images with the patches of a block mask shuffled among themselves, the mask, and the index.

    images: [B, C, H, W]. grid: (h, w) of their patches. ratio: γ. noise: [B, *puzzle_noise_shape(...)], or one
    row for a mask and a shuffle that the whole batch shares.

    -> images [B, C, H, W]; mask, bool [B, N]; index, int64 [B, N]: the patch at position i came from position index[i],
    which is i outside the mask.
    """
    mask, index = draw_puzzle(noise, grid, ratio)
    mask, index = mask.expand(images.shape[0], -1), index.expand(images.shape[0], -1)
    return move_patches(images, grid, index), mask, index


def move_patches(images: Tensor, grid: tuple[int, ...], index: Tensor) -> Tensor:
    """Images [B, C, H, W] with their patches permuted: patch i is the former patch index[i]; index: [N] or [B, N]."""
    size = patch_size_of(images, grid)
    return unpatchify(take(patchify(images, size), index), grid, size)


def move_pixels(images: Tensor, grid: tuple[int, ...], order: Tensor) -> Tensor:
    """Images with the pixels of each patch permuted, the same way in every patch of an image, channels together.

    order: [P_h * P_w] or [B, P_h * P_w]: a pixel of a patch came from order[i] of the same patch.
    """
    size = patch_size_of(images, grid)
    patches = patchify(images, size)
    pixels = patches.view(*patches.shape[:2], size[0] * size[1], -1).transpose(1, 2)
    return unpatchify(take(pixels, order).transpose(1, 2).flatten(2), grid, size)


def patch_size_of(images: Tensor, grid: tuple[int, ...]) -> tuple[int, int]:
    """The patch (height, width) that cuts images into `grid`; refuses a grid that does not divide them."""
    height, width = images.shape[-2:]
    if height % grid[0] or width % grid[1]:
        raise SitusError(f"images of {height}x{width} pixels cannot be cut into a grid of {grid[0]}x{grid[1]} patches")
    return height // grid[0], width // grid[1]
