"""MP3 as an extra loss in a Lightning module: python examples/extra_loss_lightning.py (needs lightning)"""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from situs.backbones import create_backbone
from situs.methods import MP3, Batch, MP3Config, When

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


class WithPositions(lightning.LightningModule):
    """Your module with an extra loss in its step."""

    def __init__(self) -> None:
        super().__init__()
        model = create_backbone("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, model_args=SMALL)
        self.mp3 = MP3(model, MP3Config(mask_ratio=0.5))  # holds your model and adds one linear layer
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, rows: list[torch.Tensor], _: int) -> torch.Tensor:
        pixels, ids, labels = rows
        self.seen.append((self.current_epoch, ids.tolist()))
        batch = Batch(pixels, ids)  # a sample's mask depends on (seed, epoch, id)
        position = self.mp3(batch, self.mp3.draw(batch, When(seed=0, epoch=self.current_epoch))).loss
        return cross_entropy(self.mp3.backbone(pixels), labels) + 0.1 * position

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


def train(model: WithPositions, images: torch.Tensor, labels: torch.Tensor, folder: str) -> None:
    rows = DataLoader(TensorDataset(images, torch.arange(len(images)), labels), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    train(WithPositions(), torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), ".")
