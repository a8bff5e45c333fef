"""Functions that torch runs as a whole, taken apart so that a mode sees the linear maps inside them.

`torch.nn.functional.multi_head_attention_forward` and similar functions pass themselves to an active mode as
a whole; `opened` runs their bodies instead, with the dropout masks, shapes and flags that were actually used.

A whole LSTM, GRU or RNN is one function in C++. Here it is run step by step instead, in torch's order of
operations, so that the rule for linear maps sees every use of every weight, whatever the direction,
projection or dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbayes.core.opened import opened

if TYPE_CHECKING:
    from torchbayes.curvature.capture import Capture

__all__ = ["CELLS", "LAYERS", "opened", "recurrent", "recurrent_cell"]

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor | None]], State]


# A step takes the input's share of the gates, the state and the recurrent weights (W, b, and the projection
# of an LSTM that has one).


def _lstm(gates_x: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    hidden, cell = state
    w, b, projection = weights
    assert w is not None
    i, f, g, o = (gates_x + F.linear(hidden, w, b)).chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return (hidden if projection is None else F.linear(hidden, projection)), cell


def _gru(gates_x: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    (hidden,) = state
    w, b, _ = weights
    assert w is not None
    x_r, x_z, x_n = gates_x.chunk(3, -1)
    h_r, h_z, h_n = F.linear(hidden, w, b).chunk(3, -1)
    update = (x_z + h_z).sigmoid()
    new = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (new + update * (hidden - new),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(gates_x: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        w, b, _ = weights
        assert w is not None
        return (activation(gates_x + F.linear(state[0], w, b)),)

    return step


LAYERS: dict[Any, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn(torch.tanh),
    torch.rnn_relu: _rnn(torch.relu),
}
CELLS: dict[Any, Step] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _rnn(torch.tanh),
    torch.rnn_relu_cell: _rnn(torch.relu),
}


def recurrent_cell(capture: Capture, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply the rule for `nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`."""
    x, hx, w_ih, w_hh, *biases = (*args, *kwargs.values())
    b_ih, b_hh = biases if biases else (None, None)
    with capture:
        state = tuple(hx) if func is torch.lstm_cell else (hx,)
        result = CELLS[func](F.linear(x, w_ih, b_ih), state, (w_hh, b_hh, None))
    return result if func is torch.lstm_cell else result[0]


def recurrent(capture: Capture, func: Callable[..., Any], *args: Any) -> Any:
    """Apply the rule for `nn.LSTM`, `nn.GRU` and `nn.RNN`."""
    if isinstance(args[3], (list, tuple)):  # (data, batch_sizes, hx, weights, …)
        weight = next(t for t in args[3] if capture.tracker.target(t) is not None)
        raise ValueError(
            f"{capture.tracker.describe(weight)} is used on a packed sequence, whose examples torchbayes "
            "cannot tell apart: give the layer a padded tensor and mask the padding in the loss"
        )
    x, hx, flat, biases, layers, dropout, training, both_ways, batch_first = args
    states = tuple(hx) if func is torch.lstm else (hx,)
    per_layer = len(flat) // (layers * (2 if both_ways else 1))
    with capture:
        x = x if batch_first else x.transpose(0, 1)
        last: list[State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(2 if both_ways else 1):
                place = len(last)
                weights = flat[place * per_layer : (place + 1) * per_layer]
                start = tuple(s[place] for s in states)
                output, end = _run(LAYERS[func], x, start, weights, biases, direction == 1)
                outputs.append(output)
                last.append(end)
            x = torch.cat(outputs, -1) if both_ways else outputs[0]
            if layer + 1 < layers and dropout > 0:
                x = F.dropout(x, dropout, training)
        x = x if batch_first else x.transpose(0, 1)
        ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
    return x, *ends


def _run(
    step: Step, x: Tensor, state: State, weights: Sequence[Tensor], biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction, over inputs of shape (examples, times, features)."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if biases else (None, None)
    rest = rest[2:] if biases else rest
    recurrent_weights = (w_hh, b_hh, rest[0] if rest else None)
    gates_x = F.linear(x, w_ih, b_ih).unbind(1)
    outputs: list[Tensor] = []
    for gates in reversed(gates_x) if backwards else gates_x:
        state = step(gates, state, recurrent_weights)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, 1), state
