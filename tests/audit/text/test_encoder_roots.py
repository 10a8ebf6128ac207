"""Roots: o of a word that is there is the attention's own output; a word of the closure alone has none."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_texts import WORDS, sentences, victim

from situs.audit.text.encoder import FirstBlock
from situs.audit.text.layers import entering, qkv_weights, span_of, word_inputs, words_at
from situs.audit.text.victim import padded, text_gradients
from situs.backbones.hf.text import TextEncoder

TEXTS = ("3 7 1 9", "4 3 8 2 9", "11 7 13 1 3")


def test_roots_are_the_attentions_outputs_and_false_words_have_none(tmp_path: Path) -> None:
    made = victim(tmp_path, "bert")
    backbone, batch = made.backbone, sentences(made, *TEXTS)
    assert isinstance(backbone, TextEncoder)
    upload = text_gradients(made, batch, labels=[0, 1, 0], dtype=torch.float64)
    block = FirstBlock(backbone, upload)
    first = span_of(backbone, upload, qkv_weights(backbone, 1))
    count = sum(map(len, batch))
    assert block.out.rank == block.fc1.rank == block.fc2.rank == count  # every token has its own context
    assert block.open >= count - first.rank > 0
    ids, mask = padded(batch)
    with torch.no_grad():
        outputs = entering(backbone, block.names[0], lambda: backbone(ids, mask))
        pairs = {(word, place) for one in batch for place, word in enumerate(one)}
        for place in range(1, 5):
            words = words_at(backbone, first, torch.arange(len(WORDS)), place)
            z = word_inputs(backbone, words, place).double()
            roots = block.search(z)
            for word, there, o in zip(words.tolist(), roots.fits.tolist(), roots.outputs, strict=True):
                assert there <= ((word, place) in pairs)
                own = [outputs[row, place] for row, one in enumerate(batch) if one[place : place + 1] == (word,)]
                assert not there or min(float((o - true).norm() / true.norm()) for true in own) < 1e-3
            true = [(word, place) in pairs for word in words.tolist()]
            assert int(roots.fits.sum()) >= 0.6 * sum(true)
