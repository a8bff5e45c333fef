"""Hugging Face's Trainer: a callback that collects the posterior, and a mixin that trains at draws.

A posterior of a PEFT model holds the adapters, and whatever else is trained, alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from torchbayes.average.averager import Averager
from torchbayes.integrations.collector import Collector
from torchbayes.integrations.optimizers import made_optimizer, only_optimizer, own_optimizer
from torchbayes.likelihood import Categorical
from torchbayes.optim.base import ModelOptimizer
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Posterior
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.train.checkpoint import read_state, write_state

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "transformers is not installed: pip install transformers accelerate"
    ) from error

__all__ = ["BayesianTrainerMixin", "PosteriorCallback"]

_LOG = logging.getLogger("torchbayes")
_FILE = "torchbayes.safetensors"


class PosteriorCallback(TrainerCallback):
    """Collects what becomes the posterior while a Trainer trains.

    With a sampler it keeps samples, with an averager it takes a snapshot after every epoch, and an optimiser
    such as `tb.IVON`, which needs `BayesianTrainerMixin`, knows its posterior by itself. What it has
    collected is saved in each of the Trainer's checkpoints, so that `trainer.train(resume_from_checkpoint=…)`
    ends bit-equal. A sampler is trained without gradient clipping, which would sample from something else.

    Args:
        source: Where the posterior comes from: an averager such as `tb.SWAG(model)`; by default the Trainer's
            optimiser.
        burn_in: Share of the updates before the first sample or snapshot.
        samples: Samples to keep of a chain, spread evenly over the rest of the run.
        thinning: Updates from one sample or snapshot to the next, in place of `samples` or epochs.
        folder: Keep the samples as files in this folder instead of in memory and in checkpoints.
        resume_from: Checkpoint to resume from if it is not in the Trainer's output folder; the mixin knows.

    Example:
        >>> import torch, torchbayes as tb
        >>> from torchbayes.integrations.huggingface import PosteriorCallback
        >>> callback = PosteriorCallback(tb.SWAG(torch.nn.Linear(2, 2)), burn_in=0.75)
        >>> callback.posterior
        Traceback (most recent call last):
        ValueError: there is no posterior before trainer.train()
    """

    def __init__(
        self, source: Any = None, *, burn_in: float = 0.5, samples: int = 30,
        thinning: int | None = None, folder: str | Path | None = None,
        resume_from: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.source, self.resume_from = source, resume_from
        self.options: dict[str, Any] = {
            "burn_in": burn_in, "samples": samples, "thinning": thinning, "folder": folder,
        }  # fmt: skip
        self._collector: Collector | None = None

    @property
    def posterior(self) -> Posterior:
        """The posterior as it is by now.

        Raises:
            ValueError: If training has not begun, or there is no sample or snapshot yet.
        """
        if self._collector is None:
            raise ValueError("there is no posterior before trainer.train()")
        return self._collector.posterior()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to collect, or go on with what a checkpoint had."""
        source = only_optimizer([kwargs["optimizer"]]) if self.source is None else self.source
        self._collector = Collector(source, updates=state.max_steps, **self.options)
        _check_settings(self._collector.source, args)
        if state.global_step == 0:
            self._collector.start_afresh()
            return
        folder = self.resume_from
        if folder is None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._collector.load_state_dict(read_state(Path(folder) / _FILE))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep a sample or take a snapshot if it is time: before the Trainer saves a checkpoint."""
        assert self._collector is not None
        self._collector.after_update(epoch_ended=float(state.epoch).is_integer())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what has been collected to the checkpoint."""
        if state.is_world_process_zero and not state.is_hyper_param_search:
            assert self._collector is not None
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            write_state(folder / _FILE, self._collector.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give an average batch-norm statistics of its own."""
        assert self._collector is not None
        self._collector.finish(kwargs["train_dataloader"])


def _check_settings(source: Any, args: Any) -> None:
    """Hold the Trainer's settings against what a posterior can stand."""
    if isinstance(source, Sampler) and args.max_grad_norm:
        _LOG.warning(
            "max_grad_norm is %g, but clipped gradients belong to another distribution than the posterior: "
            "%s trains without (max_grad_norm=0)",
            args.max_grad_norm, type(source).__name__,
        )  # fmt: skip
        args.max_grad_norm = 0.0
    if args.load_best_model_at_end and not isinstance(source, (Sampler, Averager)):
        raise ValueError(
            "load_best_model_at_end is set, which would put the weights of an earlier checkpoint under the "
            "spread of the last: leave it out"
        )
    if isinstance(source, WeightOptimizer) and source.mc_samples > 1:
        raise ValueError(
            f"mc_samples is {source.mc_samples}, but Trainer takes one draw for each piece of a batch: use "
            "mc_samples=1, and gradient_accumulation_steps for several draws in an update"
        )


class BayesianTrainerMixin:
    """Trains the model of a Hugging Face Trainer into a posterior.

    `class MyTrainer(BayesianTrainerMixin, Trainer)`: the gradient of each piece of a batch is taken at a draw
    of the weights where the optimiser has a distribution over them, and every loss is the mean over its
    piece, divided by the number of pieces. It takes an optimiser of torchbayes either ready,
    `optimizers=(tb.IVON(model, train_size=…), None)`, or by its class, `optimizer_cls_and_kwargs=(tb.IVON,
    {"lr": 0.1})`; then `train_size` is the length of the training set. The `learning_rate` and `weight_decay`
    of the TrainingArguments, which are meant for AdamW, do not count. A `PosteriorCallback` with default
    settings is added unless there is one.

    Example:
        >>> from transformers import Trainer
        >>> from torchbayes.integrations.huggingface import BayesianTrainerMixin
        >>> class BayesianTrainer(BayesianTrainerMixin, Trainer):
        ...     pass
    """

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    model: Any
    train_dataset: Any
    callback_handler: Any
    add_callback: Callable[[Any], None]
    get_test_dataloader: Callable[[Any], Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Many models take the number of labels in all pieces and ignore it: Trainer has to divide.
        self.model_accepts_loss_kwargs = False
        if self._callback() is None:
            self.add_callback(PosteriorCallback())

    def _callback(self) -> PosteriorCallback | None:
        found = (c for c in self.callback_handler.callbacks if isinstance(c, PosteriorCallback))
        return next(found, None)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimiser."""
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None and given is not None and issubclass(given[0], ModelOptimizer):
            self.optimizer = made_optimizer(given[0], self.model, self._size, dict(given[1]))
            return self.optimizer
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _size(self) -> int:
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "the training set does not tell the number of its examples: pass train_size in "
                "optimizer_cls_and_kwargs"
            )
        return len(self.train_dataset)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and tell the callback where to resume from."""
        callback = self._callback()
        if callback is not None and resume_from_checkpoint:
            named = isinstance(resume_from_checkpoint, (str, Path))
            callback.resume_from = resume_from_checkpoint if named else None
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward pass of a piece, at a draw of the weights if the optimiser has one."""
        optimizer = own_optimizer(self.optimizer)
        drawn = optimizer.sampled() if isinstance(optimizer, WeightOptimizer) else nullcontext()
        with drawn:
            loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
            return loss

    def posterior(self) -> Posterior:
        """Return the posterior as it is by now."""
        callback = self._callback()
        assert callback is not None
        return callback.posterior

    def predictive(self, dataset: Any, samples: int = 32, **kwargs: Any) -> Predictive:
        """Predict with the weights averaged out.

        Args:
            dataset: A data set, as for `Trainer.predict`; its labels are left out.
            samples: Number of draws.
            **kwargs: Other arguments of `torchbayes.predictive`; classes are the default likelihood.
        """
        known = {"likelihood": Categorical()} | kwargs
        return predictive(
            self.model, self.posterior(), self.get_test_dataloader(dataset), samples, **known
        )
