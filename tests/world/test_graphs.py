"""A graph of which only some nodes have labels: one pass over all nodes, a loss over the labelled ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchbayes as tb

NODES, LABELLED = 120, 54


class GCN(nn.Module):
    """Two graph convolutions with a dense, normalised adjacency matrix (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        logits: Tensor = adjacency @ self.second((adjacency @ self.first(x)).relu())
        return logits


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Three communities, with noisy features of their number."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(NODES) % 3
    same = labels[:, None] == labels[None]
    chance = torch.where(same, 0.15, 0.01)
    edges = (torch.rand(NODES, NODES, generator=generator) < chance).triu(1)
    adjacency = (edges | edges.t() | torch.eye(NODES, dtype=torch.bool)).float()
    scale = adjacency.sum(1).rsqrt()
    features = F.one_hot(labels, 16).float() + torch.randn(NODES, 16, generator=generator)
    return features, scale[:, None] * adjacency * scale, labels


@pytest.mark.parametrize("method", [tb.IVON, tb.VOGN])
@pytest.mark.parametrize("with_closure", [False, True])
def test_train_size_is_the_number_of_labels(method: Any, with_closure: bool) -> None:
    torch.manual_seed(0)
    x, adjacency, labels = graph()
    model = GCN()
    optimizer = method(model, train_size=LABELLED)

    def loss() -> Tensor:
        return F.cross_entropy(model(x, adjacency)[:LABELLED], labels[:LABELLED])

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(60):
        if with_closure:
            optimizer.step(closure, examples=LABELLED)
        else:
            with optimizer.sampled(examples=LABELLED):
                closure()
            optimizer.step()
    with torch.no_grad():
        correct = model(x, adjacency)[LABELLED:].argmax(1) == labels[LABELLED:]
    # Of 66 nodes, a guess has 22 right with a standard deviation below 4.
    assert correct.sum() > 22 + 5 * 4


@pytest.mark.parametrize("method", [tb.IVON, tb.VOGN])
def test_without_examples_the_error_says_how(method: Any) -> None:
    x, adjacency, labels = graph()
    model = GCN()
    optimizer = method(model, train_size=LABELLED)
    with optimizer.sampled():
        F.cross_entropy(model(x, adjacency)[:LABELLED], labels[:LABELLED]).backward()
    with pytest.raises(ValueError, match=r"54 but a batch has 120 examples.*sampled\(examples=…\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="examples is 0"), optimizer.sampled(examples=0):
        pass


def test_squares_of_nodes_that_do_not_interact_are_those_of_the_labelled_ones() -> None:
    """Without edges every label has one node, and the squares are the mean over the labels."""
    torch.manual_seed(0)
    x, _, labels = graph()
    model = GCN()
    optimizer = tb.VOGN(model, train_size=LABELLED)
    with optimizer.sampled(examples=LABELLED):
        logits = model(x, torch.eye(NODES))
        F.cross_entropy(logits[:LABELLED], labels[:LABELLED]).backward()
    optimizer.step()
    gradients = logits[:LABELLED].detach().softmax(1) - F.one_hot(
        labels[:LABELLED], 3
    )  # of the last bias
    wanted = np.mean(gradients.numpy() ** 2, 0)
    found = optimizer.state[model.second.bias]["precision"].numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
