"""Words that are learned and not read: the last of each sentence, and those that were masked."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_texts import sentences, victim

from situs.audit.defences import Clip
from situs.audit.text.causal import Head, Place, endings, masked_words
from situs.audit.text.recovered import UNNAMED
from situs.audit.text.victim import masked_places, text_gradients, word_weight
from situs.backbones.hf.text import DecoderBackbone, TextEncoder

TEXTS = ("3 7 1 9", "3 7 8 2", "3 7 8", "3 7 8", "4 5 6 7 8")


def test_the_step_of_a_word_is_the_gradient_that_it_makes() -> None:
    chance = torch.Generator().manual_seed(0)
    words, at, scale = (torch.randn(*size, generator=chance, dtype=torch.float64) for size in ((30, 8), (8,), (8,)))

    def tail(z: torch.Tensor) -> torch.Tensor:
        return scale * z / z.square().mean().sqrt()

    likely = (words @ tail(at)).softmax(0)
    place = at.clone().requires_grad_()
    torch.nn.functional.cross_entropy((words @ tail(place))[None], torch.tensor([11])).backward()
    assert place.grad is not None
    head = Head(Place(0.25 * place.grad, at, likely), tail, words)
    assert torch.allclose(head.step([11])[0], place.grad, atol=1e-12)
    word, factor, left = head.fit()
    assert (word, round(factor, 9)) == (11, 0.25) and left < 1e-9
    assert head.nearest(place.grad)[0] == 11


def test_last_words_and_how_often_a_beginning_is_there(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    truth = sentences(made, *TEXTS)
    assert isinstance(made.backbone, DecoderBackbone)
    upload = text_gradients(made, truth, dtype=torch.float64)
    nodes = sorted({one[:end] for one in truth for end in range(1, len(one))})
    assert sorted(endings(made.backbone, upload, nodes, len(truth))) == sorted(truth)
    last = next(name for name in upload if "layers.1.mlp.down_proj" in name)
    other = torch.randn(upload[last].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = {name: gradient for name, gradient in upload.items() if name != last}
    # What is not sent, or fits no word, cannot be read: the beginnings stay, and the last words have no name.
    for unread in (kept, kept | {last: other}, kept | {last: -upload[last]}):
        found = endings(made.backbone, unread, nodes, len(truth))
        assert {one[:-1] for one in found} == {(8, 12, 6), (8, 12, 13), (9, 10, 11, 12)}
        assert all(one[-1] == UNNAMED for one in found)


def test_sentences_of_different_weight(tmp_path: Path) -> None:
    made = victim(tmp_path, "llama")
    truth = sentences(made, "3 7 1 9", "3 8 2 5 6 7", "4 5 6 7 8")
    assert isinstance(made.backbone, DecoderBackbone)
    upload = text_gradients(made, truth, dtype=torch.float64, defence=Clip(0.05, 0.0))  # each by its own factor
    nodes = sorted({one[:end] for one in truth for end in range(1, len(one))})
    assert sorted(endings(made.backbone, upload, nodes, len(truth))) == sorted(truth)


def test_masked_words_come_back(tmp_path: Path) -> None:
    made = victim(tmp_path, "masked")
    truth, hidden = sentences(made, *TEXTS), made.tokeniser.mask_token_id
    upload = text_gradients(made, truth, dtype=torch.float64, seed=3)
    seen = [list(one) for one in truth]
    for row, one in enumerate(truth):
        for place in masked_places(made, one, 3 + row):
            seen[row][place] = hidden
    masked = [tuple(one) for one in seen]
    assert isinstance(made.backbone, TextEncoder) and masked != truth
    assert masked_words(made.backbone, upload, masked, hidden) == truth
    kept = {name: g for name, g in upload.items() if name != word_weight(made.backbone)}
    assert masked_words(made.backbone, kept, masked, hidden) == truth  # the head's own weight is not needed
    wrong = [(2, 40, hidden, 41, 3)]  # beside sentences that are not there no word fits
    assert masked_words(made.backbone, upload, wrong, hidden) == wrong
