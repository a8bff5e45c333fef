"""Lightning: a callback that ends in a posterior, and a module that trains any network into one.

Lightning's automatic optimisation passes a closure to the optimiser, which is what VOGN, IVON and their
relatives draw around. Only the pieces of `accumulate_grad_batches` are computed outside of it;
`BayesianModule` gives each of them a draw of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.batch import batch_weights, call, split_batch
from torchbayes.core.device import generator_state
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.integrations.collector import Collector
from torchbayes.integrations.optimizers import made_optimizer, only_optimizer
from torchbayes.likelihood import Categorical, Likelihood
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.sampler import Sampler
from torchbayes.posterior import Posterior, Wrapper
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.train.method import loss_of
from torchbayes.train.noise import LearnedNoise
from torchbayes.train.schedule import Schedule, as_schedule

try:
    import lightning
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install 'torchbayes[lightning]'") from error

__all__ = ["BayesianModule", "PosteriorCallback"]


class PosteriorCallback(lightning.Callback):
    """Collects what becomes the posterior while a Trainer trains.

    With a sampler it keeps samples, with an averager it takes a snapshot after every epoch, and an optimiser
    such as `tb.IVON` knows its posterior by itself. Its state is part of Lightning's checkpoints, with that
    of torch's random generator: a Trainer that resumes from the end of an epoch ends bit-equal.

    Args:
        source: Where the posterior comes from: an averager such as `tb.SWAG(network)`, or a wrapper such as
            `tb.MeanField(network)`; by default the Trainer's optimiser.
        burn_in: Share of the updates before the first sample or snapshot.
        samples: Samples to keep of a chain, spread evenly over the rest of the run.
        thinning: Updates from one sample or snapshot to the next, in place of `samples` or epochs.
        folder: Keep the samples as files in this folder instead of in memory and in checkpoints.

    Example:
        >>> import lightning, torchbayes as tb
        >>> from torchbayes.integrations.lightning import PosteriorCallback
        >>> network = tb.models.mlp(64, num_classes=10)
        >>> callback = PosteriorCallback(tb.SWAG(network, rank=10), burn_in=0.75)
        >>> trainer = lightning.Trainer(callbacks=[callback], logger=False)   # doctest: +SKIP
        >>> trainer.fit(module, loader)                                       # doctest: +SKIP
        >>> callback.posterior                                                # doctest: +SKIP
    """

    def __init__(
        self, source: Any = None, *, burn_in: float = 0.5, samples: int = 30,
        thinning: int | None = None, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.source = source
        self.options: dict[str, Any] = {
            "burn_in": burn_in, "samples": samples, "thinning": thinning, "folder": folder,
        }  # fmt: skip
        self._collector: Collector | None = None
        self._restored: dict[str, Any] | None = None
        self._step = 0

    @property
    def posterior(self) -> Posterior:
        """The posterior as it is by now.

        Raises:
            ValueError: If training has not begun, or there is no sample or snapshot yet.
        """
        if self._collector is None:
            raise ValueError("there is no posterior before trainer.fit(…)")
        return self._collector.posterior()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue with the random numbers that would have followed the checkpoint."""
        if self._restored is None:
            return
        torch.set_rng_state(self._restored["random"])
        if (
            trainer.train_dataloader is not None
        ):  # configure_optimizers() has asked for the data's size
            torch.empty((), dtype=torch.int64).random_()  # what the loader's iterator has drawn

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to collect, or go on with what a checkpoint had."""
        source = only_optimizer(trainer.optimizers) if self.source is None else self.source
        updates = trainer.estimated_stepping_batches
        self._collector = Collector(source, updates=updates, **self.options)
        if isinstance(self._collector.source, Sampler) and trainer.gradient_clip_val:
            warnings.warn(
                f"gradient_clip_val is {trainer.gradient_clip_val}, but clipped gradients belong to another "
                "distribution than the posterior: leave it out for a sampler",
                stacklevel=2,
            )
        self._step = trainer.global_step
        if self._restored is not None:
            self._collector.load_state_dict(self._restored["collector"])
            self._restored = None
        elif trainer.global_step > 0 and trainer.ckpt_path is not None:
            raise ValueError(
                f"{trainer.ckpt_path} was saved without a PosteriorCallback, so what it had collected after "
                f"{trainer.global_step} updates is missing: start training anew"
            )
        else:
            self._collector.start_afresh()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep a sample or take a snapshot if it is time: before validation, which may save a checkpoint."""
        if trainer.global_step > self._step:  # otherwise a piece of a larger batch
            self._step = trainer.global_step
            assert self._collector is not None
            self._collector.after_update(epoch_ended=trainer.is_last_batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give an average batch-norm statistics of its own."""
        assert self._collector is not None
        self._collector.finish(_Batches(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed Trainer needs."""
        if self._collector is None:
            return {}
        random = generator_state(torch.default_generator)
        return {"collector": self._collector.state_dict(), "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training begins: Lightning restores callbacks before there are optimisers."""
        self._restored = state_dict or None


class _Batches(Iterable[Any]):
    """The training data once more, where the network is."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        return (self.trainer.strategy.batch_to_device(b) for b in self.trainer.train_dataloader)


class BayesianModule(lightning.LightningModule):
    """Any network, trained into a posterior by Lightning's Trainer.

    `trainer.predict` gives a `Predictive` for each batch. A `PosteriorCallback` with default settings is
    added unless the Trainer has one. Override `loss` for a loss of your own, and `validation_step` as usual.

    Args:
        model: The network, or a wrapper around it such as `tb.MeanField(network)`.
        optimizer: A class of `torchbayes.optim`, such as `tb.IVON` or `tb.SGLD`; for a wrapper or an averager
            also one of torch's.
        likelihood: Meaning of the network's outputs; its own parameters, such as a learned noise level, are
            trained too.
        train_size: Number of training examples; by default the length of the Trainer's training set.
        schedule: Learning-rate schedule.
        samples: Number of draws for predictions.
        output: Where the likelihood's tensor is in what the network returns; see `torchbayes.fit`.
        **options: Options of the optimiser, such as `lr`.

    Example:
        >>> import torchbayes as tb
        >>> from torchbayes.integrations.lightning import BayesianModule
        >>> module = BayesianModule(tb.models.mlp(64, num_classes=10), tb.IVON, lr=0.1)
        >>> trainer.fit(module, loader)                  # doctest: +SKIP
        >>> module.posterior.save("posterior.safetensors")   # doctest: +SKIP
        >>> [p.confidence for p in trainer.predict(module, test_loader)]   # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], *,
        likelihood: Likelihood | None = None, train_size: int | None = None,
        schedule: str | Schedule = "constant", samples: int = 32, output: Output = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.likelihood = Categorical() if likelihood is None else likelihood
        self.train_size, self.samples, self.output = train_size, samples, output
        self._make, self._options, self._schedule = optimizer, options, as_schedule(schedule)
        self._noise = LearnedNoise(self.likelihood)
        self._drawn = ExitStack()
        self._given: Posterior | None = None

    # What was learned.

    @property
    def posterior(self) -> Posterior:
        """The posterior of the last `trainer.fit`, or the one that it was set to, such as `tb.load(path)`."""
        if self._given is not None:
            return self._given
        return self._callback().posterior

    @posterior.setter
    def posterior(self, value: Posterior) -> None:
        self._given = value

    def _callback(self) -> PosteriorCallback:
        found = [c for c in self._callbacks() if isinstance(c, PosteriorCallback)]
        if not found:
            raise ValueError(
                "this module has no posterior yet: train it, or set module.posterior = tb.load(path)"
            )
        return found[0]

    def _callbacks(self) -> list[Any]:
        return [] if self._trainer is None else list(self._trainer.callbacks)

    def configure_callbacks(self) -> list[Any]:
        """Add a `PosteriorCallback` if the Trainer has none."""
        if any(isinstance(c, PosteriorCallback) for c in self._callbacks()):
            return []
        return [PosteriorCallback(self.model if isinstance(self.model, Wrapper) else None)]

    def predict_step(self, batch: Any, *_: Any) -> Predictive:
        """Predict with the weights averaged out; targets in the batch are left out."""
        network = self.model.model if isinstance(self.model, Wrapper) else self.model
        # Parameters are no inference tensors, and functorch needs both of one kind.
        with torch.inference_mode(False), torch.no_grad():
            return predictive(
                network, self.posterior, split_batch(batch)[0], self.samples,
                likelihood=self.likelihood, output=self.output,
            )  # fmt: skip

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        return self.model(*args, **kwargs)

    def loss(self, batch: Any) -> Tensor:
        """Return the *mean* loss of a batch."""
        inputs, targets = split_batch(batch)
        if targets is None:
            raise ValueError("the batch has no targets: let the loader give (inputs, targets)")
        outputs = output_tensor(call(self.model, inputs), self.output)
        loss = loss_of(self.likelihood, outputs, targets, batch_weights(batch))
        kl = getattr(self.model, "kl", None)
        return loss if kl is None else loss + kl() / self._size()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss, at a draw of the weights if the optimiser has a distribution over them."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        if isinstance(optimizer, WeightOptimizer) and not optimizer.drawing:
            self._drawn.enter_context(optimizer.sampled())  # a piece, outside of step(closure)
        try:
            loss = self.loss(batch)
        except BaseException:
            self._drawn.close()
            raise
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss * self._share(batch_idx)

    def _share(self, batch_idx: int) -> float:
        """Return what is missing in Lightning's division: an epoch's last update may have fewer pieces."""
        pieces, count = self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        left = min(pieces, count - batch_idx // pieces * pieces)
        return float(pieces / left)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients, and end the draw of a piece."""
        with self._drawn:
            super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:  # fmt: skip
        """Clip the gradients, also in bfloat16, where Lightning refuses an optimiser that can unscale."""
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if scaled or gradient_clip_val is None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        by_value = gradient_clip_algorithm == "value"
        clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
        clip([p for group in optimizer.param_groups for p in group["params"]], gradient_clip_val)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, those of the likelihood too."""
        super().optimizer_zero_grad(*args, **kwargs)
        self._noise.zero_grad()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, and the parameters of the likelihood."""
        super().optimizer_step(*args, **kwargs)
        self._noise.step()

    def validation_step(self, batch: Any, *_: Any) -> None:
        """Log the loss of the mean weights, and their accuracy if targets are labels."""
        inputs, targets = split_batch(batch)
        assert targets is not None
        outputs = output_tensor(call(self.model, inputs), self.output)
        size = len(targets)
        self.log("validation_nll", self.likelihood.loss(outputs, targets), batch_size=size)
        correct = self.likelihood.correct(outputs, targets)
        if correct is not None:
            self.log("validation_accuracy", correct.float().mean(), batch_size=size)

    def configure_optimizers(self) -> Any:
        """Make the optimiser and its learning-rate schedule."""
        optimizer = made_optimizer(self._make, self.model, self._size, self._options)
        if self._schedule.name == "constant":
            return optimizer
        updates, epochs = int(self.trainer.estimated_stepping_batches), self.trainer.max_epochs
        epochs = max(1, epochs or 1)
        scheduler = self._schedule.build(optimizer, epochs, max(1, updates // epochs))
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }  # fmt: skip

    def _size(self) -> int:
        """Return the number of training examples, which the Trainer's loader tells if the user does not."""
        if self.train_size is None:
            _ = self.trainer.estimated_stepping_batches  # asks for the loader
            data = getattr(self.trainer.train_dataloader, "dataset", None)
            if data is None or not hasattr(data, "__len__"):
                raise ValueError(
                    "the training loader does not tell the number of its examples: pass train_size="
                )
            self.train_size = len(data)
        return self.train_size

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the optimiser of the likelihood."""
        checkpoint["torchbayes_noise"] = self._noise.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the optimiser of the likelihood."""
        if "torchbayes_noise" in checkpoint:  # not in the checkpoint of another module
            self._noise.load_state_dict(checkpoint["torchbayes_noise"])
