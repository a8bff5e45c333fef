"""Where does averaging land? The loss landscape around a mean field's training path, with HWA's average.

Run: python examples/landscape.py            (writes docs/images/landscape.png)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from figures.landscape import landscape, landscape_figure, pca_plane

import torchbayes as tb
from torchbayes.data.transform import Normalise
from torchbayes.models import mlp
from torchbayes.train.schedule import Schedule

EPOCHS, CYCLES, BATCH = 24, 8, 64


def main(path: Path) -> None:
    torch.manual_seed(0)
    data = tb.load_data("digits")
    normalise = Normalise(data.mean, data.std)
    train, test = ((normalise(s.inputs), s.targets) for s in (data.train, data.test))
    net = tb.MeanField(mlp(64, hidden=(100,)), prior=tb.GaussianPrior(precision=10.0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)

    def epoch(scheduler: torch.optim.lr_scheduler.LRScheduler | None = None) -> None:
        for chosen in torch.randperm(len(train[0])).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(train[0][chosen]), train[1][chosen])
            (loss + net.kl() / len(train[0])).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    for _ in range(6):
        epoch()
    hwa, path_means, ends = tb.HWA(net), [net.posterior().mean()], []
    steps = -(-len(train[0]) // BATCH)
    scheduler = Schedule("cyclic", cycles=CYCLES, low=0.05).build(optimizer, EPOCHS, steps)
    for number in range(EPOCHS):
        epoch(scheduler)
        path_means.append(net.posterior().mean())
        if (number + 1) % (EPOCHS // CYCLES) == 0:
            hwa.update()
            ends.append(number + 1)
    average = hwa.posterior().mean()
    plane = pca_plane(path_means, dict(net.model.named_parameters()))
    surface = landscape(net, plane, [*path_means, average], [train], [test], points=25)
    figure = landscape_figure(surface, path_means, ends, {"HWA": average})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images/landscape.png"))
