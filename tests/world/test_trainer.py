"""Hugging Face's Trainer and ours: samplers, averages, draws, pieces, LoRA, resuming."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbayes as tb
from torchbayes.core.errors import RunError
from torchbayes.train.checkpoint import read_state

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torchbayes.integrations.huggingface import BayesianTrainerMixin, PosteriorCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

N, BATCH, WORDS = 48, 16, 20
IDS = torch.randint(WORDS, (N, 6), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": int(row[0] > 9)} for row in IDS]


class BayesianTrainer(BayesianTrainerMixin, transformers.Trainer):
    pass


def bert(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()  # type: ignore[no-any-return]


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return peft.get_peft_model(bert(), config)  # type: ignore[no-any-return]


def arguments(folder: Path, pieces: int = 1, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // pieces, "gradient_accumulation_steps": pieces,
        "num_train_epochs": 4, "use_cpu": True, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **(settings | options))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def numbers(posterior: tb.Posterior) -> dict[str, Tensor]:
    if isinstance(posterior, tb.Samples):
        return {f"{i} {k}": v for i, draw in enumerate(posterior) for k, v in draw.items()}
    result = {f"mean {k}": v for k, v in posterior.mean().items()}
    if hasattr(posterior, "std"):
        result |= {f"std {k}": v for k, v in posterior.std().items()}
    return result


def assert_close(one: tb.Posterior, two: tb.Posterior, **tolerance: float) -> None:
    left, right = numbers(one), numbers(two)
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(
            value, right[key], **(tolerance or {"rtol": 0.0, "atol": 0.0}),
            msg=lambda text, key=key: f"{key}: {text}",
        )  # fmt: skip


def trained(
    folder: Path, method: Any, options: dict[str, Any], pieces: int = 1, **more: Any
) -> Any:
    model = bert()
    trainer = BayesianTrainer(
        model, arguments(folder, pieces, **more), train_dataset=ROWS,
        optimizer_cls_and_kwargs=(method, options),
    )  # fmt: skip
    trainer.train()
    return trainer


# -- In pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [tb.OGN, tb.KFAC, tb.MAP])
def test_pieces_end_in_the_same_posterior(method: Any, tmp_path: Path) -> None:
    """Without noise; BERT takes the number of labels in all pieces and does not divide by it."""
    options = {"lr": 0.01} | ({"optimizer": "sgd"} if method is tb.MAP else {})
    whole = trained(tmp_path, method, options)
    assert whole.optimizer.param_groups[0]["train_size"] == N
    for pieces in (2, 4):
        posterior = trained(tmp_path, method, options, pieces).posterior()
        assert_close(posterior, whole.posterior(), rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", [tb.IVON, tb.VOGN, tb.NoisyKFAC])
def test_gradients_are_taken_at_draws(method: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path, method, {}, 4)
    assert trainer.state.global_step == 12
    posterior = trainer.posterior()
    assert all(torch.isfinite(value).all() for value in posterior.sample().values())
    p = trainer.predictive(ROWS, samples=4)
    assert p.probs.shape == (N, 2)


def test_a_samplers_gradients_are_of_the_mean_and_not_clipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same noise, pieces give the same chain; clipping to 1e-6 would stop it."""
    options = {"lr": 1e-4, "prior": 1.0}
    with caplog.at_level(logging.WARNING, "torchbayes"):
        whole = trained(
            tmp_path, tb.SGLD, options | {"generator": seeded()}, max_grad_norm=1e-6
        ).posterior()
    assert "max_grad_norm is 1e-06" in caplog.text
    free = trained(tmp_path, tb.SGLD, options | {"generator": seeded()}, max_grad_norm=0.0)
    assert_close(whole, free.posterior())
    pieces = trained(tmp_path, tb.SGLD, options | {"generator": seeded()}, 4).posterior()
    assert len(whole) == 6  # half of 12 updates
    assert_close(pieces, whole, rtol=1e-6, atol=1e-8)


def test_predictions_average_over_the_posterior(tmp_path: Path) -> None:
    trainer = trained(tmp_path, tb.SGLD, {"lr": 1e-4})
    twin, probs = bert().eval(), []
    for draw in trainer.posterior():
        twin.load_state_dict(draw, strict=False)
        with torch.no_grad():
            probs.append(twin(input_ids=IDS).logits.softmax(1))
    p = trainer.predictive(ROWS)
    torch.testing.assert_close(p.probs, torch.stack(probs).mean(0), rtol=1e-4, atol=1e-6)


# -- Resuming -----------------------------------------------------------------------------------------


def ivon(model: nn.Module) -> tuple[Any, PosteriorCallback]:
    return tb.IVON(model, 0.1, train_size=N, generator=seeded()), PosteriorCallback()


def sgld(model: nn.Module) -> tuple[Any, PosteriorCallback]:
    return tb.SGLD(model, 1e-4, train_size=N, generator=seeded()), PosteriorCallback(burn_in=0.2)


def swag(model: nn.Module) -> tuple[Any, PosteriorCallback]:
    trained = [p for p in model.parameters() if p.requires_grad]
    averager = tb.SWAG(model, rank=2)
    return torch.optim.SGD(trained, 0.1), PosteriorCallback(averager, burn_in=0.2)


@pytest.mark.parametrize("make", [ivon, sgld, swag])
@pytest.mark.parametrize("network", [lambda: bert(0.1), lora], ids=["bert", "lora"])
@pytest.mark.parametrize("steps", [6, 7], ids=["epoch", "middle"])
def test_a_resumed_trainer_is_bit_equal(
    make: Callable[..., Any], network: Callable[[], nn.Module], steps: int, tmp_path: Path
) -> None:
    """With dropout and shuffled data, from the end of an epoch and from the middle of one."""

    def run(folder: Path, resume: Path | None = None) -> Any:
        model = network()
        optimizer, callback = make(model)
        settings = arguments(folder, save_strategy="steps", save_steps=steps)
        trainer = BayesianTrainer(
            model, settings, train_dataset=ROWS, optimizers=(optimizer, None), callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = run(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / f"checkpoint-{steps}"
    assert (checkpoint / "torchbayes.safetensors").is_file()
    # In another folder: the mixin tells the callback where the checkpoint is.
    resumed = run(tmp_path / "resumed", checkpoint)
    assert_close(resumed.posterior(), whole.posterior())
    if network is lora:
        names = list(whole.posterior().mean())
        assert names
        assert all("lora_" in name or "classifier" in name for name in names)


def test_the_callback_alone_resumes_in_its_folder(tmp_path: Path) -> None:
    """An ordinary Trainer, with samples in a folder."""

    def run(callback: PosteriorCallback, **how: Any) -> Any:
        model = bert()
        optimizer = tb.SGLD(model, 1e-4, train_size=N, generator=seeded())
        settings = arguments(tmp_path, save_strategy="steps", save_steps=8)
        trainer = transformers.Trainer(
            model, settings, train_dataset=ROWS, optimizers=(optimizer, None), callbacks=[callback]
        )
        trainer.train(**how)
        return callback.posterior

    first = numbers(run(PosteriorCallback(folder=tmp_path / "bank")))
    again = run(PosteriorCallback(folder=tmp_path / "bank"), resume_from_checkpoint=True)
    later = numbers(again)
    assert first.keys() == later.keys()
    assert all(torch.equal(value, later[key]) for key, value in first.items())
    state = read_state(tmp_path / "checkpoint-8" / "torchbayes.safetensors")
    assert state["updates"] == 8
    assert len(state["samples"]["draws"]) == 2
    with pytest.raises(ValueError, match="resume with the same folder="):
        run(PosteriorCallback(), resume_from_checkpoint=True)
    (tmp_path / "checkpoint-12" / "torchbayes.safetensors").unlink(missing_ok=True)
    (tmp_path / "checkpoint-8" / "torchbayes.safetensors").unlink()
    with pytest.raises(RunError, match="there is no state file"):
        run(PosteriorCallback(folder=tmp_path / "bank"), resume_from_checkpoint=True)


# -- What is refused ----------------------------------------------------------------------------------


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mc_samples is 2"):
        trained(tmp_path, tb.IVON, {"mc_samples": 2})
    settings = arguments(
        tmp_path, load_best_model_at_end=True, save_strategy="epoch", eval_strategy="epoch"
    )
    best = BayesianTrainer(
        bert(), settings, train_dataset=ROWS, eval_dataset=ROWS,
        optimizer_cls_and_kwargs=(tb.IVON, {}),
    )  # fmt: skip
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        best.train()
    with pytest.raises(ValueError, match="has 0 optimisers of torchbayes"):
        BayesianTrainer(bert(), arguments(tmp_path), train_dataset=ROWS).train()
    trainer = BayesianTrainer(bert(), arguments(tmp_path), train_dataset=ROWS)
    with pytest.raises(ValueError, match=r"before trainer.train\(\)"):
        trainer.posterior()


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


def test_a_stream_needs_its_size(tmp_path: Path) -> None:
    def trainer(options: dict[str, Any]) -> Any:
        settings = arguments(tmp_path, max_steps=4)
        return BayesianTrainer(
            bert(), settings, train_dataset=Stream(), optimizer_cls_and_kwargs=(tb.IVON, options)
        )

    with pytest.raises(ValueError, match="pass train_size"):
        trainer({}).train()
    made = trainer({"train_size": N})
    made.train()
    assert made.posterior().mean()
