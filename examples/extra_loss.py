"""MP3 as an extra loss beside your own, in your own loop: python examples/extra_loss.py"""

import torch
from torch.nn.functional import cross_entropy

from situs.backbones import create_backbone
from situs.methods import MP3, Batch, MP3Config, When

images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))  # your data

small = {"depth": 2, "embed_dim": 48, "num_heads": 3}
model = create_backbone("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, model_args=small)
mp3 = MP3(model, MP3Config(mask_ratio=0.5))  # holds your model and adds one linear layer
optimizer = torch.optim.AdamW(mp3.parameters(), lr=1e-3)

losses = []
for epoch in range(5):
    for ids in torch.arange(64).split(16):  # numbers of the samples: a mask depends on (seed, epoch, id)
        batch = Batch(images[ids], ids)
        position = mp3(batch, mp3.draw(batch, When(seed=0, epoch=epoch))).loss
        loss = cross_entropy(model(images[ids]), labels[ids]) + 0.1 * position
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), position.item()))
    print(f"epoch {epoch}: loss {losses[-1][0]:.3f}, of which position {0.1 * losses[-1][1]:.3f}")
