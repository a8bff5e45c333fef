"""`fit`: a network and data in, a trained posterior out. The loop itself is in `torchbayes.train.loop`."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core import distributed
from torchbayes.core.batch import as_labels, call, network_dtype, slice_batch, split_batch, suited
from torchbayes.core.device import forked_random_numbers, process_device
from torchbayes.core.names import named_parameters, unwrapped
from torchbayes.core.outputs import Output, output_tensor
from torchbayes.core.parameters import (
    Params,
    check_types,
    frozen_norms,
    kept_modes,
    selected,
    trainable,
    training_only,
)
from torchbayes.core.shards import refuse_sharded
from torchbayes.data.loader import BatchLoader
from torchbayes.data.order import EpochLoader
from torchbayes.data.preprocessing import Preprocessing
from torchbayes.data.stream import live_workers
from torchbayes.likelihood import Likelihood
from torchbayes.posterior import Point, snapshot
from torchbayes.predict.predictive import predictive
from torchbayes.train.budget import default_epochs
from torchbayes.train.data import (
    as_loader,
    device_of,
    leave_out_singles,
    likelihood_for,
    spelled,
)
from torchbayes.train.guard import CHECKED, doubt
from torchbayes.train.identity import identity_settings
from torchbayes.train.loop import Training
from torchbayes.train.method import Method, Plan
from torchbayes.train.progress import NoProgress, Progress, RichProgress
from torchbayes.train.registry import check_options, find_method, method_options
from torchbayes.train.run import Run, output_settings, write_result
from torchbayes.train.run_folder import RunFolder
from torchbayes.train.schedule import Schedule, as_schedule
from torchbayes.train.start import Init, factory, start_of
from torchbayes.train.throughput import (
    FORMATS,
    check_backend,
    check_format,
    choose_format,
    compiled,
    emulates,
    few,
)
from torchbayes.train.tracking import Logger

__all__ = ["fit"]

_LOG = logging.getLogger("torchbayes")
# The examples and draws by which a finished posterior is checked: less than a training step.
_CHECK_DRAWS = 4
_AMP = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_set: Any,
    targets: Any = None,
    method: str = "map",
    *,
    params: Params | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    train_size: int | None = None,
    output: Output = None,
    likelihood: Likelihood | Any | None = None,
    weights: Tensor | None = None,
    split: bool = True,
    init: Init | Sequence[Init] | None = None,
    reset: str | Iterable[str] | None = None,
    validation: Any | None = None,
    transform: Callable[[Any, torch.Generator], Any] | None = None,
    schedule: str | Schedule = "constant",
    clip_norm: float | None = None,
    amp: str | None = None,
    memory_format: str | None = None,
    compile: bool | str = False,
    accumulate: int = 1,
    seed: int = 0,
    device: str | torch.device | None = None,
    in_place: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    config: dict[str, Any] | None = None,
    progress: bool | Progress = True,
    logger: Logger | None = None,
    **options: Any,
) -> Run:
    """Train a network into a posterior.

    With a `folder`, the run survives a kill at any moment: the same call with `resume=True` continues from
    the last checkpoint and ends with bit-equal weights. Ctrl-C saves a checkpoint before it stops.

    Args:
        model: The network, or a function that makes one. A network is not changed: its copy is trained,
            without `torch.compile` and DDP around it, and is `Run.model`. An ensemble needs several random
            starts: a function gives them, a network's layers are asked to `reset_parameters`, except those
            that are frozen. To keep what a network has learned, pass it as `init` too.
        train_set: A pair (inputs, targets) of tensors, arrays or data frames; a dictionary of them with the
            targets under `labels`; a torch data set, map-style or iterable; a `DataLoader` or another
            iterable of batches, a function that returns one, or one of torchbayes' loaders. See
            docs/own-data.md.
        targets: The targets, if `train_set` is the inputs alone; a string is the method, as in
            `fit(model, data, "vogn")`.
        method: A name of `torchbayes.METHODS`, such as `"map"` or `"ensemble"`.
        params: What to train: names or patterns of weights (`"head.*"`, `"*lora_*"`), modules, parameters, or
            a list of these; all that require a gradient if None. The rest, batch-norm statistics included,
            is frozen and no part of the posterior; `Run.model` shares its memory with the network's.
        epochs: Passes through the training set.
        batch_size: Examples per update (not used with a loader). A last batch of a single example is left
            out of every epoch, with a note in the log, if the network's batch norm cannot take it.
        train_size: Number of training examples, for data that cannot tell it, such as an iterable data set.
        output: Where the likelihood's tensor is in what the network returns: a key, an index or a function.
            A tensor, and what is called `logits`, is found without it.
        likelihood: Meaning of the outputs; by default classes for integer targets, binary labels where the
            network has one logit for each 0 or 1, Gaussian noise of learned size for other real targets. It
            is not changed: a learned noise level is that of `Run.likelihood`.
        weights: A factor of each example's negative log-likelihood, (examples,). The loss is still divided by
            the number of examples: weights that average 1 keep the scale. A loader gives them as the third
            entry of a batch.
        split: Whether the training set can be cut into batches along its first dimension; False for a graph,
            whose inputs are passed whole and whose targets count the examples.
        init: Weights to start from: a state dict, a posterior (its mean), a network, or the path of a
            safetensors file; they are copied. For an ensemble also a list of them, one for each member.
        reset: What starts from new random weights in spite of `init`: names of weights or modules, or
            patterns such as `"layer4.*"`. By default nothing, and for an ensemble with a single `init` the
            last layer, so that its members differ. Frozen weights never do.
        validation: Data to score after every epoch, in any of the forms of `train_set`.
        transform: Applied to every batch of inputs, such as normalisation and augmentation. `Run.predict`
            applies what is a `torchbayes.data.Normalise`, and no function of yours.
        schedule: Learning-rate schedule.
        clip_norm: Largest norm of a gradient; no limit if None.
        amp: `"bfloat16"` or `"float16"` to compute the forward pass in that type.
        memory_format: Order of images in memory: `"channels_last"`, `"contiguous"`, or `"auto"` for the
            faster of the two on the first examples; as they come if None. Results differ by rounding alone.
        compile: Whether to run what `torch.compile` makes of the network, or the name of its back end.
            Methods that look into the network's layers (VOGN, OGN, K-FAC, Bayes by Backprop) run it as it is
            written.
        accumulate: Gradient-accumulation steps per update, to save memory.
        seed: Random seed, for the order of the data, augmentation and all draws.
        device: Device to train on; the model's own if None. Under torchrun `"cuda"` is this process's own
            one: that of its `LOCAL_RANK`.
        in_place: Train the network itself, and the likelihood, instead of copies. Which of its modules are in
            training mode is as before afterwards.
        folder: Run folder, for checkpoints, metrics and the posterior.
        resume: Continue the run in `folder`, if there is one.
        checkpoint_seconds: Time between checkpoints.
        config: What to write to the folder's config.toml besides these settings.
        progress: Show a progress bar; or the object that shows it.
        logger: Receives per-epoch metrics and the posterior's path, such as `torchbayes.TensorBoard`.
        **options: Options of the method, such as `lr`; `torchbayes methods NAME` lists them.

    Raises:
        ValueError: If an argument or the data is not as described.
        TrainingError: If the loss explodes or is not finite, also after training has gone back to its last
            good state with a learning rate 0.3 times as large, three times at most and with a warning each;
            it names the step and the layer.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.randn(200, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> run = tb.fit(net, (x, y), method="map", epochs=20, lr=0.01, progress=False)
        >>> bool((run.predict(x).prediction == y).float().mean() > 0.9)
        True
    """
    given = {name: value for name, value in locals().items() if name != "options"}
    train_set, method = spelled(train_set, targets, method)
    method_class = find_method(method)
    check_options(method_class, options)
    schedule = as_schedule(schedule)
    _check_numbers(epochs, batch_size, accumulate, train_size, clip_norm, amp)
    check_backend(compile)
    if memory_format not in (None, *FORMATS):
        raise ValueError(
            f"memory_format is {memory_format!r}: expected {', '.join(FORMATS)} or None"
        )
    if accumulate > 1 and not split:
        raise ValueError(
            f"accumulate is {accumulate}, but split=False passes inputs whole: leave out one"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(live_workers())
        stack.enter_context(distributed.process_group(device))
        stack.enter_context(_seeded(seed))
        # A resumed run reads all weights, and other processes receive them: then nothing can be shared.
        shared = not resume and distributed.world_size() == 1
        made, params = _own_network(model, params, in_place, shared)
        place = process_device(device, device_of(made))
        distributed.refuse_shared(place)
        if place != device_of(made):
            made = made.to(place)
        if in_place:
            stack.enter_context(kept_modes(made))
        stack.enter_context(training_only(made, params))
        check_types(made, trainable(made), sparse_gradients=True)
        resting = frozen_norms(made)
        made.train()  # as it is in every epoch: what a posterior holds depends on it
        for norm in resting:
            norm.eval()
        refuse_sharded(
            made.parameters(),
            f"{type(made).__name__} is sharded (fully_shard), which fit does not take: train it in a loop of "
            "your own with tb.IVON, a sampler or tb.SWAG",
        )
        start = start_of(init, reset, made, several=method_class.starts_apart)
        new_model = factory(model, made, start)
        if start is not None:
            if isinstance(model, nn.Module):  # a function has just made random weights
                start.redraw(made, new_model())
            start.apply(made)
        rank, world = distributed.rank(), distributed.world_size()
        begun = world  # processes; each has chains or members of its own, if they do not share the batches
        if method_class.one_per_rank and folder is not None and resume:
            begun = RunFolder(folder).processes() or world
        others = range(rank + world, begun, world)
        if in_place and others:
            given["model"] = copy.deepcopy(model)
        shard = (0, 1) if method_class.one_per_rank else (rank, world)
        loader = as_loader(
            train_set, batch_size, seed, transform, shard, train_size=train_size, weights=weights,
            split=split,
        )  # fmt: skip
        if method_class.independent_batches:
            loader = copy.copy(loader)
            loader.independent = True
        held_out = None
        if validation is not None:
            held_out = as_loader(validation, 512, 0, transform, (0, 1), shuffle=False, split=split)
        noise = likelihood_for(made, loader, likelihood, output)
        if (
            not in_place
            and noise is likelihood
            and any(p.requires_grad for p in noise.parameters())
        ):
            noise = copy.deepcopy(noise)  # what the next run is given must not be this one's result
        noise = noise.to(device_of(made))
        leave_out_singles(made, loader)
        if not method_class.one_per_rank:
            distributed.broadcast([*made.parameters(), *made.buffers()])
        torch.manual_seed(
            seed + 1_000_003 * (rank + 1)
        )  # the model is made: from here on ranks differ
        plan = Plan(
            train_size=loader.num_examples if train_size is None else train_size,
            epochs=default_epochs(len(loader)) if epochs is None else epochs,
            steps_per_epoch=len(loader),
            batch_size=loader.batch_size,
            peek=loader.peek,
            joins=isinstance(loader, BatchLoader)
            and accumulate == 1
            and not (clip_norm or amp or compile or memory_format),
            generator=torch.Generator(device_of(made)).manual_seed(seed + 7_919 * (rank + 1)),
            new_model=new_model,
            schedule=schedule,
            rank=rank,
            world_size=begun,
            output=output,
            start=start,
        )
        used = _used_format(
            memory_format, made, loader, noise, output, amp, folder if resume else None
        )
        defaults, changed = _defaults(method_class, options, folder if resume else None)
        chosen = _chosen(method_class, options, folder if resume else None, begun)
        settings = {
            "method": method,
            "epochs": plan.epochs,
            "batch_size": loader.batch_size,
            "seed": seed,
            "train_size": plan.train_size,
            "network": type(made).__name__,
            **output_settings(output),
            **schedule.settings(),
            "clip_norm": clip_norm,
            "amp": amp,
            "memory_format": memory_format,
            "chosen_format": used if memory_format == "auto" else None,
            "compile": (compile if isinstance(compile, str) else "inductor") if compile else None,
            "accumulate": accumulate,
            "params": None if params is None else list(params),
            "options": {name: _plain(value) for name, value in options.items()},
            "defaults": defaults,
            "processes": begun if method_class.one_per_rank and begun > 1 else None,
            **({} if start is None else start.settings()),
            **({} if folder is None else identity_settings(made, noise, loader, config or {})),
            **({} if config is None else config),
        }
        driver = method_class(made, noise, plan, **{**changed, **chosen}, **options)
        settings["chosen"] = chosen or driver.chosen or None
        training = Training(
            method=driver,
            loader=loader,
            validation=held_out,
            clip_norm=clip_norm,
            amp=None if amp is None else _AMP[amp],
            accumulate=accumulate,
            checkpoint_seconds=checkpoint_seconds,
            memory_format=used,
            resting=resting,
            idle=rank >= begun,
            logger=logger,
        )
        with training.opened(folder, settings, resume, config):
            shown = _progress(progress, rank)
            said = None if start is None else str(start)
            if start is None and method_class.starts_apart and isinstance(model, nn.Module):
                said = (
                    "starts from new random weights, not those of the given network: to keep them, pass "
                    "init"
                )
            if said is not None:
                _LOG.info("%s %s", method, said)
                shown.note(f"{method} {said}")
            if emulates(amp, place):
                slow = (
                    f"{amp} is emulated on this processor, which makes convolutions far slower: leave out "
                    "amp"
                )
                _LOG.warning(slow)
                shown.note(slow)
            if world != begun and rank == 0:
                _LOG.warning(
                    "a run of %d processes, each with chains or members of its own, goes on with %d%s",
                    begun, world, "" if world < begun else "; the others have nothing to do",
                )  # fmt: skip
            for other in others:
                with distributed.standing_in(other, begun):
                    fit(**(given | {"in_place": False, "progress": False} | options))
            with compiled(made, compile):
                training.run(shown)
            if distributed.stands_in():
                return Run(
                    made, Point(snapshot(made)), training.history, noise, method, training.seconds
                )
            run = Run(
                made, training.pooled(), training.history, noise, method,
                training.seconds, output, settings, Preprocessing.of(loader.transform),
                folder=None if folder is None else Path(folder),
            )  # fmt: skip
            _check_posterior(run, training)
            if training.folder is not None and rank == 0:
                write_result(run, training.folder)
                if logger is not None:
                    logger.artifact(training.folder.posterior_file)
            distributed.barrier()
    return run


def _check_posterior(run: Run, training: Training) -> None:
    """Warn if the posterior predicts some of its own training data worse than the network at the start."""
    plain = getattr(run.likelihood, "ignore_index", None) is None and not any(
        getattr(run.likelihood, n, None) is not None for n in ("class_weight", "positive_weight")
    )
    guard = training.guard
    if not training.seen or guard.start is None or not plain or distributed.rank() > 0:
        return
    seen = training.seen
    if training.loader.splits:
        seen = [(slice_batch(inputs, 0, CHECKED), targets[:CHECKED]) for inputs, targets in seen]
    inputs, targets = seen if len(seen) > 1 else seen[0][0], torch.cat([batch for _, batch in seen])
    generator = torch.Generator(device_of(run.model)).manual_seed(0)
    try:
        found = predictive(
            run.model, run.posterior, inputs, _CHECK_DRAWS, likelihood=run.likelihood,
            output=run.output, recalibrate=False, generator=generator,
        )  # fmt: skip
        said = doubt(found, targets, guard, run.posterior)
    except Exception as error:  # it must not cost a finished run; what is wrong, `predict` will say
        _LOG.info("the posterior could not be checked: %s", error)
        return
    if said is not None:
        warnings.warn(
            f"do not trust this posterior: {said}; try more epochs or a smaller lr", stacklevel=3
        )


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them afterwards."""
    with forked_random_numbers():
        torch.manual_seed(seed)
        yield


def _progress(progress: bool | Progress, rank: int) -> Progress:
    if isinstance(progress, Progress):
        return progress
    return RichProgress() if progress and rank == 0 else NoProgress()


def _plain(option: Any) -> Any:
    """Return an option as config.toml can hold it: a function by its name, a prior by its description."""
    if option is None or isinstance(option, (bool, int, float, str, list, tuple)):
        return option
    return getattr(option, "__name__", repr(option))


def _defaults(
    method: type[Method], options: dict[str, Any], resumed: str | Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of options that are not given, and those that a resumed run has in place of them.

    A newer version may have other defaults: a run goes on with those of the version that began it. What a
    class computes for None is part of its optimiser's state.

    Args:
        method: The method.
        options: The options that are given.
        resumed: Folder of the run to continue, if any.
    """
    now = {
        name: "None" if option.default is None else option.default
        for name, option in method_options(method).items()
        if name not in options and _is_plain(option.default)
    }
    files = None if resumed is None else RunFolder(resumed)
    if files is None or not files.config_file.exists():
        return now, {}
    kept = files.read_config().get("defaults")
    if not isinstance(kept, dict):
        return now, {}
    then = {name: _without_lists(value) for name, value in kept.items() if name in now}
    changed = {
        name: None if value == "None" else value
        for name, value in then.items()
        if value != now[name]
    }
    return {**now, **then}, changed


def _chosen(
    method: type[Method], options: dict[str, Any], resumed: str | Path | None, begun: int
) -> dict[str, Any]:
    """Return the options that a run to continue has chosen by a trial, which need not end alike again.

    Args:
        method: The method.
        options: The options that are given.
        resumed: Folder of the run, if any.
        begun: How many processes began it.
    """
    files = None if resumed is None else RunFolder(resumed)
    if files is None or not files.config_file.exists():
        return {}
    # Versions that wrote none down gave each of several processes a single chain.
    kept = files.read_config().get("chosen", {"chains": 1} if begun > 1 else {})
    known = method_options(method).keys() - options.keys()
    return {n: v for n, v in kept.items() if n in known} if isinstance(kept, dict) else {}


def _used_format(
    asked: str | None,
    model: nn.Module,
    loader: EpochLoader,
    likelihood: Likelihood,
    output: Output,
    amp: str | None,
    resumed: str | Path | None,
) -> str | None:
    """Return the memory format to train in: the given one, the faster one, or that of a run to continue."""
    if asked in (None, "contiguous"):
        return asked
    files = None if resumed is None else RunFolder(resumed)
    if files is not None and files.config_file.exists():
        kept = files.read_config().get("chosen_format", asked)
        return str(kept) if kept in FORMATS[1:] else asked
    device, (inputs, targets) = device_of(model), split_batch(loader.peek())
    assert targets is not None  # likelihood_for has checked it
    inputs, targets = few(inputs, as_labels(targets).to(device), loader.splits)

    def loss(network: nn.Module, given: Any) -> Tensor:
        with torch.autocast(
            device.type, None if amp is None else _AMP[amp], enabled=amp is not None
        ):
            return likelihood.loss(output_tensor(call(network, given), output), targets)

    inputs = suited(inputs, device, network_dtype(model))
    if asked == "auto":
        return choose_format(model, loss, inputs)
    assert asked is not None
    check_format(model, loss, inputs, asked)
    return asked


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _without_lists(value: Any) -> Any:
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value


def _check_numbers(
    epochs: int | None,
    batch_size: int | None,
    accumulate: int,
    train_size: int | None,
    clip_norm: float | None,
    amp: str | None,
) -> None:
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("accumulate", accumulate)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected a whole number of at least 1")
    if train_size is not None and train_size < 1:
        raise ValueError(f"train_size is {train_size}: expected the number of training examples")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm:g}: expected a norm above 0")
    if amp is not None and amp not in _AMP:
        raise ValueError(f"amp is {amp!r}: expected bfloat16 or float16")


def _own_network(
    model: nn.Module | Callable[[], nn.Module], params: Params | None, in_place: bool, shared: bool
) -> tuple[nn.Module, list[str] | None]:
    """Return the network to train and the names of what to train: the user's own is not to be changed."""
    if not isinstance(model, nn.Module):
        made = unwrapped(model())
        return made, None if params is None else list(selected(made, params))
    model = unwrapped(model)
    chosen = None if params is None else selected(model, params)
    names = None if chosen is None else list(chosen)
    if in_place:
        return model, names
    memo: dict[int, Any] = {}
    if shared:  # what is frozen is not written to, so that a large body need not be copied
        memo = {
            id(p): nn.Parameter(p.detach(), requires_grad=False)
            for name, p in named_parameters(model).items()
            if type(p) is nn.Parameter
            and not (p.requires_grad and (names is None or name in names))
        }
    try:
        return copy.deepcopy(model, memo), names
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied ({str(error).splitlines()[0]}), and fit trains a copy: "
            "pass in_place=True to train the network itself, or a function that makes it"
        ) from error
