"""A network that is already trained: a posterior for its last layer, and what it knows about strange inputs.

Run: python examples/trained_network.py          (about 20 seconds)

The network is a small residual one with batch norm, as a model zoo would give it, and too sure of itself.
Nothing of it is trained again: Laplace goes through the training data once.
"""

import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes import metrics


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def main() -> None:
    torch.manual_seed(0)
    data = tb.load_data("digits", validation=0.2)
    noise = 0.5 * data.train.inputs.std()
    train, held_out, (test, targets) = (
        ((part.inputs + noise * torch.randn_like(part.inputs)).view(-1, 1, 8, 8), part.targets)
        for part in (data.train, data.validation, data.test)
    )
    strange = test.flip(2).roll(4, dims=3)  # no digits any more

    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    end = nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    model = nn.Sequential(*stem, Block(16), Block(16), *end)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for rows in (rows for _ in range(30) for rows in torch.randperm(len(train[0])).split(64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
    model.eval()

    la = tb.Laplace(model, train, subset="last_layer", structure="kronecker")
    la.optimize_prior("validation", validation=held_out)
    alone = [tb.predictive(model, tb.Point(tb.snapshot(model)), x) for x in (test, strange)]
    after = [la.predictive(x, generator=torch.Generator().manual_seed(0)) for x in (test, strange)]
    for name, (known, other) in {"trained network": alone, "with Laplace": after}.items():
        right, nll = (known.prediction == targets).float().mean(), -known.log_prob(targets).mean()
        auroc = metrics.auroc(known.entropy, other.entropy)
        print(f"{name}: {right:.1%} right, NLL {nll:.4f}, AUROC {auroc:.4f} for strange inputs")


if __name__ == "__main__":
    main()
