"""MP3 as an extra loss in the Hugging Face Trainer: python examples/extra_loss_trainer.py (needs accelerate)"""

import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from situs.backbones import create_backbone
from situs.methods import MP3, Batch, MP3Config, When

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


class WithPositions(nn.Module):
    """Your model and MP3's head. It returns the sum of both losses; the Trainer needs nothing else."""

    def __init__(self) -> None:
        super().__init__()
        model = create_backbone("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, model_args=SMALL)
        self.mp3 = MP3(model, MP3Config(mask_ratio=0.5))  # holds your model and adds one linear layer
        self.epoch = 0
        self.seen: list[tuple[int, list[int]]] = []

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append((self.epoch, ids.tolist()))
        batch = Batch(pixels, ids)  # a sample's mask depends on (seed, epoch, id)
        position = self.mp3(batch, self.mp3.draw(batch, When(seed=0, epoch=self.epoch))).loss
        logits = self.mp3.backbone(pixels)
        return {"loss": cross_entropy(logits, labels) + 0.1 * position, "logits": logits}


class TellEpoch(TrainerCallback):
    """Draws new masks in every epoch."""

    def on_epoch_begin(self, args, state, control, model=None, **_) -> None:  # noqa: ANN001, ANN003
        model.epoch = round(state.epoch or 0)


def train(model: WithPositions, images: torch.Tensor, labels: torch.Tensor, folder: str) -> None:
    rows = [{"pixels": images[i], "ids": torch.tensor(i), "labels": labels[i]} for i in range(len(images))]
    settings = TrainingArguments(
        folder, num_train_epochs=3, per_device_train_batch_size=16, learning_rate=1e-3, lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, settings, train_dataset=rows, callbacks=[TellEpoch()]).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        train(WithPositions(), torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), folder)
