"""What a worker may leave to the device: JPEG files to be decoded, crops to be resized.

Resizing is torch's own of bytes, to the bit: whole numbers as weights, rounded between the two directions. So it does
not matter who does it. torchvision's nvJPEG decodes a batch at once; its cosine transform and its upsampling of colour
round otherwise than libjpeg's, so that pixels differ by a level or two.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_AT_ONCE = 1 << 26  # pixels that are resized together, padded to the largest box


def decode_on(device: torch.device, encoded: Sequence[Tensor]) -> list[Tensor]:
    """RGB images [3, H, W] uint8 on a CUDA device; raises RuntimeError where one of them is damaged."""
    from torchvision.io import ImageReadMode, decode_jpeg

    made = decode_jpeg(list(encoded), mode=ImageReadMode.RGB, device=device)
    return made if isinstance(made, list) else [made]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # as the batches it decodes for


_ALONE = threading.Lock()


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """A stream of one's own for nvJPEG, which writes on a third one that waits for nobody.

    So the memory it is given must not be in use any more: here it comes from this stream alone, which is idle then,
    and stays so until this thread uses it: others wait.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    with _ALONE:
        stream.synchronize()
        with torch.cuda.stream(stream):
            yield
    torch.cuda.current_stream(device).wait_stream(stream)


def pad(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Images [C, h, w] of many sizes behind zeros in one tensor [n, C, H, W], and their sides [n, 2]."""
    sides = torch.tensor([part.shape[1:] for part in parts])
    padded = parts[0].new_zeros((len(parts), parts[0].shape[0], *sides.amax(0).tolist()))
    for row, part in enumerate(parts):
        padded[row, :, : part.shape[1], : part.shape[2]] = part
    return padded, sides


def crop_resized(images: Sequence[Tensor], boxes: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Boxes [n, 4] (top, left, height, width) of images of many sizes, antialiased to one size: [n, C, *size] uint8.

    boxes: on the host, so that nothing waits for the device.
    """
    parts = []
    for start, end in _spans(boxes):
        cut = [
            image[:, top : top + height, left : left + width]
            for image, (top, left, height, width) in zip(images[start:end], boxes[start:end].tolist(), strict=True)
        ]
        parts.append(resize_padded(*pad(cut), size, mode))
    return torch.cat(parts)


def resize_padded(padded: Tensor, sides: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """What `pad` made of bytes, antialiased to one size: [n, C, *size] uint8. sides: on the host."""
    at_once = max(1, _AT_ONCE // (padded.shape[2] * padded.shape[3]))
    made = [
        _resize(_resize(part, own[:, 1], size[1], mode, -1), own[:, 0], size[0], mode, -2)
        for part, own in zip(padded.split(at_once), sides.split(at_once), strict=True)
    ]
    return torch.cat(made).to(torch.uint8)


def _resize(padded: Tensor, lengths: Tensor, size: int, mode: str, side: int) -> Tensor:
    """One direction, as whole numbers from 0 to 255."""
    exact = 2 * int(lengths.max()) <= 3 * size  # up to there float32 adds the products exactly (a test counts them)
    padded = padded.to(torch.float32 if exact else torch.float64)
    taken, _ = weights(lengths.to(padded.device, non_blocking=True), size, padded.shape[side], mode)
    parts = [part.to(padded.dtype)[:, None] for part in (halves(taken) if exact else [taken])]
    made = [padded @ part.transpose(-1, -2) if side == -1 else part @ padded for part in parts]
    return sum(made[1:], start=made[0]).add_(0.5).floor_().clamp_(0, 255)


def halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of 15 bits as sums of two of 8 bits at most, which TF32 does not round, nor pixels.

    Where a training allows TF32, to forbid it for a moment would forbid it to the step that is launched meanwhile.
    """
    upper = whole.to(torch.bfloat16).to(whole.dtype)
    return upper, whole - upper


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


def weights(lengths: Tensor, size: int, most: int, mode: str) -> tuple[Tensor, Tensor]:
    """What each of `size` new pixels takes of the old ones, [n, size, most]: whole numbers over 2^bits, [n].

    The antialiased filters of Pillow and torch, with the bits that torch takes: as many as 16 hold with a sign.
    lengths: [n] how many old pixels there are, at most `most`, on the device that computes; those behind weigh nothing.
    """
    radius = 1 if mode == "bilinear" else 2
    taken = math.ceil(2 * radius * max(1.0, most / size)) + 1  # all that a filter may reach; the rest weighs nothing
    scale = lengths.double().view(-1, 1, 1) / size
    centre, wide = (torch.arange(size, device=lengths.device).view(1, -1, 1) + 0.5) * scale, scale.clamp(min=1.0)
    first = (centre - radius * wide - 0.5).ceil().clamp_(min=0)
    place = first + torch.arange(taken, device=lengths.device)
    x = ((place + 0.5 - centre) / wide).abs()
    if mode == "bilinear":
        made = (1 - x).clamp(min=0)
    else:  # bicubic, a = −½
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        made = torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    made = torch.where(place < lengths.view(-1, 1, 1), made, torch.zeros_like(made))
    made /= made.sum(-1, keepdim=True)
    units = 2.0 ** torch.arange(23, dtype=torch.float64, device=lengths.device)
    bits = ((made.amax((1, 2))[:, None] * units[1:] + 0.5).floor() < 2**15).sum(-1)
    unit = units[bits].view(-1, 1, 1)
    made *= unit
    made = torch.where(made < 0, (made - 0.5).ceil(), (made + 0.5).floor()) / unit
    whole = made.new_zeros(len(lengths), size, most + taken)
    return whole.scatter_(-1, place.long(), made)[..., :most], bits
