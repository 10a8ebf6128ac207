"""Sentences that a server reads out of one step's gradient, honest or choosing the weights, by what is sent.

    python benchmarks/active_text.py --model MiniLM/ --texts sst2.txt --batch 1 8 64 256 --sent all lora biases head
    python benchmarks/active_text.py --model gpt2/ --texts sst2.txt --batch 1 8 --servers active

sent: all; lora (products of rank 8 beside every matrix of the blocks), lora-qkv (beside queries, keys and values),
adapters (64 channels wide, behind the MLPs), biases, head (the classifier alone). An honest server runs the attack of
`situs audit texts` with `--seconds` at most; one that chooses the weights runs `crafted`, on weights it wrote for what
is sent. A sentence counts as exact where every token is right, in its place. Seconds are those of
reading, on one core.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from situs.audit.deadline import Deadline
from situs.audit.text.audit import find_sentences
from situs.audit.text.crafted import craft_text, crafted_sentences, plan_of
from situs.audit.text.victim import TextVictim, open_text_victim, text_gradients
from situs.backbones.adapters import add_adapters
from situs.backbones.lora import add_lora
from situs.errors import SitusError

RANK, WIDTH = 8, 64
SENT = {
    "all": lambda _: True,
    "lora": lambda name: name.endswith((".0.up", ".0.down")),
    "lora-qkv": lambda name: name.endswith((".0.up", ".0.down")),
    "adapters": lambda name: ".adapter." in name,
    "biases": lambda name: name.endswith(".bias"),
    "head": lambda name: "classifier" in name or "lm_head" in name,
}
"""What is sent -> which parameters are trained."""


def victim_of(folder: str, sent: str, device: str) -> TextVictim:
    """The model with what is sent as its only trained parameters."""
    victim = open_text_victim(folder, device=device)
    if sent.startswith("lora"):
        add_lora(victim.backbone, RANK, 2 * RANK, ["blocks" if sent == "lora" else "qkv"])
    if sent == "adapters":
        add_adapters(victim.backbone, WIDTH)
    for name, parameter in victim.backbone.named_parameters():
        parameter.requires_grad_(SENT[sent](name))
    return victim


def row(folder: str, sent: str, texts: list[str], server: str, seconds: float, device: str = "cpu") -> str:
    """What one server read of one batch."""
    victim, batch = victim_of(folder, sent, device), len(texts)
    sentences = victim.coded(texts)
    if server == "active":
        plan = plan_of(victim, batch=batch)
        if isinstance(plan, str):
            return f"refused: {plan}"
        victim = craft_text(victim, batch=batch)
    upload = text_gradients(victim, sentences, labels=[number % 2 for number in range(batch)])
    begun = time.process_time()
    if server == "active":
        recovered = crafted_sentences(victim, upload, batch)
    else:
        recovered = find_sentences(victim.backbone, upload, batch, deadline=Deadline(seconds=seconds))
    taken = time.process_time() - begun
    exact = sum((Counter(recovered.sentences) & Counter(sentences)).values())
    wrong = sum((Counter(recovered.sentences) - Counter(sentences)).values()) if server == "active" else 0
    reason = "; ".join(filter(None, (recovered.partial and "stopped", recovered.reason)))
    beside = f", {wrong} wrong" * bool(wrong) + f" ({reason})" * (bool(reason) and exact < batch)
    return f"{exact} of {batch} exact, {sum(map(len, sentences))} tokens, {taken:.1f} s{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--sent", nargs="+", choices=list(SENT), default=list(SENT))
    parser.add_argument("--servers", nargs="+", choices=["honest", "active"], default=["honest", "active"])
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    lines = [line.strip() for line in args.texts.read_text().splitlines() if line.strip()]
    for folder in args.model:
        for batch in args.batch:
            for sent in args.sent:
                for server in args.servers:
                    try:
                        result = row(folder, sent, lines[:batch], server, args.seconds)
                    except SitusError as error:
                        result = f"refused: {error}"
                    print(f"{Path(folder).name} | {sent} | {batch} | {server} | {result}", flush=True)


if __name__ == "__main__":
    main()
