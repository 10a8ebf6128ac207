"""Every attack of every scenario, and the papers around them, as the tables that docs/reference/attacks.md prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from situs.audit.engine import Images
from situs.audit.plugins import Plugins
from situs.audit.run import Card
from situs.audit.split.audit import Split
from situs.audit.text.audit import Texts
from situs.findings import HONEST, ThreatModel
from situs.locks.attacks.audit import ATTACKS as LOCK
from situs.results import Cell, Table


class Lock:
    """Weights whose channels a key permutes."""

    name: ClassVar[str] = "lock"
    threat: ClassVar[ThreatModel] = HONEST

    @staticmethod
    def cards() -> Iterator[Card]:
        proves = "the share of the key that is right, where the auditor has the true one; else nothing"
        for name, attack in LOCK.items():
            yield Card(name, "lock", attack.needs, proves, "ours", attack.about, "benchmarks/lock_attacks.py")


SCENARIOS: Plugins[type[Images | Texts | Split | Lock]] = Plugins(
    {"images": Images, "texts": Texts, "split": Split, "lock": Lock}, "situs.scenarios", ("name", "threat", "cards")
)
"""Every scenario by name."""


def cards() -> list[Card]:
    """Every attack of every scenario."""
    return [card for scenario in SCENARIOS.values() for card in scenario.cards()]


def attacks_table() -> Table:
    """A row for each attack."""
    header = ("attack", "scenario", "threat model", "needs", "proves", "paper", "how ours differs", "measured by")
    rows: list[list[Cell]] = [
        [card.attack, card.scenario, scenario.threat.name, *card[2:]]
        for scenario in SCENARIOS.values()
        for card in scenario.cards()
    ]
    return Table("Attacks", header, rows)


class Neighbour(NamedTuple):
    """A published attack or defence near ours. here: what Situs has of it, and what not."""

    name: str
    paper: str
    threat: str
    about: str
    here: str


ACTIVE = "active: the server chooses what the client runs"

NEIGHBOURS = (
    Neighbour(
        "DAGER",
        "Petrov et al., NeurIPS 2024, arXiv 2405.15586",
        HONEST.name,
        "whole batches of text, exactly: tokens are tested against the row spaces of attention gradients",
        "`audit texts` uses the same test, on encoders and decoders; not its GPU search over batches of up to 128",
    ),
    Neighbour(
        "TAG",
        "Deng et al., Findings of EMNLP 2021, arXiv 2103.06819",
        HONEST.name,
        "gradient matching for language models",
        "no: `matching` is for images, and texts are read in closed form",
    ),
    Neighbour(
        "LAMP",
        "Balunović et al., NeurIPS 2022, arXiv 2202.08827",
        HONEST.name,
        "gradient matching for texts with a language model as prior and discrete reordering",
        "no: no audit has a language model as prior",
    ),
    Neighbour(
        "Inverting gradients",
        "Geiping et al., NeurIPS 2020, arXiv 2003.14053",
        HONEST.name,
        "gradient matching by cosine distance, signed Adam and total variation",
        "`matching` has its optimiser and prior with another distance; `benchmarks/attacks.py` runs its own settings",
    ),
    Neighbour(
        "APRIL",
        "Lu et al., CVPR 2022, arXiv 2112.14087",
        HONEST.name,
        "a closed form for a first block of attention alone, and matching that counts the table's gradient",
        "both, as `april` and `april-optimisation`, for MJP's Table 5; `patchembed` holds for any block",
    ),
    Neighbour(
        "SPEAR",
        "Dimitrov et al., NeurIPS 2024, arXiv 2403.03945",
        HONEST.name,
        "batches of fully connected networks, exactly, by the sparsity of ReLU gradients",
        "no: `tokens` takes batches of transformers apart by the first block's row spaces and activation",
    ),
    Neighbour(
        "Robbing the Fed",
        "Fowl et al., ICLR 2022, arXiv 2110.13057",
        ACTIVE,
        "a module that the server adds to the model copies single images out of sums",
        "no: in every audit the server sends the agreed model",
    ),
    Neighbour(
        "Fishing",
        "Wen et al., 2022, arXiv 2202.00580",
        ACTIVE,
        "weights that the server chooses magnify the gradient of one sample in a batch",
        "no: in every audit the server sends the agreed weights",
    ),
    Neighbour(
        "STIP",
        "Yuan et al., 2023, arXiv 2312.00025",
        "three parties, honest-but-curious",
        "a defence: inference on permuted features with permuted weights",
        "`split` and `lock` permute rows and channels alike; `audit split` and `audit lock` attack that",
    ),
    Neighbour(
        "PermLLM",
        "Zheng et al., 2024, arXiv 2405.18744",
        "two parties, honest-but-curious",
        "a defence: secret sharing, with permuted values where a function is not linear",
        "no secret sharing; what a permutation alone hides is what `audit split` measures",
    ),
    Neighbour(
        "Hidden No More",
        "Thomas et al., ICML 2025, arXiv 2505.18332 and 2507.05228",
        HONEST.name,
        "recovers prompts from permuted hidden states of language models",
        "`audit split` undoes permutations of images' features; not of prompts",
    ),
)
"""Papers near ours; every reference was looked up."""


def neighbours_table() -> Table:
    """A row for each paper."""
    header = ("name", "paper", "threat model", "what it does", "here")
    rows: list[list[Cell]] = [list(neighbour) for neighbour in NEIGHBOURS]
    return Table("Neighbours", header, rows)
