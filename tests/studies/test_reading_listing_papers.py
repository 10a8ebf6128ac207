"""The four papers, table by table and figure by figure: each has its study or a reason why it has none."""

from __future__ import annotations

import runpy
from fnmatch import fnmatchcase
from pathlib import Path

from situs.cli.study import check_command, command_kind
from situs.config import from_dict
from situs.measure.finetune import FinetuneConfig
from situs.studies.folder import StudyFolder
from situs.studies.form import PAPERS, Study
from situs.studies.plan import load_study, planned, recipe_of
from situs.studies.words import words_of
from situs.train.run import RunConfig

METHOD = "a drawing of the method, without data"

MP3 = {
    "Table 1": "overview of datasets and baseline models",
    "Table 2": "training time and memory of MP3, MAE and ViT-B over the masking ratio",
    "Table 3": "classification on CIFAR-100 and Tiny ImageNet",
    "Table 4": "classification on ImageNet-1K",
    "Table 5": "Speech Commands beside other baselines",
    "Table 6": "Speech Commands over the amount of pretraining",
    "Table 7": "transfer to CIFAR-10 and Stanford Cars",
    "Figure 2": "an image and its reconstructions, trained with .75",
    "Figure 3": "validation accuracy of position prediction, trained with 0 and .75",
    "Figure 4": "finetuning accuracy over the pretraining epochs",
    "Figure 5": "ImageNet accuracy over the finetuning epochs",
    "Figure 6": "CIFAR-100 accuracy over the masking ratio",
    "Figure 7": "CIFAR-100 accuracy over the patch size",
    "Figure 8": "average relative attention maps of chosen heads",
    "Figure 9": "KNN accuracy layer by layer",
    "Figure 10": "average position correlation within and across images",
    "Figure 11": "average relative attention of all layers and heads",
    "Figure 12": "example reconstructions, trained with .5",
    "Figure 13": "example reconstructions, trained with .75",
    "Figure 14": "patches of two images of dogs shuffled together",
    "Figure 15": "patches of a boat and a balloon shuffled together",
}
DROPPOS = {
    "Table 1": "ablation of the patch mask ratio γ",
    "Table 2": "ablation of the position mask ratio γ_pos",
    "Table 3": "ablation of σ",
    "Table 4": "ablation of attentive reconstruction, τ",
    "Table 5": "ImageNet-1K beside previous methods, ViT-B and ViT-L",
    "Table 6": "downstream tasks beside previous methods",
    "Table 7": "position sensitivity before and after fine-tuning",
    "Table S1": "initialisation of the positional encoding",
    "Table S2": "DropPos with Swin",
    "Table S3": "position reconstruction, pretrained with different γ",
    "Table S4": "position reconstruction, pretrained with different γ_pos",
    "Table S5": "position reconstruction, pretrained with different σ and τ",
    "Figure 3": "qualitative results of position reconstruction",
}
MJP = {
    "Table 1": "backbones on ImageNet-1K: top-1, Diff. Norm., consistency",
    "Table 2": "robustness to corruptions and adversarial examples",
    "Table 3": "MJP trained with different masking ratios",
    "Table 4": "variants of MJP",
    "Table 5": "gradient leakage by the analytic attack",
    "Table 6": "explained variance over PCA's dimensionality",
    "Table 7": "ingredients and hyper-parameters",
    "Table 8": "mean absolute error of the reversed mapping function",
    "Table 9": "segmentation on ADE20K",
    "Table 10": "robustness to common corruptions with ImageNet-C",
    "Figure 1": "low-dimensional projection of DeiT-S's position embeddings",
    "Figure 3": "top-1 over the mask ratio during inference",
    "Figure 4": "accumulated eigenvalues of position embeddings",
    "Figure 5": "image recovery with gradient updates",
    "Figure 6": "top-1 of DeiT-S and MJP during the training",
    "Figure 7": "UMAP projections of position embeddings over γ",
    "Figure 8": "visualisation of the last self-attention",
    "Figure 9": "image recovery with gradient updates, shuffled at .9",
    "Figure 10": "image recovery with gradient updates, shuffled at .9",
}
ST = {
    "Table 2": "test results of ViT-Base and ViT-Adapter with permutations",
    "Table 3": "test accuracy of ViT-Base and Bert trained with permutations",
    "Table 4": "Bert and GPT2 tested with permuted columns",
    "Table 5": "Bert and GPT2 trained with permuted columns",
    "Table 6": "utility and privacy on CelebA",
    "Table 7": "fine-tuning normal, authorised and unauthorised",
    "Figure 3": "reconstruction results of model inversion attacks",
    "Figure 4": "training curves of fine-tuning ViT",
    "Figure 5": "validation loss of ViT trained to convergence",
    "Figure 6": "training curves of fine-tuning GPT2",
    "Figure 7": "utility-privacy trade-off over the radius of the low pass",
    "Figure 8": "computational and memory overhead",
}
CONTENTS = {"mp3": MP3, "droppos": DROPPOS, "mjp": MJP, "st": ST}
"""paper -> where it stands -> what its caption says, for all that has numbers or pictures of data."""

LEFT_OUT = {
    ("mp3", "Figure 1"): METHOD,
    ("droppos", "Figure 1"): "a comparison of pretext tasks in drawings, without data",
    ("droppos", "Figure 2"): METHOD,
    ("mjp", "Figure 2"): "one image cut into patches, to show four ways of shuffling; nothing is measured",
    ("st", "Table 1"): "the notation",
    ("st", "Figure 1"): "a drawing of the Transformer",
    ("st", "Figure 2"): METHOD,
}

DRAWN = {
    "evaluate attention": ("images", "heads", "relative", "maps", "distance", "layers"),
    "evaluate position": ("umap", "pca-2d", "pca-3d", "cosine", "energy", "guesses"),
    "evaluate reconstruct": ("one", "placed", "mix-1", "verdict-0.95", "placed-0.95"),
    "audit gradients": ("pictures-a", "pictures-c"),
    "audit split": ("pictures", "psnr", "places"),
}
"""verb -> the names of the pictures beside its page."""

SITUS = {"cifar100", "cifar100-budget", "cifar100-mjp", "cifar100-order", "cifar100-recipes", "cifar100-split", "lock"}
SITUS |= {"lock-text", "text-mjp", "text-order"}
"""Studies of situs itself, of no paper."""


def test_every_table_and_figure_of_the_papers_has_its_study(every: dict[str, Study]) -> None:
    assert CONTENTS.keys() == PAPERS.keys()
    wanted = {(paper, place) for paper, captions in CONTENTS.items() for place in captions}
    assert not wanted & LEFT_OUT.keys()
    present = {(study.paper, study.place) for study in every.values() if study.paper}
    assert present - wanted == set(), "not in the papers"
    assert wanted - present == set(), "have no study"
    assert {name for name, study in every.items() if not study.paper} >= SITUS


def test_the_numbers_of_a_paper_have_no_gap() -> None:
    """1, 2, 3 … for tables, supplementary tables and figures, with those that are left out."""
    for paper, captions in CONTENTS.items():
        places = [*captions, *(place for other, place in LEFT_OUT if other == paper)]
        for kind in ("Table ", "Table S", "Figure "):
            numbers = sorted(int(p.removeprefix(kind)) for p in places if p.removeprefix(kind).isdigit())
            assert numbers == [*range(1, len(numbers) + 1)], (paper, kind)


def test_a_figure_without_numbers_shows_what_its_job_draws(every: dict[str, Study]) -> None:
    shown = 0
    for name, study in every.items():
        jobs = planned(study)
        for picture in study.pictures:
            drawn = [f"file-{file}" for file in DRAWN[jobs[picture.job].verb]]
            assert any(fnmatchcase(file, picture.file) for file in drawn), f"{name}: {picture.file} of {picture.job}"
            shown += 1
    assert shown > 20


def test_the_page_on_studies_lists_them_all(every: dict[str, Study]) -> None:
    """Name, place and title, and what is missing: the table that the built page ends with."""
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_reference.py"))["studies_page"]()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    wanted = {f"| `{name}`": bool(study.missing) for name, study in every.items()}
    assert {row[0]: row[-1] != "– |" for row in rows} == wanted


def test_every_command_at_every_scale_is_one_of_the_command_line(every: dict[str, Study]) -> None:
    """By the real parser; commands that differ in paths alone are parsed once."""
    seen: set[tuple[str, ...]] = set()
    for name, study in every.items():
        for scale in study.scale_names() if study.runs else ():
            folder = StudyFolder(Path("no", name), study, name, scale, 1)
            assert folder.tasks, f"{name} at {scale}"
            for task in folder.tasks.values():
                if (kind := command_kind(task.job)) not in seen:
                    seen.add(kind)
                    check_command(task.job, words_of(folder, task, dict.fromkeys(study.data, "data")))
    assert len(seen) > 50


def test_the_checkpoints_that_speech_is_tuned_from_are_kept() -> None:
    """At every scale Table 6 starts from updates after which its one pretraining keeps a checkpoint."""
    study = load_study("mp3-table6", configs=False)
    for scale, count in (("paper", 5), ("quick", 1)):
        jobs = planned(study, scale)
        train = from_dict(RunConfig, recipe_of(jobs["mp3"], RunConfig)).train
        steps = [int(job.model.rpartition("step-")[2]) for job in jobs.values() if job.verb == "finetune"]
        assert steps and len(steps) == count
        assert {*steps} == {*train.keep_at} and max(steps) == train.max_steps


def test_speech_is_chosen_on_validation_and_judged_on_test() -> None:
    jobs = planned(load_study("mp3-table5", configs=False))
    judged = [job for job in jobs.values() if job.verb == "evaluate accuracy"]
    assert len(judged) == 14 and {job.options["split"] for job in judged} == {"test"}
    for job in judged:
        trained = jobs[job.models[0]]
        cls = FinetuneConfig if trained.verb == "finetune" else RunConfig
        assert from_dict(cls, recipe_of(trained, cls)).train.keep_best
    noisy = [job for job in judged if "snr_db" in job.options]
    assert [job.options["snr_db"] for job in noisy] == [5] * 4
    few = {jobs[name].change["data"]["per_class"] for name in jobs if name.startswith("few-") and "test" not in name}
    assert few == {10, 50, 200}
    asked = {name: job.options["anchor_ratio"] for name, job in jobs.items() if job.verb == "evaluate position"}
    assert {name.rpartition("-")[2]: share for name, share in asked.items()} == {"hinted": 0.05, "unhinted": 0}
