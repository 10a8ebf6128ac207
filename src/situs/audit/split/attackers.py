"""Each attacker on one setting: what it must know, what it found, or why it was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.split.blind import (
    Clusters,
    average,
    cluster_rows,
    company,
    found_again,
    lay_out,
    link,
    name_clusters,
    recurring,
    settle,
    symmetries,
)
from situs.audit.split.joint import Borders, Joint, Whole, chosen
from situs.audit.split.labels import (
    labels_with_head,
    labels_without_head,
    place_rows,
    read_rows,
    regroup,
    several_with_head,
    share_up_to_names,
)
from situs.audit.split.order import PublicSide, assign_places, order_rows, read_pixels, set_apart
from situs.audit.split.stage import NONE, Scene, View, counted_words, send
from situs.core.tokens import unpatchify
from situs.errors import SitusError, counted, verb
from situs.findings import Finding, Remark
from situs.locks.attacks.columns import recover_columns
from situs.locks.veil import Veil

SENDINGS = 16
LAYOUT_NEEDS = 100
"""Samples from which the grid is laid out without an embedding; with 50 it failed on the model it was tried on."""

CHANNELS_NEED = 16
"""Samples from which channels are told apart without a prefix token, on the model it was tried on."""

OFTEN = f"{SENDINGS} sendings where there is noise or a batch shuffle"


@dataclass(frozen=True)
class SplitFinding(Finding):
    """What came of one attacker on one veil. figures: over all samples, by name, shares in [0, 1] and dB. shown: what
    it made of the samples, [n, C, H, W]."""

    veil: Veil = NONE
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def knows(self) -> str:
        """What its attacker must know."""
        return ATTACKS[self.attack][1] if self.attack in ATTACKS else ""

    @property
    def reason(self) -> str:
        """Why it was not tried, or why it is weaker than it can be."""
        return self.why("refused", "stopped", "lower_bound") or ""


class Found(NamedTuple):
    """scores: beside those of the pictures [n, C, H, W] that were made, if any were. weak: what it lacked."""

    scores: Mapping[str, float]
    pictures: Tensor | None = None
    weak: str = ""


def order(scene: Scene) -> Found:
    """Puts channels, then rows in order, under noise as a whole, after a batch shuffle by sample; reads pixels."""
    found, joint = _undone(scene), scene.stage.joint(scene.veil.defence)
    return _made(scene, found, found.patches(scene.side, joint))._replace(weak=_lacked(scene, found, joint.missing))


def old_embedding(scene: Scene) -> Found:
    """As `order`, but averages noise away and clusters rows by place before it names the clusters."""
    if scene.old is None:
        raise NotTriedError("no base model was given")
    quiet = _quiet(scene)
    assert quiet.old is not None
    found = put_back(quiet, quiet.old, quiet.view, drifted=True)
    few = unclustered(len(quiet.stage.z), *quiet.old.places.shape) and (scene.veil.rows or scene.size)
    weak = f"{counted(len(quiet.stage.z), 'samples')} are too few to cluster" if few else ""
    return _made(quiet, found, found.patches(quiet.old))._replace(weak=_lacked(scene, found, weak))


def no_embedding(scene: Scene) -> Found:
    """Clusters rows by place and lays them out on the grid, up to its symmetries; makes no pictures.

    Noise of several sendings is averaged away first; tokens of a shuffled batch are put together by their company.
    """
    if not (scene.veil.rows or scene.size):
        raise NotTriedError("the rows are in order already, and this attack makes no images")
    height, width = scene.stage.grid
    if height != width:
        raise NotTriedError(f"a grid of {height} × {width} is no square")
    prefix = len(scene.side.prefix)
    seen, row = _by_company(scene) if scene.size else (_quiet(scene).view.seen, scene.view.truth.row)
    if (count := len(seen)) < LAYOUT_NEEDS:
        raise NotTriedError(f"{counted(count, 'samples')} {verb(count, 'are')} too few; it needs {LAYOUT_NEEDS}")
    clusters = cluster_rows(seen, prefix)
    place = lay_out(seen, clusters, prefix)
    turned = (torch.cat([torch.arange(prefix), prefix + turn[place]])[clusters.of] for turn in symmetries(height))
    return Found({"places": max(float((named == row)[row >= prefix].double().mean()) for named in turned)})


def decoder(scene: Scene) -> Found:
    """The paper's: learned on public images under the same defence; knows of no permutation and undoes none."""
    rows = scene.view.seen[:, len(scene.side.prefix) :]
    return Found({}, _pictures(scene, scene.stage.decoder(scene.veil.defence)(rows)))


def ordered_decoder(scene: Scene) -> Found:
    """The same decoder, behind what `order` has put back."""
    found = _undone(scene)
    learned = scene.stage.decoder(NONE if scene.size else scene.veil.defence)
    return _made(scene, found, learned(found.tokens))._replace(weak=_lacked(scene, found))


def linkage(scene: Scene) -> Found:
    """Finds each sample again when it is sent once more; after a batch shuffle by the batches its tokens share."""
    if (count := len(scene.stage.z)) < 2:
        raise NotTriedError("one sample is always found again")
    if not scene.size:
        later = scene.again(1)
        found = link(scene.view.seen, later.seen)
        return Found({"linked": float((found == later.truth.sample[:, 0]).double().mean())})
    if scene.size >= count:
        raise NotTriedError("all samples are in one batch, so none can be told from the others")
    truth, group = scene.view.truth, _company(scene)
    patches = truth.row >= len(scene.side.prefix)
    return Found({"linked": found_again(group[patches], truth.sample[patches])})


def ordered_linkage(scene: Scene) -> Found:
    """Finds each sample again behind what `order` has put back in both sendings."""
    if len(scene.stage.z) < 2:
        raise NotTriedError("one sample is always found again")
    views = scene.view, scene.again(1)
    earlier, later = _undone(scene), put_back(scene, scene.side, views[1])
    # What was put together belongs to whose tokens are most of it; where that is nobody's half, to nobody.
    mine, other = (view.truth.sample.flatten()[each.index] for view, each in zip(views, (earlier, later), strict=True))
    found = link(earlier.tokens, later.tokens)  # by what a row in a wrong place does not change
    owner, own = other.mode(dim=1).values, mine.mode(dim=1).values
    whole = 2 * (other == owner[:, None]).double().mean(dim=1) > 1
    right = torch.zeros(len(mine), dtype=torch.bool).index_fill_(0, owner[whole & (own[found] == owner)], value=True)
    return Found({"linked": float(right.double().mean())})


def repeats(scene: Scene) -> Found:
    """Links several sendings of each sample, averages their noise away, then does as `order` does."""
    if scene.veil.kind != "noise":
        raise NotTriedError("there is no noise to average away")
    return order(_quiet(scene))


def labels(scene: Scene) -> Found:
    """Reads the class off the gradient that comes back to the blocks' output, with the head and without.

    Of any number of classes an image each one by least squares, with the head alone.
    """
    stage, truth, device = scene.stage, scene.view.truth, scene.stage.model.device
    if stage.labels is None or stage.unlabelled is not None:
        raise NotTriedError(stage.unlabelled or "the images have none")
    if stage.several and stage.labels.shape[1] > scene.view.seen.shape[2] - 2:
        raise NotTriedError(f"{stage.labels.shape[1]} classes are too many for {scene.view.seen.shape[2]} channels")
    back = stage.returned(scene.veil.defence)
    out, gradient = (each[truth.sample, truth.row][..., truth.channels] for each in back)
    if scene.veil.columns:
        clear = order_of_channels(scene, scene.side, scene.view.seen).argsort()
        out, gradient = out[..., clear], gradient[..., clear]
    read = read_rows(stage.backbone, *scene.view.seen.shape[1:])
    if scene.size and bool(read[len(scene.side.prefix) :].any()):
        index = regroup(gradient, read, scene.size)
    else:
        index = torch.arange(read.numel() * len(out)).view(len(out), -1).gather(1, place_rows(gradient, read).cpu())
    wanted = stage.labels[truth.sample.flatten()[index][:, read].mode(dim=1).values]
    out, gradient = (each.flatten(0, 1)[index] for each in (out, gradient))
    if stage.several:
        known = wanted >= 0
        named = several_with_head(stage.backbone, out.to(device), gradient.to(device))
        return Found({"labels": float((named == wanted)[known].double().mean())})
    named = labels_with_head(stage.backbone, out.to(device), gradient.to(device)).cpu()
    scores = {"labels": float((named == wanted).double().mean())}
    if 1 < (classes := len(stage.labels.unique())) < len(stage.labels):
        scores["unnamed labels"] = share_up_to_names(labels_without_head(gradient, classes, stage.seed), wanted)
    return Found(scores)


ATTACKS: dict[str, tuple[Callable[[Scene], Found], str]] = {
    "order": (order, "the embedding"),
    "old-embedding": (old_embedding, f"the embedding before fine-tuning; {SENDINGS} sendings where there is noise"),
    "no-embedding": (no_embedding, f"nothing; {OFTEN}"),
    "decoder": (decoder, "the embedding; no permutation"),
    "ordered-decoder": (ordered_decoder, "the embedding"),
    "linkage": (linkage, f"nothing; {SENDINGS} sendings where there is a batch shuffle"),
    "ordered-linkage": (ordered_linkage, "the embedding"),
    "repeats": (repeats, f"the embedding, {SENDINGS} sendings"),
    "labels": (labels, "the head; unnamed: nothing"),
}
"""attacker -> (what it does, what it must know beside public images)."""


class NotTriedError(SitusError):
    """The attack says nothing of this setting, and why. That is no protection."""


def attack(name: str, scene: Scene) -> SplitFinding:
    """What an attacker finds under a veil."""
    count = len(scene.stage.z)
    planned = SplitFinding(name, str(scene.veil), "done", asked=count, veil=scene.veil)
    try:
        figures, pictures, weak = ATTACKS[name][0](scene)
    except NotTriedError as why:
        return replace(planned, status="refused", remarks=[Remark("refused", str(why))])
    except torch.linalg.LinAlgError as why:  # pyright: ignore[reportPrivateImportUsage]  # images that are all alike
        broken = f"it broke down: {str(why).splitlines()[0][:80]}"
        return replace(planned, status="refused", remarks=[Remark("refused", broken)])
    seen = {} if pictures is None else scene.stage.scores(pictures)
    remarks = [Remark("lower_bound", weak)] if weak else []
    samples = [f"sample {number + 1}" for number in range(count)]
    return replace(planned, samples=samples, figures={**figures, **seen}, remarks=remarks, shown=pictures)


def _undone(scene: Scene) -> PutBack:
    """What arrived first, put back once for all who begin with it."""
    if "undone" not in scene.held:
        scene.held["undone"] = put_back(scene, scene.side, scene.view, joint=scene.stage.joint(scene.veil.defence))
    return scene.held["undone"]


def _lacked(scene: Scene, found: PutBack, first: str = "") -> str:
    """Why an attacker is weaker than it can be: what it says first, or channels that few samples did not tell."""
    count = len(scene.stage.z)
    few = found.scores.get("channels", 1.0) < 1 and count < CHANNELS_NEED
    return first or (f"{counted(count, 'samples')} are few to tell channels by" if few else "")


def _made(scene: Scene, found: PutBack, patches: Tensor) -> Found:
    pictures = _pictures(scene, patches)
    if scene.size:
        # Which picture is whose is not known to the server, and does not matter to whoever is in it: the best counts.
        apart = torch.cdist(scene.stage.pictures.flatten(1).double(), pictures.flatten(1))
        pictures = pictures[apart.argmin(dim=1)]
    return Found(found.scores, pictures)


def _quiet(scene: Scene) -> Scene:
    """The scene for whoever links several sendings of each sample and averages their noise away; itself without any."""
    if scene.veil.kind != "noise":
        return scene
    if "quiet" not in scene.held:
        sendings = [scene.view.seen]
        for number in range(1, SENDINGS):
            later = scene.again(number).seen
            sendings.append(later[link(later, scene.view.seen)])
        each = torch.stack(sendings, dim=1)
        # Rows that stay where they are need no linking.
        means = torch.stack([average(one) for one in each]) if scene.veil.rows else each.mean(dim=1)
        veil = replace(scene.veil, strength=scene.veil.strength / SENDINGS**0.5)
        less = veil.defence
        old = None if scene.old is None else scene.stage.side(less, old=True)
        view = View(means, scene.view.truth)
        scene.held["quiet"] = Scene(scene.stage, veil, scene.stage.side(less), old, view)
    return scene.held["quiet"]


def _company(scene: Scene) -> Tensor:
    """[n, R]: tokens that were always in one batch, for whoever sees several epochs."""
    if "company" not in scene.held:
        sendings = [scene.view.seen, *(scene.again(number).seen for number in range(1, SENDINGS))]
        scene.held["company"] = company(sendings, scene.size)
    return scene.held["company"]


def _by_company(scene: Scene) -> tuple[Tensor, Tensor]:
    """(rows [n', R, D] of the samples that were put together by the batches they share, the truth about them)."""
    seen, row, group = scene.view.seen, scene.view.truth.row, _company(scene)
    fixed, rest = recurring(seen, len(scene.side.prefix))
    group = group.scatter(1, fixed, -1).flatten()
    whole = [each for each in group[group >= 0].unique() if int((group == each).sum()) == rest.shape[1]]
    index = [torch.cat([fixed[0], (group == each).nonzero()[:, 0]]) for each in whole]
    chosen = torch.stack(index) if index else fixed.new_empty(0, row.shape[1])
    return seen.flatten(0, 1)[chosen], row.flatten()[chosen]


def _pictures(scene: Scene, patches: Tensor) -> Tensor:
    return unpatchify(patches, scene.stage.grid, scene.stage.patch).clamp(0, 1)


ALONE = Joint()
"""Each token for itself."""


class PutBack(NamedTuple):
    """tokens: [n, N, D], patch tokens where they are believed to belong. index: [n, N], of which row of all n · R each
    is. scores: the shares of channels, places and samples that are right, where they were hidden. expected: [n, N, D],
    the mean of the tokens that each place may have; of one sure token it is that."""

    tokens: Tensor
    index: Tensor
    scores: dict[str, float]
    expected: Tensor

    @property
    def places(self) -> Tensor:
        """[n · N]: the place of each token in turn."""
        return torch.arange(self.index.shape[1]).repeat(len(self.index))

    def patches(self, side: PublicSide, joint: Joint = ALONE) -> Tensor:
        """Pixels [n, N, P] by regression, with what the whole image adds."""
        return joint.read(self.expected, side)


def put_back(scene: Scene, side: PublicSide, view: View, *, joint: Joint = ALONE, drifted: bool = False) -> PutBack:
    """Undoes what the client did to a sending. drifted: `side` is of an old embedding, and tokens are clustered first.

    joint: what neighbours tell of an order. The truth is looked at for the scores alone.
    """
    seen, truth = view
    scores: dict[str, float] = {}
    if scene.veil.columns:
        found = order_of_channels(scene, side, seen)
        scores["channels"] = float((found == truth.channels).double().mean())
        seen = seen[..., found.argsort()]
    index, expected = _rows(scene, side, seen, drifted), None
    if scene.veil.rows and joint.orders is not None:
        index, expected = _together(seen, side, joint.orders)
    count, places = index.shape
    row, sample = (each.flatten()[index] for each in (truth.row, truth.sample))
    if scene.veil.rows or scene.size:
        scores["places"] = float((row == len(side.prefix) + torch.arange(places)).double().mean())
    if scene.size:
        scores["samples"] = share_up_to_names(
            torch.arange(count)[:, None].expand_as(sample).flatten(), sample.flatten()
        )
    tokens = seen.flatten(0, 1)[index]
    return PutBack(tokens, index, scores, tokens if expected is None else expected)


def order_of_channels(scene: Scene, side: PublicSide, seen: Tensor) -> Tensor:
    """[D]: the clear channel of each, by what public images show under the same defence."""
    given = {"prefix": len(side.prefix), "grid": scene.stage.grid, "scale": side.scale}
    public = send(side.tokens, scene.veil.defence, counted_words(scene.stage.seed, 3), **given).seen
    return recover_columns(seen, public, side.prefix).q


def _rows(scene: Scene, side: PublicSide, seen: Tensor, drifted: bool) -> Tensor:
    count, rows, _ = seen.shape
    prefix = len(side.prefix)
    every = torch.arange(count * rows).view(count, rows)
    if not (scene.veil.rows or scene.size):
        return every[:, prefix:]
    if not scene.size:
        found = _clustered(seen, side) if drifted else order_rows(seen, side)
        return torch.empty_like(every).scatter_(1, found, every)[:, prefix:]
    rest = torch.stack([set_apart(each, side.prefix)[1] for each in seen])
    batches = list(every.gather(1, rest).split(scene.size))
    tokens = [seen.flatten(0, 1)[batch.flatten()] for batch in batches]
    places = [assign_places(each, side, len(batch)) for each, batch in zip(tokens, batches, strict=True)]
    if drifted:
        places = _settled(tokens, places, side)
    given = zip(tokens, places, batches, strict=True)
    return torch.cat([_grouped(each, found, batch, side, scene.stage.borders) for each, found, batch in given])


def _together(seen: Tensor, side: PublicSide, whole: Whole) -> tuple[Tensor, Tensor]:
    """([n, N], which of all n · R rows each place has; [n, N, D], what it may have in the mean), neighbours judged."""
    rest = torch.stack([set_apart(each, side.prefix)[1] for each in seen])
    tokens = seen.gather(1, rest[..., None].expand(-1, -1, seen.shape[2]))
    belief = whole.beliefs(tokens)
    rows = torch.arange(len(seen))[:, None] * seen.shape[1] + rest
    return rows.gather(1, chosen(belief)), belief @ tokens


def _grouped(tokens: Tensor, places: Tensor, batch: Tensor, side: PublicSide, borders: Borders) -> Tensor:
    """[B, N]: the rows of a batch by sample and place, patches joined whose borders fit."""
    group = borders.group(read_pixels(tokens, places, side), places, len(batch))
    return torch.empty_like(batch).index_put_((group, places), batch.flatten())


def unclustered(count: int, places: int, width: int) -> bool:
    """Whether so many samples are too few for a covariance within clusters of their tokens."""
    return (count - 1) * places < width


def _clustered(seen: Tensor, side: PublicSide) -> Tensor:
    """The row of the stream that each is, [n, R], clustered by place and then named; too few samples: as they are."""
    prefix = len(side.prefix)
    if unclustered(len(seen), seen.shape[1] - prefix, seen.shape[2]):
        return order_rows(seen, side)
    return name_clusters(cluster_rows(seen, prefix), side.places, prefix)


def _settled(tokens: list[Tensor], places: list[Tensor], side: PublicSide) -> list[Tensor]:
    """Places of tokens that several samples exchanged, clustered from where an old embedding puts them."""
    if unclustered(sum(map(len, tokens)) // len(side.places), *side.places.shape):
        return places
    of, centres, within = settle(tokens, places, len(side.places))
    return list(name_clusters(Clusters(torch.cat(of), centres, within), side.places, 0).split([len(x) for x in of]))
