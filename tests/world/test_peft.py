"""LoRA on a small Hugging Face network with random weights: its posterior holds the adapters alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS, LENGTH = 12, 6


class Logits(nn.Module):
    """Passes on the tensor that the network's output has inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens).logits
        return logits


def adapted(seed: int = 0) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        base = transformers.BertForSequenceClassification(config)
        for p in base.parameters():  # as large as if they had been trained
            if p.dim() > 1:
                nn.init.normal_(p, std=0.3)
        torch.manual_seed(seed + 1)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        return Logits(peft.get_peft_model(base, lora))


def task(count: int = 48) -> tuple[Tensor, Tensor]:
    """Sequences with and without the token 3."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, TOKENS, (count, LENGTH), generator=generator)
    labels = torch.arange(count) % 2
    tokens[labels == 1, 2] = 3
    return tokens, labels


TRAINED = (
    2 * 2 * 2 * (2 * 16) + 2 * 16 + 2
)  # two layers' query and value, A and B of rank 2; classifier


def weights_in(posterior: tb.Posterior) -> int:
    return sum(torch.Size(shape).numel() for shape in posterior._shapes().values())


def drawn(step: Callable[..., Any], model: nn.Module) -> Any:
    """Train by hand with an optimiser that draws."""
    optimizer = step(model)
    tokens, labels = task()
    for _ in range(4):
        with optimizer.sampled():
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    return optimizer.posterior()


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, keep: Callable[[], None]) -> None:
    """Train by hand with any optimiser."""
    tokens, labels = task()
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        keep()


def sampled(model: nn.Module) -> tb.Posterior:
    bank = tb.Samples(model)
    stepped(tb.SGLD(model, train_size=48), model, bank.append)
    return bank


def averaged(model: nn.Module) -> tb.Posterior:
    averager = tb.SWAG(model, rank=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    stepped(torch.optim.SGD(trained, lr=0.1), model, averager.update)
    return averager.posterior()


BY_HAND: dict[str, Callable[[nn.Module], Any]] = {
    "ivon": lambda model: drawn(lambda m: tb.IVON(m, train_size=48), model),
    "vogn": lambda model: drawn(lambda m: tb.VOGN(m, train_size=48), model),
    "noisy-kfac": lambda model: drawn(lambda m: tb.NoisyKFAC(m, train_size=48), model),
    "sgld": sampled,
    "swag": averaged,
}


def predicted(model: nn.Module, posterior: tb.Posterior) -> Tensor:
    seed = torch.Generator().manual_seed(1)
    probs: Tensor = tb.predictive(model, posterior, task()[0], 4, generator=seed).probs  # type: ignore[attr-defined]
    return probs


def check_small_and_usable(posterior: tb.Posterior, model: nn.Module, path: Path) -> None:
    assert weights_in(posterior) == TRAINED < 0.1 * sum(p.numel() for p in model.parameters())
    posterior.save(path)
    fresh = adapted()
    assert torch.equal(predicted(fresh, tb.load(path, fresh)), predicted(model, posterior))
    # Without the wrapper around it, and with the whole wrapped once more.
    assert list(tb.snapshot(fresh)) != list(posterior.mean())
    with pytest.raises(ValueError, match=r"fits its module 'net', so pass model\.net"):
        tb.Point(tb.snapshot(fresh.net)).check(fresh)
    with pytest.raises(ValueError, match="the rest of the network is not the one"):
        tb.load(path, adapted(seed=7))


@pytest.mark.parametrize("method", list(BY_HAND))
def test_by_hand(method: str, tmp_path: Path) -> None:
    model = adapted()
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    torch.manual_seed(0)
    posterior = BY_HAND[method](model)
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
    check_small_and_usable(posterior, model, tmp_path / "q.safetensors")


@pytest.mark.parametrize("method", ["ivon", "vogn", "sgld", "swag"])
def test_through_fit(method: str, tmp_path: Path) -> None:
    model = adapted()
    before = tb.snapshot(model)
    run = tb.fit(
        model, task(), method, params=["*lora_*", "*classifier*"], epochs=3, batch_size=16,
        progress=False,
    )  # fmt: skip
    assert all(torch.equal(tensor, before[name]) for name, tensor in tb.snapshot(model).items())
    check_small_and_usable(run.posterior, run.model, tmp_path / "q.safetensors")
    only = tb.fit(model, task(), method, params="*lora_*", epochs=1, progress=False).posterior
    assert weights_in(only) == TRAINED - 34
    assert all("lora_" in name for name in only.mean())


def test_the_adapters_learn_the_task() -> None:
    tokens, labels = task(200)
    run = tb.fit(
        adapted(), (tokens, labels), "ivon", params=["*lora_*", "*classifier*"], epochs=20,
        batch_size=16, lr=0.1, progress=False,
    )  # fmt: skip
    assert (run.predict(tokens).prediction == labels).float().mean() > 0.9  # type: ignore[attr-defined]


def test_laplace_is_over_the_adapters() -> None:
    tokens, labels = task()
    net = adapted().net
    data = {"input_ids": tokens, "labels": labels}
    la = tb.Laplace(net, data, tb.Categorical(), check=False)
    assert la.names
    assert all("lora_" in name or "classifier" in name for name in la.names)
    p = la.predictive({"input_ids": tokens}, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(p.probs.sum(1), torch.ones(len(tokens)))
    # The same as through a module that passes on the logits.
    plain = tb.Laplace(adapted(), (tokens, labels), tb.Categorical(), check=False)
    assert torch.equal(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    assert tb.Laplace(net, data, subset="last_layer", check=False).names
