"""Sentences that a server reads out of one step's gradient, honest or choosing the weights, by what is sent.

    python benchmarks/active_text.py --model MiniLM/ --texts sst2.txt --batch 1 8 64 256 --sent all lora biases head
    python benchmarks/active_text.py --model gpt2/ --texts sst2.txt --batch 1 8 --servers active
    python benchmarks/active_text.py --model gpt2/ --texts sst2.txt --batch 8 --sent all --servers honest --steps 4

sent: all; lora (products of rank 8, or --rank, beside every matrix of the blocks), lora-qkv (beside queries, keys and
values), adapters (64 channels wide, behind the MLPs), biases, head (the classifier alone). An honest server runs the
attack of `situs audit texts` with `--seconds` at most; one that chooses the weights runs `crafted`, on weights it wrote
for what is sent. A sentence counts as exact where every token is right, in its place; ROUGE-1 and -2 are F1 over
tokens, means over the sentences. Seconds are those of reading, on one core; memory is the most that the process had so
far. --steps k --rate r: an upload of k local steps (honest server alone).
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from pathlib import Path

from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, FedAvg, NoDefence, Step
from situs.audit.text.audit import find_sentences
from situs.audit.text.crafted import craft_text, crafted_sentences, plan_of
from situs.audit.text.recovered import UNNAMED, score
from situs.audit.text.victim import Sentence, TextVictim, open_text_victim, text_gradients
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


def rouge(truth: Sentence, recovered: Sentence, size: int) -> float:
    """ROUGE-N, F1, of two sequences of tokens."""
    one, two = (Counter(tuple(s[at : at + size]) for at in range(len(s) - size + 1)) for s in (truth, recovered))
    return 2 * (one & two).total() / max(one.total() + two.total(), 1)


def victim_of(folder: str, sent: str, device: str, rank: int) -> TextVictim:
    """The model with what is sent as its only trained parameters."""
    victim = open_text_victim(folder, device=device)
    if sent.startswith("lora"):
        add_lora(victim.backbone, rank, 2 * rank, ["blocks" if sent == "lora" else "qkv"])
    if sent == "adapters":
        add_adapters(victim.backbone, WIDTH)
    for name, parameter in victim.backbone.named_parameters():
        parameter.requires_grad_(SENT[sent](name))
    return victim


def row(
    folder: str,
    sent: str,
    texts: list[str],
    server: str,
    seconds: float,
    device: str = "cpu",
    client: Defence | None = None,
    rank: int = RANK,
) -> str:
    """What one server read of one batch."""
    victim, batch = victim_of(folder, sent, device, rank), len(texts)
    sentences = victim.coded(texts)
    if server == "active":
        plan = plan_of(victim, batch=batch)
        if isinstance(plan, str):
            return f"refused: {plan}"
        victim = craft_text(victim, batch=batch)
    client = client or NoDefence()
    upload = text_gradients(victim, sentences, labels=[number % 2 for number in range(batch)], defence=client)
    begun = time.process_time()
    if server == "active":
        recovered = crafted_sentences(victim, upload, batch)
    else:
        limit, step = Deadline(seconds=seconds), client.step(Step(batch))
        recovered = find_sentences(victim.backbone, upload, batch, deadline=limit, step=step)
    taken = time.process_time() - begun
    exact = sum((Counter(recovered.sentences) & Counter(sentences)).values())
    whole = Counter(one for one in recovered.sentences if UNNAMED not in one)
    wrong = (whole - Counter(sentences)).total()
    reason = "; ".join(filter(None, (recovered.partial and "stopped", recovered.reason)))
    beside = f", {wrong} wrong" * bool(wrong) + f" ({reason})" * (bool(reason) and exact < batch)
    reads = score(texts, sentences, recovered)
    one, two = (sum(rouge(read.truth, read.recovered, size) for read in reads) / batch for size in (1, 2))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = f"ROUGE {100 * one:.1f} / {100 * two:.1f}, {taken:.1f} s, {memory:.1f} GiB"
    return f"{exact} of {batch} exact, {sum(map(len, sentences))} tokens, {figures}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--sent", nargs="+", choices=list(SENT), default=list(SENT))
    parser.add_argument("--servers", nargs="+", choices=["honest", "active"], default=["honest", "active"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=RANK, help="of LoRA's products")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.01)
    args = parser.parse_args()
    client = FedAvg(args.steps, args.rate) if args.steps > 1 else None
    lines = [line.strip() for line in args.texts.read_text().splitlines() if line.strip()]
    for folder in args.model:
        for batch in args.batch:
            for sent in args.sent:
                for server in args.servers:
                    try:
                        result = row(folder, sent, lines[:batch], server, args.seconds, args.device, client, args.rank)
                    except SitusError as error:
                        result = f"refused: {error}"
                    print(f"{Path(folder).name} | {sent} | {batch} | {server} | {result}", flush=True)


if __name__ == "__main__":
    main()
