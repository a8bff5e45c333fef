"""Write a network averaged over draws to a file that runs without torchbayes: ONNX, or torch.export's pt2.

Before a file is written, its content is run on the given examples, all at once and the first one alone, and
held against `predictive`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from torchbayes._version import __version__
from torchbayes.core.arrays import as_inputs
from torchbayes.core.batch import (
    batch_len,
    map_leaves,
    map_tensors,
    network_dtype,
    slice_batch,
    suited,
)
from torchbayes.core.device import generator_state
from torchbayes.core.outputs import Output
from torchbayes.core.storage import atomic_path
from torchbayes.likelihood import Categorical, Likelihood, as_likelihood
from torchbayes.posterior import Posterior
from torchbayes.posterior.posterior import plain_network
from torchbayes.predict.batchnorm import recalibrate_batchnorm
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import Predictive
from torchbayes.serving.drawn_network import DrawnNetwork, prediction_tensors

__all__ = ["FORMATS", "Exported", "export"]

FORMATS = ("onnx", "pt2")

_KEY = "torchbayes"  # of the description in a file
_LARGEST = 2 << 30  # bytes: what a protocol buffer can hold
_TRACED = 3  # examples: neither 0 nor 1, which torch.export would take for constants
_WRONG = 1e-3  # rounding gives 1e-6: what differs by more computes something else


@dataclass(frozen=True)
class Exported:
    """A file that `export` has written.

    Attributes:
        path: The file.
        format: `"onnx"` or `"pt2"`.
        draws: Number of draws in it.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.
        differences: For each output, the largest difference to `predictive` on the given examples, as a
            share of the largest value if that is above 1.
        about: What the file says about itself.
    """

    path: Path
    format: str
    draws: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differences: Mapping[str, float]
    about: Mapping[str, Any]

    @property
    def difference(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values())


def export(
    model: nn.Module, posterior: Posterior, inputs: Any, path: str | Path, samples: int = 32,
    likelihood: Likelihood | None = None, generator: torch.Generator | None = None, *,
    format: str | None = None, output: Output = None,
    recalibrate: Iterable[Any] | Literal[False] | None = None,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Predictive], Predictive] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Exported:  # fmt: skip
    """Write predictions of a network under some draws of its weights to a file, and check the file.

    The file takes a batch of any size and gives what `predictive` gives: for labels `probabilities`,
    `entropy`, `aleatoric` and `epistemic`, for numbers `mean`, `std`, `aleatoric` and `epistemic`. It holds
    every draw, so its size is that of the network times `samples`; weights that no draw changes are held
    once. For the mean of a posterior instead of draws, pass `torchbayes.Point(posterior.mean())`.

    Args:
        model: The network, or the wrapper that it was trained in.
        posterior: The posterior to draw from.
        inputs: Some examples as the file is to take them, a tensor, array, tuple or dictionary of them. Only
            their number may differ later; the file does not keep them.
        path: File to write.
        samples: Number of draws. A finite posterior, such as an ensemble, gives each member once.
        likelihood: Meaning of the network's outputs; class logits if None.
        generator: Source of the draws; torch's global one if None.
        format: `"onnx"` or `"pt2"` (`torch.export`); by default the ending of `path`.
        output: Where the likelihood's tensor is in what the model returns; see `predictive`.
        recalibrate: Batches of training data for the batch-norm statistics of each draw; see `predictive`.
        before: Function from the file's inputs to those of the model, such as a `torchbayes.data.Normalise`:
            it becomes part of the file.
        after: Function of the prediction, such as a `TemperatureScaling`: likewise.
        about: What else the file should say about itself, as JSON can hold it.

    Raises:
        ValueError: If torch.export cannot take the model, or the file would not agree with `predictive`;
            nothing is written then.
        ImportError: If onnx, onnxscript or onnxruntime is not installed and the format is `"onnx"`.

    Example:
        >>> import torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 3)
        >>> q = tb.Gaussian(tb.snapshot(model), {"weight": torch.full((3, 2), 0.5)})
        >>> folder = getfixture("tmp_path")
        >>> file = tb.serving.export(model, q, torch.randn(5, 2), folder / "model.pt2", samples=4)
        >>> file.outputs, file.difference < 1e-5
        (('probabilities', 'entropy', 'aleatoric', 'epistemic'), True)
        >>> torch.export.load(folder / "model.pt2").module()(torch.zeros(7, 2))["probabilities"].shape
        torch.Size([7, 3])
    """
    path = Path(path)
    format = _checked_format(path, format)
    if format == "onnx":
        _require_onnx()
    if samples < 1:
        raise ValueError(f"samples is {samples}: expected at least 1 draw")
    network = plain_network(model)
    posterior.check(network)
    likelihood = Categorical() if likelihood is None else as_likelihood(likelihood)
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    if recalibrate is not None and recalibrate is not False:
        posterior = recalibrate_batchnorm(
            network, posterior, recalibrate, samples, generator=generator
        )
        recalibrate = False
    examples = map_tensors(as_inputs(inputs), lambda tensor: tensor.detach().cpu())
    if before is None:
        examples = suited(examples, "cpu", network_dtype(network))
    if batch_len(examples) == 0:
        raise ValueError("there are no examples in the inputs: give at least one")
    state = generator_state(generator)
    ready = examples if before is None else before(examples)
    prediction = predictive(
        network,
        posterior,
        ready,
        samples,
        likelihood,
        generator,
        output=output,
        recalibrate=recalibrate,
    )
    wanted = prediction_tensors(prediction if after is None else after(prediction))
    draws = list(posterior.draws(samples, generator.set_state(state)))
    traced = _some(examples)
    module = DrawnNetwork(
        network, posterior, draws, likelihood, traced, before=before, after=after, output=output
    )  # fmt: skip
    description = {
        "torchbayes": __version__,
        "model": type(network).__name__,
        "posterior": type(posterior).__name__,
        "draws": len(draws),
        "likelihood": type(likelihood).__name__,
        **({} if about is None else about),
    }
    names = _input_names(examples)
    content = _content(
        module, traced, names, list(wanted), format, json.dumps(description, allow_nan=False)
    )
    differences = _differences(content, format, examples, wanted)
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= _WRONG:
        raise ValueError(
            f"the {format} file of {type(network).__name__} would give another {worst} than predictive, by "
            f"up to {differences[worst]:.2g}, so it was not written: use the other format"
        )
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
    return Exported(path, format, len(draws), names, tuple(wanted), differences, description)


def _checked_format(path: Path, format: str | None) -> str:
    found = path.suffix.removeprefix(".") if format is None else format
    if found not in FORMATS:
        given = f"{path} ends in {path.suffix!r}" if format is None else f"format is {format!r}"
        raise ValueError(f"{given}: expected {' or '.join(FORMATS)}")
    return found


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"an ONNX file needs {error.name}, which is not installed: pip install 'torchbayes[export]', or "
            "choose the format pt2"
        ) from error


def _some(examples: Any) -> Any:
    """Return the number of examples to trace with, repeated if there are fewer."""

    def some(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        times = -(-_TRACED // len(tensor))
        return torch.cat([tensor] * times)[:_TRACED] if times > 1 else tensor[:_TRACED]

    return map_tensors(examples, some)


def _input_names(examples: Any) -> tuple[str, ...]:
    if isinstance(examples, Mapping):
        return tuple(map(str, examples))
    if isinstance(examples, Tensor):
        return ("inputs",)
    return tuple(f"inputs_{number}" for number in range(len(examples)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from reporting on itself, and its distributions from looking at values."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch.export")]
    levels = [logger.level for logger in loggers]
    checks = Distribution._validate_args
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        Distribution.set_default_validate_args(False)
        # A failed export prints its graph.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        Distribution.set_default_validate_args(checks)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _content(
    module: DrawnNetwork, traced: Any, names: tuple[str, ...], outputs: list[str], format: str, about: str
) -> bytes:  # fmt: skip
    """Return the content of the file."""
    network = type(module.network).__name__
    size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
    if size >= _LARGEST:
        raise ValueError(
            f"the draws of {network} take {size / 2**30:.1f} GB, more than the 2 GB of a file: give fewer "
            "samples"
        )
    batch = torch.export.Dim("batch")
    shapes = map_leaves(
        traced, lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.dim() else None
    )
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(
                module, (traced,), dynamic_shapes={"inputs": shapes}, strict=False
            )
            # The file would keep the examples, and the paths of the code.
            program.example_inputs = ((map_tensors(traced, torch.zeros_like),), {})
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)
            if format == "pt2":
                buffer = io.BytesIO()
                torch.export.save(program, buffer, extra_files={f"{_KEY}.json": about})
                return buffer.getvalue()
            return _onnx_content(program, names, outputs, about)
    except Exception as error:
        # Whatever torch, its compiler or onnxscript raises about a model that they cannot take.
        raise ValueError(
            f"torch.export cannot take {network} ({_reason(error)}): change its code"
            + " or choose the format pt2" * (format == "onnx")
        ) from error


_REASONS = {
    "data-dependent": "what it computes depends on the values of a tensor, as in `if x.sum() > 0`",
    "Constraints violated": "what it computes depends on the number of examples, as in len(x)",
}


def _reason(error: BaseException) -> str:
    """Say why torch.export failed: in our words if we have some, else in the first line of the cause."""
    text = str(error)
    for sign, reason in _REASONS.items():
        if sign in text:
            return reason
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if missing:
        return f"ONNX has no {missing[1]}"
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:")


def _onnx_content(program: Any, names: tuple[str, ...], outputs: list[str], about: str) -> bytes:
    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    inner = made.model.graph
    # Named here, because torch would let a name that is given collide with one that it has used.
    for node in inner:
        for value in node.outputs:
            value.name = f"inner_{value.name}"
    for value, name in zip((*inner.inputs, *inner.outputs), (*names, *outputs), strict=True):
        value.name = name
    proto = made.model_proto
    graph = proto.graph
    # torch gives the size of a batch a name such as s77.
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == symbol:
                size.dim_param = "batch"
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]  # where in the code it is from
    entry = proto.metadata_props.add()
    entry.key, entry.value = _KEY, about
    content: bytes = proto.SerializeToString()
    return content


def _run(content: bytes, format: str) -> Callable[[Any], dict[str, Tensor]]:
    """Return a function that runs the content of a file."""
    if format == "pt2":
        with _quiet():
            loaded = torch.export.load(io.BytesIO(content)).module()
        return loaded
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each code
        raise ValueError(
            f"onnxruntime cannot run the file ({_reason(error)}), so it was not written: choose the format "
            "pt2"
        ) from error
    outputs = [output.name for output in session.get_outputs()]

    def run(inputs: Any) -> dict[str, Tensor]:
        leaves = [t.numpy() for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        fed = {node.name: array for node, array in zip(session.get_inputs(), leaves, strict=True)}
        return {
            name: torch.from_numpy(np.asarray(array))
            for name, array in zip(outputs, session.run(None, fed), strict=True)
        }

    return run


def _differences(
    content: bytes, format: str, examples: Any, wanted: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the largest difference of each output, for all examples together and for the first one alone."""
    run = _run(content, format)
    found = dict.fromkeys(wanted, 0.0)
    with torch.no_grad():
        for count in dict.fromkeys((batch_len(examples), 1)):
            given = run(slice_batch(examples, 0, count))
            for name, truth in wanted.items():
                found[name] = max(found[name], _difference(given[name], truth[:count].cpu()))
    return found


def _difference(given: Tensor, truth: Tensor) -> float:
    given, truth = given.double(), truth.double()
    if given.shape != truth.shape or not torch.equal(given.isfinite(), truth.isfinite()):
        return math.inf
    finite = truth.isfinite()
    off, size = (given - truth)[finite].abs(), truth[finite].abs()
    return float(off.max()) / max(1.0, float(size.max())) if finite.any() else 0.0
