"""An attack of your own, for the gate, the page and the sweep: python examples/own_attack.py

A package declares it in its pyproject.toml: [project.entry-points."situs.attacks"] brightness = "package:Brightness".
The command line takes it from a file: situs audit gradients MODEL --data FOLDER --attacks own_attack.py:Brightness
"""

import argparse
from typing import Any

import timm
import torch

import situs
from situs.audit import ATTACKS, Attack, Recovery
from situs.audit.attacks.base import Ready, Refused
from situs.pages import publish


class Brightness(Attack):
    """Guesses the brightness from the size of the patch embedding's gradient; returns an image of this one grey."""

    name = "brightness"
    about = "one grey for a whole image, by the size of the patch embedding's gradient"
    knows = "the weights before the step"
    difference = "an example that recovers almost nothing"

    def prepare(self, backbone: Any, sent: Any, known: Any) -> Ready | Refused:
        """Whether the attack can run on gradients with these names."""
        reads = [name for name, role in backbone.roles().items() if role.part == "embedding" and name in sent]
        return Ready(tuple(reads)) if reads else Refused("the gradient of the patch embedding is not sent")

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        """A normalised image for each upload, and the attacker's numbers."""
        shape = (backbone.input.channels, *backbone.input.shape)
        sizes = [torch.stack([g.norm() for g in upload.values()]).sum() for upload in uploads]
        images = torch.stack([torch.full(shape, float(size.tanh()) - 0.5) for size in sizes])
        return Recovery(images, [{"size": float(size)} for size in sizes])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="own-attack")
    args = parser.parse_args()
    ATTACKS.add(Brightness)  # from here on Situs knows the attack by its name
    small = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **small, num_classes=10)
    asked: dict[str, Any] = {"count": 5, "fail_above": "psnr=20"}
    audit = situs.audit_gradients(model, "samples", attacks=["brightness", "patchembed"], defences=["none"], **asked)
    print(audit)
    publish(audit, args.out)
