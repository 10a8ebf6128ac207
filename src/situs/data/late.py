"""JPEG files decoded on the device: a batch of encoded images, and their crops as two products of matrices.

torchvision's nvJPEG decodes a batch at once. Its cosine transform and its upsampling of colour round otherwise than
libjpeg's, so that pixels differ by a level or two. The crops are those of a worker, without its rounding between the
two directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_AT_ONCE = 1 << 26  # pixels that are resized together, padded to the largest box


def decode_on(device: torch.device, encoded: Sequence[Tensor]) -> list[Tensor]:
    """RGB images [3, H, W] uint8 on a CUDA device; raises RuntimeError where one of them is damaged."""
    from torchvision.io import ImageReadMode, decode_jpeg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torchcodec is to follow
        made = decode_jpeg(list(encoded), mode=ImageReadMode.RGB, device=device)
    return made if isinstance(made, list) else [made]


def crop_resized(images: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Boxes [n, 4] (top, left, height, width) of images of many sizes, antialiased to one size: [n, C, *size] uint8.

    boxes: on the host, so that nothing waits for the device.
    """
    parts = []
    for start, end in _spans(boxes):
        cut = boxes[start:end]
        tall, wide = (int(cut[:, side].max()) for side in (2, 3))
        padded = torch.zeros((end - start, images[start].shape[0], tall, wide), device=images[start].device)
        for row, (top, left, height, width) in enumerate(cut.tolist()):
            padded[row, :, :height, :width] = images[start + row][:, top : top + height, left : left + width]
        rows, columns = (
            weights(cut[:, 2 + side].to(padded.device, non_blocking=True), size[side], most, mode)[:, None]
            for side, most in ((0, tall), (1, wide))
        )
        parts.append((rows @ padded @ columns.transpose(-1, -2)).round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


def _spans(boxes: Tensor) -> Iterator[tuple[int, int]]:
    """Neighbours whose boxes, padded to the largest of them, are few enough pixels to be resized at once."""
    start, tall, wide = 0, 0, 0
    for row, (height, width) in enumerate(boxes[:, 2:].tolist()):
        tall, wide = max(tall, height), max(wide, width)
        if row > start and (row - start + 1) * tall * wide > _AT_ONCE:
            yield start, row
            start, tall, wide = row, height, width
    if len(boxes):
        yield start, len(boxes)


def weights(lengths: Tensor, size: int, most: int, mode: str) -> Tensor:
    """What each of `size` new pixels takes of the old ones, [n, size, most]: Pillow's and torch's antialiased filters.

    lengths: [n] how many old pixels there are, at most `most`, on the device that computes; those behind weigh nothing.
    """
    scale = lengths.double().view(-1, 1, 1) / size
    centre = (torch.arange(size, device=lengths.device).view(1, -1, 1) + 0.5) * scale
    place = torch.arange(most, device=lengths.device).view(1, 1, -1)
    x = ((place + 0.5 - centre) / scale.clamp(min=1.0)).abs()
    if mode == "bilinear":
        made = (1 - x).clamp(min=0)
    else:  # bicubic, a = −½
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        made = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    made = torch.where(place < lengths.view(-1, 1, 1), made, torch.zeros_like(made))
    return (made / made.sum(-1, keepdim=True)).float()
