"""LoRA with uncertainty: a Gaussian over the adapters of a Hugging Face network, in a file of their size.

Run: python examples/lora.py (with transformers and peft installed)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import torchbayes as tb


class Classifier(nn.Module):
    """A small BERT with adapters, whose output is the tensor of logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=64, max_position_embeddings=8)  # fmt: skip
        bert = BertForSequenceClassification(config)
        for weight in (w for w in bert.parameters() if w.dim() > 1):
            nn.init.normal_(weight, std=0.25)  # stands for a download
        lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        self.bert = get_peft_model(bert, lora)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sentences of eight words, and whether the word 3 is one of them."""
    words = torch.randint(4, 32, (count, 8), generator=torch.Generator().manual_seed(seed))
    words[1::2, 5] = 3
    return words, torch.arange(count) % 2


def main() -> None:
    run = tb.fit(
        Classifier(), sentences(400, 0), "vogn", params=["*lora_*", "*classifier*"], lr=0.01,
        epochs=20, batch_size=16, progress=False,
    )  # fmt: skip
    network = Classifier()  # as another program would make it: the same base, new adapters
    with tempfile.TemporaryDirectory() as folder:
        run.posterior.save(file := Path(folder) / "posterior.safetensors")
        posterior = tb.load(file, network)
        print(f"{file.stat().st_size / 1000:.0f} kB on disk: {posterior}")
    words, labels = sentences(500, 1)
    p = tb.predictive(network, posterior, words)
    print(f"{(p.prediction == labels).float().mean():.1%} test accuracy")


if __name__ == "__main__":
    main()
