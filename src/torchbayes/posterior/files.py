"""Reading a posterior of any kind from its file or folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from torchbayes.core.storage import PosteriorFileError, read_tensors
from torchbayes.posterior.posterior import Posterior, Weights
from torchbayes.posterior.samples import Samples

__all__ = ["load"]


def load(path: str | Path, model: nn.Module | None = None) -> Posterior:
    """Read a posterior written by `save`.

    Args:
        path: The file, or the folder of a `Samples` bank.
        model: If given, the posterior must fit this model.

    Raises:
        PosteriorFileError: If the file is missing, cut short, damaged, not a posterior, written by a
            newer version, or of another model. The message says which.

    Example:
        >>> import tempfile, torch, torchbayes as tb
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tb.Point(tb.snapshot(model)).save(f"{folder}/posterior.safetensors")
        ...     tb.load(f"{folder}/posterior.safetensors", model)
        Point(3 weights of a model)
    """
    path = Path(path)
    posterior: Posterior
    if (path / "config.toml").exists():
        raise PosteriorFileError(
            f"{path} is a run folder: torchbayes.load_run(folder, model) loads the run with its likelihood, "
            "and load(folder + '/posterior.safetensors') the posterior alone"
        )
    if path.is_dir():
        posterior = Samples(folder=path)
        if len(posterior) == 0:
            raise PosteriorFileError(
                f"{path} has no draw-000000.safetensors: it is not a bank of samples"
            )
    else:
        header, tensors = read_tensors(path)
        if header.get("kind") not in Posterior.kinds:
            raise PosteriorFileError(
                f"{path} holds a posterior of kind {header.get('kind')!r}; this torchbayes knows "
                f"{', '.join(sorted(Posterior.kinds))}: upgrade torchbayes"
            )
        groups: dict[str, Weights] = {}
        for key, tensor in tensors.items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        try:
            posterior = Posterior.kinds[header["kind"]]._from_file(groups, header["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise PosteriorFileError(
                f"{path} says it is a {header['kind']!r} posterior but its contents do not fit ({error})"
            ) from error
        posterior.model_name = header["model"]
        posterior.rest = str(header["settings"].get("rest", ""))
    if model is not None:
        try:
            posterior.check(model)
        except ValueError as error:
            raise PosteriorFileError(f"{path} does not fit the model: {error}") from error
    return posterior
