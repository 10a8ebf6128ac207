"""The demo's looks at what was learned: puzzles, places, position vectors and attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from situs.analyze.attention import Shown, image_maps, survey
from situs.analyze.decode import decode_places
from situs.analyze.reconstruct import Setting, settings_of, study
from situs.cli.demo_sections import GRID, LOOKS, PLACES, Lines, Stage, project
from situs.cli.demo_training import QUICK, Length, config_of, load, show_training, train
from situs.data.loader import Loader
from situs.evaluate.position import position_curve, position_grid
from situs.methods import MP3, DropPos, DropPosConfig, SupervisedConfig
from situs.pages.position import curve, heatmap
from situs.pages.reconstruct import mix_figure, one_image_figure, placed_figure, verdict_figure
from situs.report import figures
from situs.report.attention import attention_over_images, relative_maps
from situs.results import percent
from situs.train.loop import TrainConfig
from situs.train.optim import OptimConfig
from situs.train.run import make_method

JUDGED = 500
"""Test images that numbers are taken over."""


def show_puzzles(stage: Stage) -> Lines:
    """MP3's Figures 2 and 14: puzzles at several η, and two images in one."""
    method = stage.models["mp3"]
    found = study(method, _test_images(stage), settings_of(method), _look, show=5, pairs=1)
    section = stage.page.section("Jigsaw puzzles")
    section.text(
        "Test images in pieces: the patches come in no order and without positions, a share 1 − η of them (outlined in "
        "green) as keys, and each is put where the model says it was. Patches that meet are averaged, and hatched "
        "places got none. Much of these images is black, and one black patch is like another."
    )
    section.figure(figures.png(one_image_figure(found.images[0], found.solved)), "One image at four η.")
    section.figure(figures.png(placed_figure(found.images, found.solved)), "More images; over each its right guesses.")
    section.figure(
        figures.png(mix_figure(found.pairs[0], found.mixes[0])),
        "The patches of two images, shuffled together and dealt out in two sets: of each the model builds one image.",
    )
    whole = found.scores[Setting(0.0)]
    return [("MP3, puzzles without a mask", f"{percent(whole.right)} of patches right")]


def show_places(stage: Stage) -> Lines:
    """MP3 over η and, after a short DropPos training, the grid of γ and γ_pos with Figure 3."""
    section = stage.page.section("Who knows where a patch was")
    section.text(
        "MP3 is asked for every patch's place, DropPos for the places of those that it sees and whose place it is not "
        "told. Here is how well each does when more is hidden than in its training, or less."
    )
    mp3, droppos = stage.models["mp3"], _train_droppos(stage)
    assert isinstance(mp3, MP3)
    section.figure(
        curve(position_curve(mp3, _test_images(stage))),
        "MP3, trained with η = 0.5, at other shares of queries.",
    )
    grid = position_grid(droppos, _test_images(stage))
    section.figure(
        heatmap(grid),
        f"DropPos, trained with γ = γ_pos = 0.75: right guesses in percent. Chance is {percent(1 / PLACES)}.",
    )
    tried = [Setting(gamma, 0.75) for gamma in (0.0, 0.25, 0.5, 0.75)]
    found = study(droppos, [next(iter(_test_images(stage)))], tried, _look, show=4)
    section.figure(
        figures.png(verdict_figure(found.images, found.solved)),
        "DropPos at γ_pos = 0.75. Black and hatched: not seen. Green: told where it is. White: guessed wrong.",
    )
    return [("DropPos, mean of the position grid", f"{percent(grid.mean)} (chance {percent(1 / PLACES)})")]


def _train_droppos(stage: Stage) -> DropPos:
    config = config_of(
        stage,
        DropPosConfig(decoder_width=64, decoder_heads=4, affinity="visible"),
        "sincos",
        optim=OptimConfig(lr=2e-3, warmup_epochs=1, min_lr=1e-5, clip=1.0),
        train=TrainConfig(epochs=1 if stage.quick else 10, log_every=100, seed=stage.seed),
    )
    with torch.random.fork_rng(devices=[]):
        method = make_method(config, None)
        assert isinstance(method, DropPos)
        images = (QUICK if stage.quick else Length()).images
        train(stage, "training DropPos", config, method, load(config, images), "droppos")
    return method


def show_learned_positions(stage: Stage) -> Lines:
    """Two tables that were learned: the classifier's positions, and MP3's vector for each place it can name."""
    section = stage.page.section("A map of the image that nobody drew")
    mp3, own = stage.models["mp3"], stage.models["after MP3"].backbone.positions().table
    assert isinstance(mp3, MP3)
    assert own is not None
    tables = {"the classifier's positions": own.detach(), "MP3's position head": mp3.position_head.weight.detach()}
    found = {name: decode_places(table, GRID, seed=stage.seed) for name, table in tables.items()}
    errors = [f"{each.two.mean:.2f} patches for {name}" for name, each in found.items()]
    blind = next(iter(found.values())).chance_two
    section.text(
        "MP3's head holds one vector for each place that it can name, and the classifier above has learned one vector "
        "for each place that it adds to the patch there. Both began as random numbers; no one told either which place "
        "is beside which. A linear map fitted on four fifths of the places reads row and column of the others off "
        f"their vectors with a mean error of {' and '.join(errors)}; who knows nothing errs by {blind:.2f}."
    )
    if found["MP3's position head"].two.mean < blind / 2:  # not after the few steps of --quick
        section.text(
            "MP3 finds the grid because neighbours are easily mistaken for each other, and so are left and right of "
            "clothes that are symmetric: its sheet may be folded in the middle. The classifier needs places less, and "
            "has seen few images."
        )
    drawn, _ = project(tables)
    section.figure(figures.png(drawn), f"The {PLACES} vectors in the plane of their two largest principal components.")
    return [(f"row and column read off {name}", f"error {each.two.mean:.2f} patches") for name, each in found.items()]


def show_attention(stage: Stage) -> Lines:
    """The classifier's heads: over images and by relative offset."""
    backbone = stage.models["after MP3"].backbone
    loader = _test_images(stage)
    images = next(iter(loader)).inputs[:5]
    shown = Shown(_look(images), image_maps(backbone, images, backbone.depth - 1), backbone.depth - 1, cls=True)
    found = survey(backbone, loader)
    layer, head = divmod(int(found.entropy.argmin()), found.entropy.shape[1])
    section = stage.page.section("Where the classifier looks")
    section.text(
        f"What CLS takes from each patch in the last layer: {percent(shown.brightest_tenth, 0)} of it lies on a tenth "
        "of the patches. Below, what a patch takes on average from the patch at each offset from it: the sharpest "
        f"head is head {head + 1} of layer {layer + 1}, with {found.entropy.min():.2f} nats of entropy (all alike: "
        f"{found.uniform_entropy:.2f})."
    )
    section.figure(
        figures.png(attention_over_images(shown.images.numpy(), shown.maps.numpy())),
        "Attention of the fine-tuned classifier; each map has its own scale.",
    )
    section.figure(
        figures.png(relative_maps(found.relative.numpy(), found.entropy.numpy())),
        f"Mean attention by offset, up to {GRID[0] - 1} patches each way, the query in the middle; under each map its "
        "entropy in nats. Each offset is averaged over the pairs of patches that have it.",
    )
    return [("sharpest head of the classifier", f"{found.entropy.min():.2f} nats of {found.uniform_entropy:.2f}")]


def _test_images(stage: Stage) -> Loader:
    return load(config_of(stage, SupervisedConfig()), _judged(stage), "test", batch=JUDGED)


def _judged(stage: Stage) -> int:
    return 50 if stage.quick else JUDGED


def _look(images: Tensor) -> Tensor:
    """Grey images as a person sees them; the loader's mean is 0.5 and its deviation 0.25."""
    return (images * 0.25 + 0.5).clamp(0.0, 1.0)


SECTIONS: dict[str, Callable[[Stage], Lines]] = {
    **LOOKS,
    "MP3, and a classifier with and without it": show_training,
    "puzzles": show_puzzles,
    "DropPos, and who knows where a patch was": show_places,
    "what a vector knows of its place": show_learned_positions,
    "attention": show_attention,
}
"""All that the demo shows, in this order: the name that progress shows -> the section."""
