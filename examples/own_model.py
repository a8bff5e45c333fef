"""Your own model and your own loop: two changed lines.

Run: python examples/own_model.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb


class Digits(nn.Module):
    """Any module will do: this one mixes convolution, batch norm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        grid = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2).flatten(2).transpose(1, 2)
        return self.head((grid + self.attention(grid, grid, grid)[0]).amax(1))


def main() -> None:
    torch.manual_seed(0)
    data = tb.load_data("digits")
    train_set = TensorDataset(data.train.inputs, data.train.targets)
    model = Digits()
    optimizer = tb.IVON(model, lr=0.2, train_size=len(train_set))  # was torch.optim.AdamW(…)
    for _ in range(30):
        for images, labels in DataLoader(train_set, 64, shuffle=True):
            with optimizer.sampled():  # new: the step sees a draw of the weights
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    # Batch norm: every draw gets statistics of its own.
    p = tb.predictive(
        model,
        optimizer.posterior(),
        data.test.inputs,
        samples=16,
        recalibrate=DataLoader(train_set, 256),
    )
    print(f"{(p.prediction == data.test.targets).float().mean():.1%} test accuracy")
    doubtful = int(p.epistemic.argmax())
    print(
        f"most uncertain: test image {doubtful}, {float(p.epistemic[doubtful]):.2f} nats of disagreement"
    )


if __name__ == "__main__":
    main()
