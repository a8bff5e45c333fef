"""Squares of per-example gradients, layer by layer, against `torch.func.vmap(torch.func.grad)`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

from torchbayes.curvature import Capture

M = 5


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The mean over examples of squared gradients, each example a batch of one."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        out = functional_call(model, weights, (xi.unsqueeze(0),))
        return (out.flatten(1) * yi.flatten()).sum() + out.flatten(1).square().mean()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return {n: g.square().mean(0) for n, g in gradients.items()}


def by_loop(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same, one example after another, for modules that cannot be vmapped."""
    names, weights = zip(*model.named_parameters(), strict=True)
    total = [torch.zeros_like(w) for w in weights]
    for i in range(len(x)):
        out = model(x[i : i + 1])
        loss = (out.flatten(1) * y[i].flatten()).sum() + out.flatten(1).square().mean()
        for t, g in zip(total, torch.autograd.grad(loss, weights), strict=True):
            t += g.square() / len(x)
    return dict(zip(names, total, strict=True))


def captured(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The same by one backward pass; also checks that the gradients are the ordinary ones."""
    capture = Capture(model, dict(model.named_parameters()))

    def mean_loss() -> Tensor:
        out = model(x).flatten(1)
        return (out * y.flatten(1)).sum() / len(x) + out.square().mean()

    model.zero_grad()
    mean_loss().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with capture.block():
        mean_loss().backward()
    assert capture.examples == len(x)
    for name, p in model.named_parameters():
        scale = plain[name].abs().max().item()
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-5, atol=1e-5 * scale)
    return {n: capture.squares(p) for n, p in model.named_parameters()}


def check(model: nn.Module, x: Tensor, reference=by_vmap) -> None:
    torch.manual_seed(1)
    y = torch.randn(model(x).shape)
    expected = reference(model, x, y)
    got = captured(model, x, y)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error < 1e-5, f"{name}: relative error {error:.2g}"


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 11)),
    "1d-grouped-circular": (
        nn.Conv1d(4, 6, 3, padding=2, groups=2, padding_mode="circular"),
        (4, 9),
    ),
    "2d": (nn.Conv2d(3, 4, 3), (3, 7, 8)),
    "2d-no-bias": (nn.Conv2d(3, 4, (3, 2), bias=False), (3, 7, 8)),
    "2d-strided-dilated": (nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2), (4, 12, 9)),
    "2d-grouped": (nn.Conv2d(4, 8, 3, groups=2, padding=1), (4, 6, 5)),
    "2d-depthwise": (nn.Conv2d(4, 8, 3, groups=4, stride=2), (4, 9, 9)),
    "2d-same": (nn.Conv2d(3, 4, 4, padding="same"), (3, 6, 6)),
    "2d-same-reflect": (nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"), (3, 6, 6)),
    "2d-valid": (nn.Conv2d(3, 4, 3, padding="valid"), (3, 6, 6)),
    "2d-large": (nn.Conv2d(3, 4, 3, padding=1), (3, 20, 20)),
    "2d-large-grouped": (nn.Conv2d(4, 4, 3, padding=1, groups=2), (4, 20, 20)),
    "2d-one-position": (nn.Conv2d(3, 4, 3), (3, 3, 3)),
    "2d-four-positions": (nn.Conv2d(3, 4, 3, padding=1), (3, 2, 2)),
    "2d-1x1": (nn.Conv2d(3, 4, 1, stride=2), (3, 6, 6)),
    "3d": (nn.Conv3d(2, 4, 3, padding=1, stride=(1, 2, 1), groups=2), (2, 4, 5, 4)),
    "transposed-1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (4, 6)),
    "transposed-2d": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 4, 5),
    ),
    "transposed-2d-dilated": (nn.ConvTranspose2d(3, 4, 3, dilation=2, bias=False), (3, 4, 5)),
    "transposed-3d": (nn.ConvTranspose3d(2, 3, 2), (2, 3, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    check(layer, torch.randn(M, *shape))


class Positions(nn.Module):
    """A table looked up by position, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(torch.arange(x.shape[1]))


class Direct(nn.Module):
    """Parameters held by a module that also has children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(1))
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.tensor = nn.Parameter(torch.randn(3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x * self.scale) + self.shift
        x = torch.cat((self.token.expand(len(x), -1, -1), x @ self.matrix), 1)
        return torch.einsum("bti,ijk->btjk", x, self.tensor)


class Masked(nn.Module):
    """A weight times a buffer, sliced and transposed before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("mask", (torch.rand(4, 6) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.full * self.mask)[:, 1:]
        return F.linear(F.linear(x, weight).tanh(), weight.T)


def normed(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in layer.parameters():
            p.uniform_(0.5, 1.5)
        for b in layer.buffers():
            if b.is_floating_point():
                b.uniform_(0.5, 1.5)
    return layer.eval()


LAYERS = {
    "linear": (nn.Linear(4, 3), (4,)),
    "linear-no-bias": (nn.Linear(4, 3, bias=False), (4,)),
    "linear-few-positions": (nn.Linear(4, 3), (3, 4)),
    "linear-many-positions": (nn.Linear(4, 3), (7, 4)),
    "linear-image": (nn.Linear(4, 3), (3, 5, 4)),
    "batch-norm-1d": (normed(nn.BatchNorm1d(4)), (4,)),
    "batch-norm-1d-sequence": (normed(nn.BatchNorm1d(4)), (4, 6)),
    "batch-norm-2d": (normed(nn.BatchNorm2d(4)), (4, 3, 5)),
    "layer-norm": (normed(nn.LayerNorm(6)), (6,)),
    "layer-norm-sequence": (normed(nn.LayerNorm((5, 6))), (3, 5, 6)),
    "rms-norm": (normed(nn.RMSNorm(6)), (3, 6)),
    "group-norm": (normed(nn.GroupNorm(2, 6)), (6, 3, 4)),
    "instance-norm": (normed(nn.InstanceNorm2d(3, affine=True)), (3, 4, 5)),
    "prelu": (nn.PReLU(), (4, 3)),
    "prelu-channels": (nn.PReLU(4), (4, 3)),
    "positions": (Positions(), (M, 4)),
    "direct": (Direct(), (3, 4)),
    "masked": (Masked(), (5,)),
    "weight-norm": (parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "weight-norm-conv": (parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), (3, 6, 6)),
    "orthogonal": (parametrizations.orthogonal(nn.Linear(4, 4)), (4,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    # torch's fused weight norm and its matrix exponential cannot be vmapped.
    check(layer, torch.randn(M, *shape), by_loop if "norm-" in name or name in _SLOW else by_vmap)


_SLOW = ("weight-norm", "orthogonal")


class TakesIndices(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("shape", [(M,), (M, 6), (M, 2, 3)])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embedding_sums_repeated_indices_before_squaring(
    shape: tuple[int, ...], padding_idx: int | None
) -> None:
    torch.manual_seed(0)
    check(nn.Embedding(4, 3, padding_idx), torch.randint(4, shape), by_loop)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        out, state = self.layer(x)
        out = out if self.layer.batch_first else out.transpose(0, 1)
        last = state[1] if isinstance(state, tuple) else state
        return torch.cat((out.flatten(1), last.transpose(0, 1).flatten(1)), 1)


RECURRENT = {
    "lstm": nn.LSTM(3, 4),
    "lstm-deep": nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
    "lstm-projected": nn.LSTM(3, 4, proj_size=2, bias=False),
    "gru": nn.GRU(3, 4, 2, bidirectional=True, batch_first=True),
    "rnn": nn.RNN(3, 4, 2),
    "rnn-relu": nn.RNN(3, 4, nonlinearity="relu", batch_first=True, bias=False),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str) -> None:
    torch.manual_seed(0)
    check(Recurrent(RECURRENT[name]), torch.randn(M, 6, 3), by_loop)


class Cells(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_used_many_times(cell: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check(Cells(cell(3, 4)), torch.randn(M, 6, 3), by_loop)


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.other = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention.kdim == 6:
            return self.attention(x, self.other(x), self.other(x), need_weights=False)[0]
        return (
            self.attention(x, x.flip(1), x.flip(1))[0]
            + self.attention(x, x, x)[0]
            + self.other(x).mean((1, 2), keepdim=True)
        )


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 6}]
)
def test_attention(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    check(Attention(**options), torch.randn(M, 3, 4), by_loop)


def test_transformer_block() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    check(block, torch.randn(M, 6, 8), by_loop)


class Tied(nn.Module):
    """An embedding whose table is also the last layer, and a layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).mean(1)
        for _ in range(3):
            h = self.layer(h).tanh()
        return F.linear(h, self.table.weight)


def test_tied_and_shared_weights() -> None:
    torch.manual_seed(0)
    check(Tied(), torch.randint(7, (M, 3)))


def test_shared_convolution() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)
    # Not by vmap: functional_call does not put back the weights of a module that appears twice.
    check(nn.Sequential(conv, nn.Tanh(), conv), torch.randn(M, 3, 5, 5), by_loop)


def test_batch_norm_in_training_mode() -> None:
    """Through each example's own activations, with the batch's statistics as they are."""
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    layer.weight.data.uniform_(0.5, 1.5)
    x, y = torch.randn(M, 3, 4, 4), torch.randn(M, 3, 4, 4)
    normalised = (x - x.mean((0, 2, 3), keepdim=True)) / (
        x.var((0, 2, 3), correction=0, keepdim=True) + layer.eps
    ).sqrt()
    scale = layer.weight.detach().expand(M, 3).clone().requires_grad_()
    shift = layer.bias.detach().expand(M, 3).clone().requires_grad_()
    out = normalised * scale[:, :, None, None] + shift[:, :, None, None]
    gradients = torch.autograd.grad(((out - y) ** 2).flatten(1).sum(1).mean(), (scale, shift))
    capture = Capture(layer, dict(layer.named_parameters()))
    with capture.block():
        ((layer(x) - y) ** 2).flatten(1).sum(1).mean().backward()
    for p, g in zip((layer.weight, layer.bias), gradients, strict=True):
        torch.testing.assert_close(capture.squares(p), M * g.square().sum(0), rtol=1e-5, atol=1e-6)
