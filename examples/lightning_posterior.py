"""Train a Lightning module into a posterior: one changed line, and a callback that saves the result.

Run: python examples/lightning_posterior.py        (needs: pip install 'torchbayes[lightning]')
"""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.models import mlp


class Digits(lightning.LightningModule):
    """An ordinary Lightning module."""

    def __init__(self, train_size: int) -> None:
        super().__init__()
        self.net, self.train_size = mlp(64, num_classes=10, hidden=(64,)), train_size

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tb.IVON(self.net, lr=0.1, train_size=self.train_size)  # was torch.optim.AdamW(…)


class SavePosterior(lightning.Callback):
    """Save the posterior when training ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        trainer.optimizers[0].posterior().save(self.path)


def main(path: Path = Path("posterior.safetensors")) -> None:
    data = tb.load_data("digits")
    train_set = TensorDataset(data.train.inputs, data.train.targets)
    module = Digits(len(train_set))
    trainer = lightning.Trainer(
        max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[SavePosterior(path)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(train_set, 64, shuffle=True))
    p = tb.predictive(module.net, tb.load(path, module.net), data.test.inputs)
    print(f"{(p.prediction == data.test.targets).float().mean():.1%} test accuracy")


if __name__ == "__main__":
    main()
