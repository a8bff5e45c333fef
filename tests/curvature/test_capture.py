"""What happens around the rules: micro-batches, frozen weights, mixed precision, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchbayes.core.batch import check_mean_loss
from torchbayes.curvature import Capture


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(100, 6), nn.Tanh(),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


def data(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def squares(net: nn.Module, run: Callable[[], None]) -> dict[str, Tensor | None]:
    capture = Capture(net, dict(net.named_parameters()))
    net.zero_grad()
    with capture.block():
        run()
    return {name: capture.squares(p) for name, p in net.named_parameters()}


def assert_equal(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-9, atol=1e-12)


def test_uneven_micro_batches_are_one_batch() -> None:
    net, (x, y) = network(), data()

    def pieces() -> None:
        for start, stop in ((0, 5), (5, 6), (6, 12)):
            loss = F.cross_entropy(net(x[start:stop]), y[start:stop])
            (loss * (stop - start) / 12).backward()

    whole = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    gradient = net[0].weight.grad.clone()
    assert_equal(squares(net, pieces), whole)
    torch.testing.assert_close(net[0].weight.grad, gradient)


def test_two_graphs_at_once() -> None:
    net, (x, y) = network(), data()

    def both() -> None:
        losses = [F.cross_entropy(net(x[i : i + 6]), y[i : i + 6]) / 2 for i in (0, 6)]
        for loss in losses:
            loss.backward()

    assert_equal(squares(net, both), squares(net, lambda: F.cross_entropy(net(x), y).backward()))


def test_a_forward_pass_without_a_backward_pass_does_not_count() -> None:
    net, (x, y) = network(), data()

    def with_a_look() -> None:
        net(x[:3])
        with torch.no_grad():
            net(x)
        F.cross_entropy(net(x), y).backward()

    assert_equal(
        squares(net, with_a_look), squares(net, lambda: F.cross_entropy(net(x), y).backward())
    )


def test_frozen_and_unused_weights() -> None:
    net, (x, y) = network(), data()
    everything = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    for frozen in (net[0].weight, net[3].bias):
        frozen.requires_grad_(False)
    net.unused = nn.Linear(2, 2)
    net.forward = lambda inputs: nn.Sequential(*list(net)[:6])(inputs)
    some = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    for name in ("0.weight", "3.bias", "unused.weight", "unused.bias"):
        assert some.pop(name) is None
    assert_equal(some, {name: everything[name] for name in some})


def test_a_weight_that_only_some_passes_use() -> None:
    net, (x, y) = network(), data()
    net.sometimes = nn.Linear(3, 3).double()
    capture = Capture(net, dict(net.named_parameters()))
    for uses in (True, False, True, False):
        with capture.block():
            net.zero_grad()
            out = nn.Sequential(*list(net)[:6])(x)
            F.cross_entropy(net.sometimes(out) if uses else out, y).backward()
        assert (capture.squares(net.sometimes.weight) is not None) == uses


def test_one_example_has_the_square_of_the_gradient_whatever_the_network_does() -> None:
    """Dropout in attention, in a recurrent layer and on activations, and group norm."""
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {
            "block": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
            "lstm": nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True),
            "head": nn.Sequential(nn.GroupNorm(2, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
        }
    )
    x = torch.randn(1, 5, 8)

    def run() -> None:
        out = net["head"](net["lstm"](net["block"](x))[0][:, -1])
        F.cross_entropy(out, torch.tensor([1])).backward()

    got = squares(net, run)
    for name, p in net.named_parameters():
        torch.testing.assert_close(got[name], p.grad.square(), rtol=1e-4, atol=1e-10)


def test_a_penalty_has_a_gradient_but_no_curvature() -> None:
    net, (x, y) = network(), data()

    def penalised() -> None:
        penalty = sum(p.square().sum() for p in net.parameters())
        (F.cross_entropy(net(x), y) + 0.1 * penalty).backward()

    assert_equal(
        squares(net, penalised), squares(net, lambda: F.cross_entropy(net(x), y).backward())
    )


def test_checkpointed_activations() -> None:
    net, (x, y) = network(), data()
    x = x.requires_grad_()

    def saving(use_reentrant: bool) -> None:
        hidden = checkpoint(net[:3], x, use_reentrant=use_reentrant)
        F.cross_entropy(net[3:](hidden), y).backward()

    plain = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    assert_equal(squares(net, lambda: saving(False)), plain)
    refused(net, lambda: saving(True), "use_reentrant=False")


def test_bfloat16_autocast() -> None:
    net, (x, y) = network().float(), data()
    x = x.float()

    def mixed() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()

    exact = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    for name, value in squares(net, mixed).items():
        assert value.dtype == torch.float32
        # bfloat16 has 8 bits: activations and gradients are each off by up to 0.4 %, over three layers.
        assert (value - exact[name]).abs().max() < 0.05 * exact[name].abs().max(), name


def test_other_losses_backward_functions() -> None:
    net, (x, y) = network(), data()
    expected = squares(net, lambda: F.cross_entropy(net(x), y).backward())
    got = squares(net, lambda: torch.autograd.backward([F.cross_entropy(net(x), y)]))
    assert_equal(got, expected)


# Refusals: one sentence that names the weight and says what to do.


def refused(net: nn.Module, run: Callable[[], None], match: str) -> None:
    capture = Capture(net, dict(net.named_parameters()))
    with pytest.raises(ValueError, match=match) as caught, capture.block():
        run()
    assert "\n" not in str(caught.value)
    assert capture.examples == 0


def test_refuses_a_sum() -> None:
    net, (x, y) = network(), data()
    refused(net, lambda: F.cross_entropy(net(x), y, reduction="sum").backward(), "sum over the 12")
    refused(net, lambda: F.cross_entropy(net(x), y, reduction="none").sum().backward(), "mean")
    scaled = torch.tensor(65536.0)
    refused(
        net,
        lambda: (F.mse_loss(net(x), net(x).detach() + 1, reduction="sum") * scaled).backward(),
        "mean",
    )
    # A sum that is divided is a mean; a sum of two losses is none over examples.
    check_mean_loss(F.cross_entropy(net(x), y, reduction="sum") / 12, 12)
    check_mean_loss(torch.stack([F.cross_entropy(net(x), y)] * 2).sum(), 12)


def test_refuses_two_backward_passes_of_one_graph() -> None:
    net, (x, y) = network(), data()

    def twice() -> None:
        loss = F.cross_entropy(net(x), y)
        loss.backward(retain_graph=True)
        loss.backward()

    refused(net, twice, "add the losses up")


def test_refuses_examples_folded_into_another_dimension() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.reshape(-1, 4))

    net = Folding()
    refused(net, lambda: net(torch.randn(6, 3, 4)).mean().backward(), "'inner.weight' gets 18 rows")


def test_refuses_sequences_first() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    refused(net, lambda: net(torch.randn(5, 3, 8)).mean().backward(), "batch_first=True")


def test_refuses_packed_sequences() -> None:
    net = nn.LSTM(3, 4, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 3), [5, 3], batch_first=True)
    refused(net, lambda: net(packed)[0].data.mean().backward(), "padded tensor")


def test_refuses_sparse_embeddings() -> None:
    net = nn.Embedding(5, 3, sparse=True)
    refused(net, lambda: net(torch.tensor([1, 2])).mean().backward(), "sparse=False")


class Scaled(nn.Module):
    def __init__(self, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(3)), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * 1.0, self.scale)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda x, w: x.mul_(w), "out of place"),
        (lambda x, w: F.linear(x, F.dropout(w.diag(), 0.5)), "at random"),
        (lambda x, w: torch.einsum("bi,i->", x, w), "examples kept apart"),
        (lambda x, w: F.linear(x, w.expand(4, 3)), "expanded to the number of examples"),
    ],
)
def test_refuses_what_it_cannot_see_through(act: Callable, match: str) -> None:
    torch.manual_seed(0)
    net = Scaled(act)
    refused(net, lambda: net(torch.randn(4, 3)).mean().backward(), match)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_refuses_scripted_modules() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="pass the plain module"):
        Capture(scripted, dict(scripted.named_parameters()))
    net = nn.Sequential(scripted)
    refused(net, lambda: net(torch.randn(4, 3)).mean().backward(), "not a scripted one")
