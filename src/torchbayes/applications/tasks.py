"""Sequences of tasks: one data set with its pixels permuted, or with its classes split into groups.

I. Goodfellow et al., An Empirical Investigation of Catastrophic Forgetting, 2013 (permuted pixels);
F. Zenke et al., Continual Learning Through Synaptic Intelligence, ICML 2017 (split classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbayes.data import DataSet, Split
from torchbayes.likelihood import Categorical
from torchbayes.predict.results import ClassPredictive

__all__ = ["Task", "permuted_tasks", "split_tasks"]

_EXCLUDED = -1e9  # logit of a class that is not part of the task


class _AmongClasses(Categorical):
    """Likelihood over some of the network's classes: the task's own head, as rows of one last layer."""

    others: Tensor

    def __init__(self, classes: Sequence[int], count: int) -> None:
        super().__init__()
        others = torch.ones(count, dtype=torch.bool)
        others[list(classes)] = False
        self.register_buffer("others", others, persistent=False)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().loss(outputs.masked_fill(self.others, _EXCLUDED), targets, weights)

    def predictive(self, outputs: Tensor) -> ClassPredictive:
        return super().predictive(outputs.masked_fill(self.others, _EXCLUDED))


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a sequence. Inputs are flat, in [0, 1] where the data are images.

    Attributes:
        name: Name in tables.
        train: Training examples.
        test: Test examples.
        likelihood: Likelihood of the network's outputs in this task.
        order: Permutation of the pixels; None for their own order.
    """

    name: str
    train: Split
    test: Split
    likelihood: Categorical
    order: Tensor | None = None

    def transform(self, batch: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Turn a batch of the data set's inputs into inputs of this task."""
        flat = batch.flatten(1)
        if self.order is not None:
            flat = flat.index_select(1, self.order)
        return flat.float().div_(255.0) if flat.dtype == torch.uint8 else flat.float()


def permuted_tasks(data: DataSet, count: int = 10, seed: int = 0) -> list[Task]:
    """Make `count` tasks of the same data, each with the pixels in another random order.

    Args:
        data: Images or other inputs of one shape, in memory.
        count: Number of tasks.
        seed: Random seed of the orders.

    Example:
        >>> from torchbayes.applications.tasks import permuted_tasks
        >>> from torchbayes.data import load_data
        >>> first, second = permuted_tasks(load_data("digits"), 2)
        >>> first.transform(first.test.inputs).shape
        torch.Size([450, 64])
    """
    train, test = _in_memory(data)
    if count < 1:
        raise ValueError(f"tasks is {count}: expected at least 1")
    pixels = train.inputs[0].numel()
    generator = torch.Generator().manual_seed(seed)
    return [
        Task(
            f"order {number + 1}", train, test, Categorical(),
            torch.randperm(pixels, generator=generator),
        )
        for number in range(count)
    ]  # fmt: skip


def split_tasks(data: DataSet, per_task: int = 2) -> list[Task]:
    """Make tasks of `per_task` classes each, in numerical order; each predicts only its own classes.

    Args:
        data: Classification data set, in memory.
        per_task: Classes per task; left-over classes are not used.

    Example:
        >>> from torchbayes.applications.tasks import split_tasks
        >>> from torchbayes.data import load_data
        >>> [task.name for task in split_tasks(load_data("digits"))]
        ['0 1', '2 3', '4 5', '6 7', '8 9']
    """
    train, test = _in_memory(data)
    if not 2 <= per_task <= data.num_classes:
        raise ValueError(
            f"per_task is {per_task}: expected from 2 to the {data.num_classes} classes of {data.name}"
        )
    tasks = []
    for first in range(0, data.num_classes - per_task + 1, per_task):
        classes = range(first, first + per_task)
        own = torch.tensor(classes)
        seen, asked = (s.subset(torch.isin(s.targets, own)) for s in (train, test))
        name = " ".join(data.classes[c] for c in classes)
        tasks.append(Task(name, seen, asked, _AmongClasses(classes, data.num_classes)))
    return tasks


def _in_memory(data: DataSet) -> tuple[Split, Split]:
    if not isinstance(data.train, Split) or not isinstance(data.test, Split) or not data.classes:
        raise ValueError(
            f"{data.name} cannot be made into tasks: choose a classification that fits in memory, such as "
            "mnist or digits"
        )
    return data.train, data.test
