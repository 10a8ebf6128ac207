"""The attackers of split learning on one setting: what each must know, what it recovers, or why it was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor

from situs.audit.split.blind import (
    Clusters,
    average,
    cluster_rows,
    co_occurrence,
    found_again,
    lay_out,
    link,
    name_clusters,
    recurring,
    refine_clusters,
    symmetries,
)
from situs.audit.split.joint import (
    Borders,
    Joint,
    PublicSide,
    Whole,
    assign_places,
    chosen,
    order_rows,
    read_pixels,
    set_apart,
)
from situs.audit.split.stage import NONE, Scene, View, counted_words, send
from situs.backbones.base import Backbone, Stream
from situs.core.tokens import unpatchify
from situs.errors import SitusError, counted, verb
from situs.findings import Finding, Remark
from situs.locks.attacks.columns import recover_columns
from situs.locks.veil import Veil

# ---------------------------------------------------------------------------------------------------------------------
# Labels from the gradient that comes back to the features which the server itself computed.


PIECE = 400_000
"""The most numbers of the blocks' output at a time; each class takes as many again."""


def labels_with_head(backbone: Backbone, out: Tensor, gradient: Tensor) -> Tensor:
    """[n]: the class whose gradient is the one that came back, for a server that knows the final norm and the head.

    out: [n, R, D], what the blocks gave. gradient: [n, R, D], of the mean cross entropy. The gradient is linear in the
    label, so that one vector-Jacobian product a class gives every candidate.
    """
    out = out.detach().requires_grad_()
    logits = _logits(backbone, out)
    share = logits.softmax(dim=-1).detach()
    came, alike = gradient.flatten(1).double(), []
    for label in range(logits.shape[1]):
        wanted = share.clone()
        wanted[:, label] -= 1
        [candidate] = torch.autograd.grad(logits, out, wanted, retain_graph=True)
        alike.append(torch.cosine_similarity(candidate.flatten(1).double(), came))
    return torch.stack(alike).argmax(dim=0)


def several_with_head(backbone: Backbone, out: Tensor, gradient: Tensor) -> Tensor:
    """[n, K], 1 or 0: which classes each sample has, where it has any number, for a server as above.

    The gradient is that of the mean binary cross entropy over all n · K labels. It is a sum over the classes of what
    each one's output sends back, weighted by (answer - label) / (n · K): least squares gives the weights, and the
    server's own answers then give the labels. K must be less than D - 1: a norm sends nothing back in two directions.
    """
    count, rows, width = out.shape
    answers = []
    for some, came in zip(*(part.split(max(1, PIECE // (rows * width))) for part in (out, gradient)), strict=True):
        some = some.detach().requires_grad_()
        logits = _logits(backbone, some)
        units = torch.eye(logits.shape[1]).to(logits)
        back = [torch.autograd.grad(logits, some, unit.expand_as(logits), retain_graph=True)[0] for unit in units]
        sent = torch.stack(back, dim=-1).double().flatten(1, 2).cpu()  # [b, R · D, K]
        weights = torch.linalg.lstsq(sent, came.double().flatten(1).cpu()[..., None], driver="gelsd").solution[..., 0]
        answers.append(logits.detach().double().sigmoid().cpu() - weights * count * logits.shape[1] > 0.5)
    return torch.cat(answers).long()


def labels_without_head(gradient: Tensor, classes: int, seed: int = 0) -> Tensor:
    """[n]: a class's number without its name: spherical k-means of the gradient [n, R, D] summed over its rows."""
    summed = torch.nn.functional.normalize(gradient.detach().double().sum(dim=1), dim=-1)
    means = KMeans(classes, n_init=10, random_state=seed)  # pyright: ignore[reportArgumentType]  # its stubs say str
    clusters = means.fit_predict(summed.cpu().numpy())
    return torch.from_numpy(clusters).long()


def read_rows(backbone: Backbone, rows: int, width: int) -> Tensor:
    """[R] bool: the rows that the head reads, which alone have a gradient; for whoever has the head."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(1, rows, width, generator=generator).to(next(backbone.parameters())).requires_grad_()
    logits = _logits(backbone, out)
    direction = torch.linspace(-1, 1, logits.shape[1]).to(logits)
    [gradient] = torch.autograd.grad(logits, out, direction.expand_as(logits))
    return (gradient[0] != 0).any(dim=-1).cpu()


def place_rows(gradient: Tensor, read: Tensor) -> Tensor:
    """[n, R], an index to gather rows by: those with the largest gradients go where the head reads.

    Which of them stands where does not matter to a head that reads one row or pools them.
    """
    by_size = gradient.norm(dim=-1).argsort(dim=1, stable=True)
    places = torch.cat([(~read).nonzero()[:, 0], read.nonzero()[:, 0]])
    return torch.empty_like(by_size).scatter_(1, places.to(by_size.device).expand_as(by_size), by_size)


def _by_size(gradient: Tensor, read: Tensor) -> Tensor:
    """[n, R], the index of `place_rows` among all n · R rows."""
    every = torch.arange(gradient.shape[:2].numel()).view(gradient.shape[:2])
    return every.gather(1, place_rows(gradient, read).cpu())


def regroup(gradient: Tensor, read: Tensor, size: int) -> Tensor:
    """[n, R], an index of all n · R rows: the rows of one sample together, where batches of `size` exchanged theirs.

    A head that pools its rows sends each of them the same gradient, up to what the norm before it takes away: rows of
    one sample point one way.
    """
    index = _by_size(gradient, read)
    unit = torch.nn.functional.normalize(gradient.detach().double().cpu().flatten(0, 1), dim=-1)
    for batch in index.split(size):
        chosen = batch[:, read].flatten()
        means = KMeans(len(batch), n_init=10, random_state=0)  # pyright: ignore[reportArgumentType]
        means.fit(unit[chosen].numpy())
        fit = unit[chosen] @ torch.nn.functional.normalize(torch.from_numpy(means.cluster_centers_), dim=-1).T
        _, column = linear_sum_assignment(fit.repeat_interleave(int(read.sum()), dim=1).numpy(), maximize=True)
        batch[:, read] = chosen[torch.from_numpy(column).argsort()].view(len(batch), -1)
    return index


def share_up_to_names(guess: Tensor, truth: Tensor) -> float:
    """The share that is right under the best naming of the clusters."""
    size = int(max(guess.max(), truth.max())) + 1
    table = torch.zeros(size, size).index_put_((guess, truth), torch.ones(len(guess)), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table[torch.from_numpy(rows), torch.from_numpy(columns)].sum() / len(guess))


def _logits(backbone: Backbone, out: Tensor) -> Tensor:
    return backbone.head(backbone.finish(Stream(out, backbone.num_prefix)))


SENDINGS = 16
LAYOUT_NEEDS = 100
"""The fewest samples from which the grid is laid out without an embedding; 50 were too few on the model tried."""

CHANNELS_NEED = 16
"""The fewest samples that tell channels apart without a prefix token, on the model tried."""

OFTEN = f"against noise or a batch shuffle, {SENDINGS} uploads of each sample"


@dataclass(frozen=True)
class SplitFinding(Finding):
    """The finding of one attacker on one veil. figures: over all samples by name, shares in [0, 1] and dB. shown: its
    pictures of the samples, [n, C, H, W]."""

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


class Outcome(NamedTuple):
    """scores: beside those of `pictures` [n, C, H, W], if the attack makes any. weak: why it could do better."""

    scores: Mapping[str, float]
    pictures: Tensor | None = None
    weak: str = ""


def order(scene: Scene) -> Outcome:
    """Restores the order of channels and rows (under noise both together), then computes pixels by regression."""
    restored, joint = _restored(scene), scene.stage.joint(scene.veil.defence)
    return _outcome(scene, restored, restored.patches(scene.side, joint))._replace(
        weak=_lacked(scene, restored, joint.missing)
    )


def old_embedding(scene: Scene) -> Outcome:
    """Like `order`, but averages the noise, clusters the rows by position, and assigns a position to each cluster."""
    if scene.old is None:
        raise NotTriedError("no base model was given")
    denoised = _denoised(scene)
    assert denoised.old is not None
    restored = restore(denoised, denoised.old, denoised.view, drifted=True)
    few = unclustered(len(denoised.stage.z), *denoised.old.places.shape) and (scene.veil.rows or scene.size)
    weak = f"there are only {counted(len(denoised.stage.z), 'samples')}, too few to cluster" if few else ""
    return _outcome(denoised, restored, restored.patches(denoised.old))._replace(weak=_lacked(scene, restored, weak))


def no_embedding(scene: Scene) -> Outcome:
    """Clusters the rows by position, and arranges the clusters on the grid, up to symmetries; recovers no pictures.

    Noise of several uploads is averaged away first; tokens of a shuffled batch are grouped by co-occurrence.
    """
    if not (scene.veil.rows or scene.size):
        raise NotTriedError("the rows are not permuted, and this attack only restores their order")
    height, width = scene.stage.grid
    if height != width:
        raise NotTriedError(f"this attack needs a square grid, but the grid is {height} × {width}")
    prefix = len(scene.side.prefix)
    seen, row = _by_co_occurrence(scene) if scene.size else (_denoised(scene).view.seen, scene.view.truth.row)
    if (count := len(seen)) < LAYOUT_NEEDS:
        raise NotTriedError(f"this attack needs {LAYOUT_NEEDS} samples, but there {verb(count, 'are')} only {count}")
    clusters = cluster_rows(seen, prefix)
    place = lay_out(seen, clusters, prefix)
    turned = (torch.cat([torch.arange(prefix), prefix + turn[place]])[clusters.of] for turn in symmetries(height))
    return Outcome({"places": max(float((named == row)[row >= prefix].double().mean()) for named in turned)})


def decoder(scene: Scene) -> Outcome:
    """The paper's: learned on public images under the same defence; does not know of permutations and undoes none."""
    rows = scene.view.seen[:, len(scene.side.prefix) :]
    return Outcome({}, _pictures(scene, scene.stage.decoder(scene.veil.defence)(rows)))


def ordered_decoder(scene: Scene) -> Outcome:
    """Applies the paper's decoder to the rows that `order` has restored."""
    restored = _restored(scene)
    learned = scene.stage.decoder(NONE if scene.size else scene.veil.defence)
    return _outcome(scene, restored, learned(restored.tokens))._replace(weak=_lacked(scene, restored))


def linkage(scene: Scene) -> Outcome:
    """Re-identifies a sample that is sent again; after a batch shuffle, by the tokens that occur together."""
    if (count := len(scene.stage.z)) < 2:
        raise NotTriedError("a single sample is always re-identified")
    if not scene.size:
        later = scene.again(1)
        match = link(scene.view.seen, later.seen)
        return Outcome({"linked": float((match == later.truth.sample[:, 0]).double().mean())})
    if scene.size >= count:
        raise NotTriedError("all samples are in one batch, so the attack cannot learn which tokens occur together")
    truth, group = scene.view.truth, _co_occurrence(scene)
    patches = truth.row >= len(scene.side.prefix)
    return Outcome({"linked": found_again(group[patches], truth.sample[patches])})


def repeats(scene: Scene) -> Outcome:
    """Finds several uploads of each sample, averages their noise, then continues like `order`."""
    if scene.veil.kind != "noise":
        raise NotTriedError("there is no noise to average away")
    return order(_denoised(scene))


def labels(scene: Scene) -> Outcome:
    """Infers the class from the gradient of the blocks' output, with or without the head.

    Where an image has any number of classes: each by least squares, with the head only.
    """
    stage, truth, device = scene.stage, scene.view.truth, scene.stage.model.device
    if stage.labels is None or stage.unlabelled is not None:
        raise NotTriedError(stage.unlabelled or "the images have no labels")
    if stage.several and stage.labels.shape[1] > scene.view.seen.shape[2] - 2:
        raise NotTriedError(
            f"there are too many classes ({stage.labels.shape[1]}) for {scene.view.seen.shape[2]} channels"
        )
    back = stage.returned(scene.veil.defence)
    out, gradient = (tensor[truth.sample, truth.row][..., truth.channels] for tensor in back)
    if scene.veil.columns:
        clear = order_of_channels(scene, scene.side, scene.view.seen).argsort()
        out, gradient = out[..., clear], gradient[..., clear]
    read = read_rows(stage.backbone, *scene.view.seen.shape[1:])
    if scene.size and bool(read[len(scene.side.prefix) :].any()):
        index = regroup(gradient, read, scene.size)
    else:
        index = _by_size(gradient, read)
    wanted = stage.labels[truth.sample.flatten()[index][:, read].mode(dim=1).values]
    out, gradient = (tensor.flatten(0, 1)[index] for tensor in (out, gradient))
    if stage.several:
        known = wanted >= 0
        named = several_with_head(stage.backbone, out.to(device), gradient.to(device))
        return Outcome({"labels": float((named == wanted)[known].double().mean())})
    named = labels_with_head(stage.backbone, out.to(device), gradient.to(device)).cpu()
    scores = {"labels": float((named == wanted).double().mean())}
    if 1 < (classes := len(stage.labels.unique())) < len(stage.labels):
        scores["unnamed labels"] = share_up_to_names(labels_without_head(gradient, classes, stage.seed), wanted)
    return Outcome(scores)


ATTACKS: dict[str, tuple[Callable[[Scene], Outcome], str]] = {
    "order": (order, "the embedding"),
    "old-embedding": (
        old_embedding,
        f"the embedding before fine-tuning; against noise, also {SENDINGS} uploads of each sample",
    ),
    "no-embedding": (no_embedding, f"nothing; {OFTEN}"),
    "decoder": (decoder, "the embedding (this attacker does not undo permutations)"),
    "ordered-decoder": (ordered_decoder, "the embedding"),
    "linkage": (linkage, f"nothing; against a batch shuffle, {SENDINGS} uploads of each sample"),
    "repeats": (repeats, f"the embedding, and {SENDINGS} uploads of each sample"),
    "labels": (labels, "the head; without the head, the attacker cannot name the classes"),
}
"""attacker -> (what it does, what it must know beside public images)."""


class NotTriedError(SitusError):
    """The attack does not apply to this setting, and why, which is no protection."""


def attack(name: str, scene: Scene) -> SplitFinding:
    """The finding of an attacker under a veil."""
    count = len(scene.stage.z)
    planned = SplitFinding(name, str(scene.veil), "done", asked=count, veil=scene.veil)
    try:
        figures, pictures, weak = ATTACKS[name][0](scene)
    except NotTriedError as why:
        return replace(planned, status="refused", remarks=[Remark("refused", str(why))])
    except torch.linalg.LinAlgError as why:  # pyright: ignore[reportPrivateImportUsage]  # images that are all alike
        broken = f"the attack failed with an error: {str(why).splitlines()[0][:80]}"
        return replace(planned, status="refused", remarks=[Remark("refused", broken)])
    seen = {} if pictures is None else scene.stage.scores(pictures)
    remarks = [Remark("lower_bound", weak)] if weak else []
    samples = [f"sample {number + 1}" for number in range(count)]
    return replace(planned, samples=samples, figures={**figures, **seen}, remarks=remarks, shown=pictures)


def _restored(scene: Scene) -> Restored:
    """The first sending with its order restored, for all attackers that begin with it."""
    if "restored" not in scene.cache:
        scene.cache["restored"] = restore(scene, scene.side, scene.view, joint=scene.stage.joint(scene.veil.defence))
    return scene.cache["restored"]


def _lacked(scene: Scene, restored: Restored, first: str = "") -> str:
    """Why an attacker could do better: the first reason, or that few samples left channels unknown."""
    count = len(scene.stage.z)
    few = restored.scores.get("channels", 1.0) < 1 and count < CHANNELS_NEED
    return first or (f"with only {counted(count, 'samples')}, some channels may not be identified" if few else "")


def _outcome(scene: Scene, restored: Restored, patches: Tensor) -> Outcome:
    pictures = _pictures(scene, patches)
    if scene.size:
        # The server does not know which picture is whose, which protects nobody: each sample's nearest picture counts.
        apart = torch.cdist(scene.stage.pictures.flatten(1).double(), pictures.flatten(1))
        pictures = pictures[apart.argmin(dim=1)]
    return Outcome(restored.scores, pictures)


def _denoised(scene: Scene) -> Scene:
    """The scene after linking several sendings of each sample and averaging their noise; itself without noise."""
    if scene.veil.kind != "noise":
        return scene
    if "denoised" not in scene.cache:
        sendings = [scene.view.seen]
        for number in range(1, SENDINGS):
            later = scene.again(number).seen
            sendings.append(later[link(later, scene.view.seen)])
        repeated = torch.stack(sendings, dim=1)
        # Rows that stay where they are need no linking.
        means = torch.stack([average(sample) for sample in repeated]) if scene.veil.rows else repeated.mean(dim=1)
        veil = replace(scene.veil, strength=scene.veil.strength / SENDINGS**0.5)
        weaker = veil.defence
        old = None if scene.old is None else scene.stage.side(weaker, old=True)
        view = View(means, scene.view.truth)
        scene.cache["denoised"] = Scene(scene.stage, veil, scene.stage.side(weaker), old, view)
    return scene.cache["denoised"]


def _co_occurrence(scene: Scene) -> Tensor:
    """[n, R]: groups of tokens that were in one batch in every sending."""
    if "co-occurrence" not in scene.cache:
        sendings = [scene.view.seen, *(scene.again(number).seen for number in range(1, SENDINGS))]
        scene.cache["co-occurrence"] = co_occurrence(sendings, scene.size)
    return scene.cache["co-occurrence"]


def _by_co_occurrence(scene: Scene) -> tuple[Tensor, Tensor]:
    """(rows [n', R, D] of the samples grouped by co-occurrence, the true row of each [n', R])."""
    seen, row, group = scene.view.seen, scene.view.truth.row, _co_occurrence(scene)
    fixed, rest = recurring(seen, len(scene.side.prefix))
    group = group.scatter(1, fixed, -1).flatten()
    whole = [number for number in group[group >= 0].unique() if int((group == number).sum()) == rest.shape[1]]
    index = [torch.cat([fixed[0], (group == number).nonzero()[:, 0]]) for number in whole]
    chosen = torch.stack(index) if index else fixed.new_empty(0, row.shape[1])
    return seen.flatten(0, 1)[chosen], row.flatten()[chosen]


def _pictures(scene: Scene, patches: Tensor) -> Tensor:
    return unpatchify(patches, scene.stage.grid, scene.stage.patch).clamp(0, 1)


ALONE = Joint()
"""Each token on its own."""


class Restored(NamedTuple):
    """tokens: [n, N, D], patch tokens at their estimated places. index: [n, N], the row of all n · R that each is.
    scores: the shares of channels, places and samples that are right, where they were hidden. expected: [n, N, D], the
    posterior mean token of each place."""

    tokens: Tensor
    index: Tensor
    scores: dict[str, float]
    expected: Tensor

    def patches(self, side: PublicSide, joint: Joint = ALONE) -> Tensor:
        """Pixels [n, N, P] by regression, with what the whole image adds."""
        return joint.read(self.expected, side)


def restore(scene: Scene, side: PublicSide, view: View, *, joint: Joint = ALONE, drifted: bool = False) -> Restored:
    """Undoes what the client did to a sending. drifted: `side` is of an old embedding, and tokens are clustered first.

    joint: the model of neighbours that orders rows. The truth is used for the scores only.
    """
    seen, truth = view
    scores: dict[str, float] = {}
    if scene.veil.columns:
        order = order_of_channels(scene, side, seen)
        scores["channels"] = float((order == truth.channels).double().mean())
        seen = seen[..., order.argsort()]
    index, expected = _rows(scene, side, seen, drifted), None
    if scene.veil.rows and joint.orders is not None:
        index, expected = _together(seen, side, joint.orders)
    count, places = index.shape
    row, sample = (numbers.flatten()[index] for numbers in (truth.row, truth.sample))
    if scene.veil.rows or scene.size:
        scores["places"] = float((row == len(side.prefix) + torch.arange(places)).double().mean())
    if scene.size:
        scores["samples"] = share_up_to_names(
            torch.arange(count)[:, None].expand_as(sample).flatten(), sample.flatten()
        )
    tokens = seen.flatten(0, 1)[index]
    return Restored(tokens, index, scores, tokens if expected is None else expected)


def order_of_channels(scene: Scene, side: PublicSide, seen: Tensor) -> Tensor:
    """[D]: the clear channel of each, by what public images show under the same defence."""
    layout = {"prefix": len(side.prefix), "grid": scene.stage.grid, "scale": side.scale}
    public = send(side.tokens, scene.veil.defence, counted_words(scene.stage.seed, 3), **layout).seen
    return recover_columns(seen, public, side.prefix).q


def _rows(scene: Scene, side: PublicSide, seen: Tensor, drifted: bool) -> Tensor:
    count, rows, _ = seen.shape
    prefix = len(side.prefix)
    every = torch.arange(count * rows).view(count, rows)
    if not (scene.veil.rows or scene.size):
        return every[:, prefix:]
    if not scene.size:
        stream_rows = _clustered(seen, side) if drifted else order_rows(seen, side)
        return torch.empty_like(every).scatter_(1, stream_rows, every)[:, prefix:]
    rest = torch.stack([set_apart(part, side.prefix)[1] for part in seen])
    batches = list(every.gather(1, rest).split(scene.size))
    tokens = [seen.flatten(0, 1)[batch.flatten()] for batch in batches]
    places = [assign_places(part, side, len(batch)) for part, batch in zip(tokens, batches, strict=True)]
    if drifted:
        places = _refine_places(tokens, places, side)
    parts = zip(tokens, places, batches, strict=True)
    return torch.cat([_grouped(part, at, batch, side, scene.stage.borders) for part, at, batch in parts])


def _together(seen: Tensor, side: PublicSide, whole: Whole) -> tuple[Tensor, Tensor]:
    """([n, N], which of all n · R rows each place has; [n, N, D], its posterior mean), neighbours used."""
    rest = torch.stack([set_apart(sample, side.prefix)[1] for sample in seen])
    tokens = seen.gather(1, rest[..., None].expand(-1, -1, seen.shape[2]))
    belief = whole.beliefs(tokens)
    rows = torch.arange(len(seen))[:, None] * seen.shape[1] + rest
    return rows.gather(1, chosen(belief)), belief @ tokens


def _grouped(tokens: Tensor, places: Tensor, batch: Tensor, side: PublicSide, borders: Borders) -> Tensor:
    """[B, N]: the rows of a batch by sample and place, grouped by how well borders of patches fit."""
    group = borders.group(read_pixels(tokens, places, side), places, len(batch))
    return torch.empty_like(batch).index_put_((group, places), batch.flatten())


def unclustered(count: int, places: int, width: int) -> bool:
    """Whether so many samples are too few for a covariance within clusters of their tokens."""
    return (count - 1) * places < width


def _clustered(seen: Tensor, side: PublicSide) -> Tensor:
    """[n, R]: the row of the stream that each is, by clusters matched with places; with too few samples one by one."""
    prefix = len(side.prefix)
    if unclustered(len(seen), seen.shape[1] - prefix, seen.shape[2]):
        return order_rows(seen, side)
    return name_clusters(cluster_rows(seen, prefix), side.places, prefix)


def _refine_places(tokens: list[Tensor], places: list[Tensor], side: PublicSide) -> list[Tensor]:
    """Places of tokens that several samples exchanged, by clusters that start from an old embedding's places."""
    if unclustered(sum(map(len, tokens)) // len(side.places), *side.places.shape):
        return places
    of, centres, within = refine_clusters(tokens, places, len(side.places))
    return list(name_clusters(Clusters(torch.cat(of), centres, within), side.places, 0).split([len(x) for x in of]))
