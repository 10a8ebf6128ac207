"""A site of the NVFlare job: one step of SGD on one image, with noise on the weights."""

import argparse

import nvflare.client as flare
import torch
from net import Net
from torch.nn import functional as F

from situs.data.sources.samples import load_samples

parser = argparse.ArgumentParser()
parser.add_argument("--noise", type=float)
noise = parser.parse_args().noise
flare.init()
number = int(flare.get_site_name()[-1])
while flare.is_running():
    task = flare.receive()
    if task is None:
        break
    model = Net()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in task.params.items()})
    image = load_samples().images[number].view(1, 1, 28, 28) / 255 * 2 - 1
    F.cross_entropy(model(image), torch.tensor([number])).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": 0.0}))
