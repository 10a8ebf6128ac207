"""JPEG files that a worker leaves to the device.

torchvision's nvJPEG decodes a batch at once; its cosine transform and its upsampling of colour round otherwise than
libjpeg's, so that pixels differ by a level or two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


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
