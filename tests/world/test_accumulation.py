"""A batch in 1, 2, 4 or 8 pieces, each loss divided by their number: by hand, accelerate, Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.optim.natural_gradient import WeightOptimizer

N, BATCH, STEPS = 48, 16, 3
OPTIMIZERS = {
    "vogn": tb.VOGN,
    "ogn": tb.OGN,
    "ivon": tb.IVON,
    "kfac": tb.KFAC,
    "noisy-kfac": tb.NoisyKFAC,
}
RANDOM = ("vogn", "ivon", "noisy-kfac")
PIECES = (2, 4, 8)
every = pytest.mark.parametrize("name", OPTIMIZERS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 5, generator=generator, dtype=torch.float64), torch.arange(N) % 3


def make(name: str, model: nn.Module) -> Any:
    options = {"generator": torch.Generator().manual_seed(2)} if name in RANDOM else {}
    return OPTIMIZERS[name](model, 0.02, train_size=N, **options)


def pieces_of(step: int, k: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    rows = slice(BATCH * step, BATCH * (step + 1))
    return list(zip(x[rows].chunk(k), y[rows].chunk(k), strict=True))


class SameDraw:
    """Opens blocks whose draw is the same for all pieces of a step."""

    def __init__(self, optimizer: WeightOptimizer) -> None:
        self.optimizer = optimizer
        self.state: Tensor | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.state is None:
            self.state = self.optimizer.generator.get_state()
        self.optimizer.generator.set_state(self.state)
        with self.optimizer.sampled():
            yield

    def next_step(self) -> None:
        self.state = None


def moments(optimizer: Any) -> dict[str, Tensor]:
    posterior = optimizer.posterior()
    result = {f"mean {key}": value for key, value in posterior.mean().items()}
    if hasattr(posterior, "std"):
        result |= {f"std {key}": value for key, value in posterior.std().items()}
    return result


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], **tolerance: float) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], msg=lambda m, k=key: f"{k}: {m}", **tolerance)


def by_hand(
    name: str, k: int, one_block: bool = False, clip: float | None = None
) -> dict[str, Tensor]:
    model = network()
    optimizer = make(name, model)
    block = SameDraw(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        pieces = pieces_of(step, k)
        if one_block:
            with block():
                for x, y in pieces:
                    (F.cross_entropy(model(x), y) / k).backward()
        else:
            for x, y in pieces:
                with block():
                    (F.cross_entropy(model(x), y) / k).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        block.next_step()
    return moments(optimizer)


@every
@pytest.mark.parametrize("clip", [None, 0.05])
def test_by_hand(name: str, clip: float | None) -> None:
    whole = by_hand(name, 1, clip=clip)
    for k in PIECES:
        assert_close(by_hand(name, k, clip=clip), whole, rtol=1e-9, atol=1e-12)
        assert_close(by_hand(name, k, one_block=True, clip=clip), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [tb.MAP, tb.SGLD, tb.SGHMC])
def test_methods_without_draws(method: Callable[..., Any]) -> None:
    results = []
    for k in (1, *PIECES):
        model = network()
        options = {} if method is tb.MAP else {"generator": torch.Generator().manual_seed(2)}
        optimizer = method(model, 1e-4, train_size=N, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for x, y in pieces_of(step, k):
                (F.cross_entropy(model(x), y) / k).backward()
            optimizer.step()
        results.append({key: p.detach().clone() for key, p in model.named_parameters()})
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-9, atol=1e-12)


@every
def test_pieces_of_different_sizes_have_their_share(name: str) -> None:
    results = []
    for sizes in ([16], [10, 5, 1]):
        model = network()
        optimizer = make(name, model)
        block = SameDraw(optimizer)
        for step in range(STEPS):
            (x, y), *_ = pieces_of(step, 1)
            optimizer.zero_grad()
            for part, wanted in zip(x.split(sizes), y.split(sizes), strict=True):
                with block():
                    (F.cross_entropy(model(part), wanted) * len(part) / BATCH).backward()
            optimizer.step()
            block.next_step()
        results.append(moments(optimizer))
    assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["vogn", "ogn"])
def test_squares_of_unequal_pieces_have_the_weights_of_their_losses(name: str) -> None:
    """Losses that are all divided by k give an example the weight 1/(k·size)."""
    model = network()
    x, y = data()
    optimizer = make(name, model)
    sizes = (10, 5, 1)
    weights = torch.cat([torch.full((n,), 1 / (3 * n), dtype=torch.float64) for n in sizes])
    first, second = [], []
    for i in range(16):
        (g,) = torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model[3].bias
        )
        first.append(g)
        second.append(g.square())
    wanted = (weights.square()[:, None] * torch.stack(second)).sum(0) / weights.square().sum()
    optimizer.zero_grad()
    for part, labels in zip(x[:16].split(sizes), y[:16].split(sizes), strict=True):
        with optimizer.sampled():
            (F.cross_entropy(model(part), labels) / 3).backward()
    gradient = (weights[:, None] * torch.stack(first)).sum(0)
    torch.testing.assert_close(model[3].bias.grad, gradient, rtol=1e-9, atol=1e-12)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[model[3].bias]["precision"], wanted)


@every
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_over_all_blocks(name: str, unscale: bool) -> None:
    model = network()
    optimizer = make(name, model)
    block = SameDraw(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in pieces_of(step, 4):
            with block():
                scaler.scale(F.cross_entropy(model(x), y) / 4).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        block.next_step()
    wanted = by_hand(name, 1, clip=0.05 if unscale else None)
    assert_close(moments(optimizer), wanted, rtol=1e-9, atol=1e-12)


@every
@pytest.mark.parametrize("one_block", [False, True])
def test_losses_that_are_not_divided_are_refused(name: str, one_block: bool) -> None:
    model = network()
    optimizer = make(name, model)
    (x, y), (x2, y2) = pieces_of(0, 2)
    refused = pytest.raises(ValueError, match=r"weigh 2 in all.*divide each piece's loss")
    if one_block:
        with refused, optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
            F.cross_entropy(model(x2), y2).backward()
    else:
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        with refused, optimizer.sampled():
            F.cross_entropy(model(x2), y2).backward()
    assert all(p.grad is None for p in model.parameters())
    with optimizer.sampled():  # the step starts anew
        F.cross_entropy(model(x), y).backward()
    optimizer.step()


@every
def test_cleared_gradients_do_not_count(name: str) -> None:
    """As in torch: zero_grad() discards, and the user hears of it if that was in a later block."""
    model = network()
    optimizer = make(name, model)
    (x, y), (x2, y2) = pieces_of(0, 2)
    block = SameDraw(optimizer)
    with block():
        F.cross_entropy(model(x2), y2).backward()
    for clear in (optimizer.zero_grad, model.zero_grad):
        clear()
        with block():
            F.cross_entropy(model(x), y).backward()
    with block():
        with pytest.warns(UserWarning, match="clears the gradients of earlier blocks"):
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
    with block():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    alone = network()
    other = make(name, alone)
    with other.sampled():
        F.cross_entropy(alone(x), y).backward()
    other.step()
    assert_close(moments(optimizer), moments(other), rtol=1e-9, atol=1e-12)


@every
def test_gradients_from_outside_are_noticed(name: str) -> None:
    """A forgotten zero_grad(), or pieces whose backward pass ran outside a block."""
    model = network()
    optimizer = make(name, model)
    (x, y), *_ = pieces_of(0, 1)
    (F.cross_entropy(model(x), y) / 2).backward()
    block = optimizer.sampled()
    block.__enter__()
    (F.cross_entropy(model(x), y) / 2).backward()
    with pytest.warns(UserWarning, match=r"gradient of '0.weight' from before .* was not cleared"):
        block.__exit__(None, None, None)
    optimizer.step()
    for clear in (optimizer.zero_grad, model.zero_grad):
        with optimizer.sampled():
            clear()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with optimizer.sampled():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_losses_that_are_divided_twice_are_noticed(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    for x, y in pieces_of(0, 4):
        with optimizer.sampled():
            (F.cross_entropy(model(x), y) / 4 / 4).backward()
    with pytest.warns(UserWarning, match=r"weigh 0.25 in all, as if each was divided twice"):
        optimizer.step()


def test_terms_of_one_loss_may_be_differentiated_one_by_one() -> None:
    model = network()
    optimizer = make("ivon", model)
    (x, y), *_ = pieces_of(0, 1)
    with optimizer.sampled():
        outputs = model(x)
        F.cross_entropy(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
    optimizer.step()


def test_gradients_of_inputs_alone_are_no_piece() -> None:
    """An adversarial example, found by backward passes inside the block."""
    model = network()
    optimizer = make("ivon", model)
    (x, y), *_ = pieces_of(0, 1)
    with optimizer.sampled():
        attacked = x.clone().requires_grad_()
        for _ in range(3):
            F.cross_entropy(model(attacked), y).backward(inputs=[attacked])
        F.cross_entropy(model(attacked.detach()), y).backward(torch.tensor(1.0))
    optimizer.step()


@every
def test_accelerate(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    results = []
    for k in (1, *PIECES):
        model = network()
        optimizer = make(name, model)
        block = SameDraw(optimizer)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=k)
        prepared, stepper = accelerator.prepare(model, optimizer)
        for step in range(STEPS):
            for x, y in pieces_of(step, k):
                with accelerator.accumulate(prepared), block():
                    accelerator.backward(F.cross_entropy(prepared(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
                stepper.step()
                stepper.zero_grad()
            block.next_step()
        results.append(moments(optimizer))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-9, atol=1e-12)


class WithLoss(nn.Module):
    """A model of the kind that Trainer takes: its output has the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Normalised(WithLoss):
    """One that divides a sum by the number of labels in all pieces, as those of transformers do."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.network(x)
        loss = F.cross_entropy(logits, labels, reduction="sum") / kwargs["num_items_in_batch"]
        return {"loss": loss, "logits": logits}


def through_trainer(name: str, kind: type[nn.Module], k: int, folder: Path) -> dict[str, Tensor]:
    from transformers import Trainer, TrainingArguments

    class BayesianTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with block():
                return super().training_step(*args, **kwargs)

    model = kind()
    optimizer = make(name, model)
    block = SameDraw(optimizer)
    inner_step = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        block.next_step()
        return inner_step(*args, **kwargs)

    optimizer.step = step
    x, y = data()
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH // k, gradient_accumulation_steps=k,
        num_train_epochs=1, max_grad_norm=0.05, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no", seed=3,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"x": x[i], "labels": y[i]} for i in range(N)]
    trainer = BayesianTrainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return moments(optimizer)


def through_trainer_with_bert(
    name: str, k: int, folder: Path, divides: bool = True
) -> dict[str, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class BayesianTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with optimizer.sampled():
                return super().training_step(*args, **kwargs)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    optimizer = OPTIMIZERS[name](model, 0.01, train_size=N)
    ids = torch.randint(30, (N, 6), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": int(row[0] > 14)} for row in ids]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH // k, gradient_accumulation_steps=k,
        num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = BayesianTrainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    if divides:
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return moments(optimizer)


@pytest.mark.parametrize("name", ["ogn", "kfac"])
def test_trainer_with_bert(name: str, tmp_path: Path) -> None:
    """Without noise, pieces need no common draw."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    whole = through_trainer_with_bert(name, 1, tmp_path)
    assert_close(through_trainer_with_bert(name, 4, tmp_path), whole, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_trainer_that_does_not_divide_is_noticed(name: str, tmp_path: Path) -> None:
    """It leaves that to BERT, which takes the number of labels but not the hint."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=r"weigh 2 in all.*model_accepts_loss_kwargs = False"):
        through_trainer_with_bert(name, 4, tmp_path, divides=False)


@every
@pytest.mark.parametrize("kind", [WithLoss, Normalised])
def test_trainer(name: str, kind: type[nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    whole = through_trainer(name, kind, 1, tmp_path)
    for k in PIECES:
        assert_close(through_trainer(name, kind, k, tmp_path), whole, rtol=1e-9, atol=1e-12)


@every
def test_a_closure_after_blocks_is_the_last_piece(name: str) -> None:
    """As Lightning does it: only the last piece is computed by the closure of the step."""
    model = network()
    optimizer = make(name, model)
    block = SameDraw(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        *first, (last_x, last_y) = pieces_of(step, 4)
        for x, y in first:
            with block():
                (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.generator.set_state(block.state)

        def closure(x: Tensor = last_x, y: Tensor = last_y) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()
            return loss

        optimizer.step(closure)
        block.next_step()
    assert_close(moments(optimizer), by_hand(name, 1), rtol=1e-9, atol=1e-12)


def test_several_draws_cannot_join_earlier_blocks() -> None:
    model = network()
    optimizer = tb.IVON(model, train_size=N, mc_samples=2)
    (x, y), *_ = pieces_of(0, 2)
    with optimizer.sampled():
        (F.cross_entropy(model(x), y) / 2).backward()
    with pytest.raises(RuntimeError, match="mc_samples=1"):
        optimizer.step(lambda: F.cross_entropy(model(x), y).backward())
