"""What a pass needs beside the attacks that were asked for: the labels with the largest gradient, and the oracle.

Both are tried only where no attack is above what a blind guess has: they cost more than the attacks, and could not
change any other verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from situs.audit.cases import Case, ImageFinding, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Step
from situs.audit.engine import Client, trials_of
from situs.audit.oracle import Oracle, estimate
from situs.audit.run import take_turns
from situs.audit.scores.exposure import Blind, too_few
from situs.audit.scores.metrics import denormalise
from situs.audit.scores.scoring import Scores, closer, extend, measure
from situs.backbones.base import Backbone
from situs.errors import counted
from situs.findings import Remark
from situs.gate import exposed, hold
from situs.methods.base import Batch, Method

IMAGES = 4
"""The oracle is asked about so many images, those that came nearest to a limit."""


def consult(
    model: Backbone | Method,
    test: TestSet,
    findings: Sequence[ImageFinding],
    blind: Blind,
    step: Step,
    deadline: Deadline,
) -> Iterator[ImageFinding]:
    """What a pass needs beside the findings, for each defence with noise under which nothing is above; a later one of a
    case takes the place of those before."""
    if too_few(len(test), step.batch):
        return
    for defence in dict.fromkeys(each.case.defence for each in findings):
        pairs = [each for each in findings if each.case.defence == defence and each.attacked]
        proved = any(each.closed and each.why("doubt") is None for each in pairs)  # else nothing could pass
        if not proved or any(exposed(each) for each in pairs) or deadline.spent():
            continue
        harder = [Case("", model, defence, each.case.attack, hardest=True, batch=step.batch) for each in pairs]
        tried: dict[Case, ImageFinding] = {}
        for each in take_turns(trials_of(harder, test, step), deadline):
            assert isinstance(each, ImageFinding)
            tried[each.case] = each.against(blind, test.names)
            yield tried[each.case]
        if any(exposed(each) for each in tried.values()):
            continue
        for hardest in (False, True):
            case = Case("", model, defence, Oracle(), hardest=hardest, batch=step.batch)
            asked = _ask(case, test, [*pairs, *tried.values()], blind, step, deadline)
            yield asked
            if exposed(asked):
                break


def _ask(
    case: Case, test: TestSet, pairs: Sequence[ImageFinding], blind: Blind, step: Step, deadline: Deadline
) -> ImageFinding:
    """What the oracle has of the images that came nearest to a limit."""
    client, size = Client(case, test, step, None), case.defence.step(step).batch
    best = torch.full((len(test),), -torch.inf)
    for pair in pairs:
        places = dict(zip(pair.samples, pair.numbers, strict=True))
        for one in hold(pair):
            if one.limit is not None:
                number = places[one.exposure.sample]
                best[number] = max(float(best[number]), one.excess)
    uploads = best.view(-1, size).amax(dim=1).argsort(descending=True)[: max(1, IMAGES // size)].tolist()
    numbers: list[int] = []
    scores: Scores = {}
    ended, over = True, False
    for at, upload in enumerate(uploads):
        deadline.say(f"{case.defence.label}: the oracle, upload {at + 1} of {len(uploads)}")
        deadline.begin(len(uploads) - at)
        here = slice(upload * size, (upload + 1) * size)

        def scored(images: Tensor, here: slice = here) -> Scores:
            pictures = denormalise(images, *test.normalisation, clip=False)
            return measure(pictures, test.real(), case.backbone, None, here.start)

        def enough(images: Tensor, here: slice = here, scored: Callable[[Tensor], Scores] = scored) -> bool:
            values = scored(images)
            part = case.finding("done", range(here.start, here.stop), scores=values | {"reidentified": None})
            return bool(exposed(part.against(blind, test.names)))

        x, y = client.pixels[here], client.labels[here]
        batch = Batch(x, torch.arange(here.start, here.stop, device=x.device), {"label": y})
        draws = client.method.draw(batch, client.step.when._replace(seed=client.step.seed))
        known = replace(client.known(True, upload), labels=None)
        result = estimate(client.method, client.upload(upload), x, y, draws, known, enough, deadline.over)
        numbers += range(here.start, here.stop)
        extend(scores, reduce(closer, map(scored, result.pictures)))
        ended = ended and result.ended
        over = bool(exposed(case.finding("done", numbers, scores=scores).against(blind, test.names)))
        if over or not ended or deadline.spent():
            break
    whole = ended and (over or len(numbers) == len(uploads) * size)
    partial = f"{len(numbers)} of {counted(len(uploads) * size, test.things)}, or before its end"
    remarks = [] if whole else [Remark("stopped", partial)]
    asked = case.finding("done" if whole else "stopped", numbers, scores=scores, remarks=remarks)
    return asked.against(blind, test.names)
