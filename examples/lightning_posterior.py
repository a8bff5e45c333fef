"""Train any network into a posterior with Lightning's Trainer.

Run: python examples/lightning_posterior.py        (needs: pip install 'torchbayes[lightning]')
"""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchbayes as tb
from torchbayes.integrations.lightning import BayesianModule
from torchbayes.models import mlp


def main(path: Path = Path("posterior.safetensors")) -> None:
    data = tb.load_data("digits")
    train_set = TensorDataset(data.train.inputs, data.train.targets)
    test_set = TensorDataset(data.test.inputs, data.test.targets)
    module = BayesianModule(mlp(64, num_classes=10, hidden=(64,)), tb.IVON, lr=0.1)
    trainer = lightning.Trainer(
        max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(train_set, 64, shuffle=True))
    module.posterior.save(path)
    predictions = trainer.predict(module, DataLoader(test_set, 256))
    correct = torch.cat([p.prediction for p in predictions]) == data.test.targets
    print(f"{correct.float().mean():.1%} test accuracy; the posterior is in {path}")


if __name__ == "__main__":
    main()
