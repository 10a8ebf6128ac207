"""Verbs and flags of earlier versions, and what replaces them; using one is answered with that sentence."""

from __future__ import annotations

VERBS = {
    "verify": "use situs info MODEL --verify",
    "key": "use situs keygen",
    "key new": "use situs keygen",
    "evaluate perplexity": "use situs evaluate accuracy, which also measures language models",
    "evaluate segments": "use situs evaluate accuracy, which also measures segmentation",
    "evaluate objects": "use situs evaluate accuracy, which also measures detection",
    "evaluate ensemble": "use situs evaluate accuracy MODEL MODEL",
    "analyze": "use situs evaluate",
    "analyze attention": "use situs evaluate attention",
    "analyze correlation": "use situs evaluate attention --kind correlation",
    "analyze positions": "use situs evaluate position --kind vectors",
    "analyze reconstruct": "use situs evaluate reconstruct",
    "audit positions": "use situs evaluate position --kind all",
    "audit curve": "use situs audit sweep",
    "audit finetuning": "use situs study run lock, or situs finetune with and without --key",
    "bench step": "use situs bench",
    "bench compare": "use situs bench --compare BEFORE,AFTER",
    "bench cost": "use situs bench with several --batches and --models",
    "split cost": "use situs study run st-figure8; with a server, use python benchmarks/split.py --count",
    "study list": "use situs study show, without a name",
    "study pack": "use python scripts/study_parcel.py pack",
    "study unpack": "use python scripts/study_parcel.py unpack",
}
"""verb -> what replaces it."""

EVERYWHERE = {"--example": "the help of each verb contains an example"}
"""Flags that every verb had."""

_STEP = {"--precision": "use --defences bf16, fp16 or int8", "--local-steps": "use --defences fedavg=STEPS"}

_PRINTED = {"--print-config": "config.json in the run's folder contains every value"}

FLAGS = {
    **dict.fromkeys(("pretrain", "finetune", "split serve"), _PRINTED),
    "audit gradients": {
        **_STEP,
        "--attack": "use --attacks",
        "--defence": "use --defences",
        "--restarts": "use --seed NUMBER for another random start",
        "--setting": "use --settings",
        "--texts": "use situs audit texts MODEL --data FILE",
        "--find-defence": "use situs audit sweep MODEL --find METRIC=NUMBER",
        "--private-images": "use situs audit sweep MODEL --find METRIC=NUMBER",
        "--private-epochs": "use situs audit sweep MODEL --find METRIC=NUMBER",
    },
    "audit texts": {"--precision": _STEP["--precision"]},
    "audit sweep": {
        **_STEP,
        "--attack": "use --attacks",
        "--defence": "use --defences",
        "--restarts": "use --seed NUMBER for another random start",
        "--texts": "use --data FILE.txt",
        "--find-defence": "use --find METRIC=NUMBER",
    },
    "audit lock": {"--attacker": "use --attacks"},
    "split train": {
        "--defence": "use --defences",
        "--dry-run": "use situs pretrain --dry-run with the same data, backbone and method",
        **_PRINTED,
    },
    "split serve": {"--largest-batch": "the limit is now fixed: 1,024 samples per message"},
    "evaluate probe": {"--weight-decays": "Situs now chooses the weight decay between 1e-5 and 1e-1"},
    "split merge": {"--locked": "use --key FILE; the joined run is then not locked"},
    "export": dict.fromkeys(("--push", "--public"), "use hf upload OWNER/NAME FOLDER; a new repository may be public"),
    "evaluate accuracy": {"--pictures": "use --show IMAGES"},
}
"""verb -> flag -> what replaces it."""
