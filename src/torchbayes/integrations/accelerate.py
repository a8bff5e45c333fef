"""accelerate: prepared optimisers that can still be drawn from, and models that stay out of DDP."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchbayes.integrations.optimizers import own_optimizer
from torchbayes.optim.base import ModelOptimizer
from torchbayes.optim.natural_gradient import WeightOptimizer
from torchbayes.optim.sampler import Sampler

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError("accelerate is not installed: pip install accelerate") from error

__all__ = ["prepare"]


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Prepare models, optimisers and loaders as `accelerator.prepare` does, for a posterior.

    A prepared optimiser has `sampled()` and `posterior()` as the one inside has. Where several processes
    would put the model into `DistributedDataParallel`, which averages gradients of different draws, it
    stays as it is: VOGN, IVON and Noisy K-FAC average over processes in `step()`, and a sampler runs one
    chain a process.

    Args:
        accelerator: An `accelerate.Accelerator`.
        *objects: What to prepare; the results are in the same order.

    Example:
        >>> import torch, torchbayes as tb
        >>> from accelerate import Accelerator
        >>> from torchbayes.integrations.accelerate import prepare
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = tb.IVON(model, train_size=8)
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = prepare(accelerator, model, optimizer)
        >>> with optimizer.sampled():
        ...     accelerator.backward(model(torch.ones(8, 2)).square().mean())
        >>> optimizer.step()
        >>> optimizer.posterior()
        Gaussian(6 weights of Linear)
    """
    alone = any(isinstance(own_optimizer(o), (WeightOptimizer, Sampler)) for o in objects)
    done = [
        accelerator.prepare_model(o, evaluation_mode=True)
        if alone and isinstance(o, nn.Module)
        else o
        for o in objects
    ]
    prepared = accelerator.prepare(*done)
    for one in [prepared] if len(objects) == 1 else prepared:
        inner = own_optimizer(one)
        if isinstance(one, AcceleratedOptimizer) and isinstance(inner, ModelOptimizer):
            for name in ("sampled", "posterior"):
                if hasattr(inner, name):
                    setattr(one, name, getattr(inner, name))
    return prepared
