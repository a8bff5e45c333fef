"""R-hat and effective sample size by ArviZ, with either of its two data types.

A. Vehtari et al., Rank-normalization, folding, and localization: an improved R-hat for assessing convergence
of MCMC, Bayesian Analysis 2021. R-hat is the larger of the rank-normalised split one and its folded form;
the effective sample size is that of the bulk.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["by_chain", "ess", "rhat", "to_arviz"]

Array = npt.NDArray[np.float64]
_FEWEST = 4  # draws per chain: it is split in two, and a half of one draw has no variance


def _arviz() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 0.x announces 1.x on import
            import arviz
    except ImportError as error:
        raise ImportError(
            "R-hat and effective sample sizes are ArviZ's, which is not installed: pip install "
            "'torchbayes[diagnostics]'"
        ) from error
    module: ModuleType = arviz
    return module


def by_chain(values: npt.ArrayLike, chains: Sequence[int]) -> Array:
    """Group the values of draws by chain, cut to one length: (draws, …) becomes (chains, draws, …).

    Args:
        values: One entry per draw.
        chains: Chain of each draw, such as `Samples.chains`. The last draws of longer chains are left out.

    Example:
        >>> by_chain([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]).tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    array, numbers = np.asarray(values, dtype=np.float64), np.asarray(chains)
    if len(array) != len(numbers):
        raise ValueError(
            f"there are {len(array)} values but {len(numbers)} chain numbers: give one per draw"
        )
    parts = [array[numbers == number] for number in dict.fromkeys(numbers.tolist())]
    shortest = min(map(len, parts))
    return np.stack([part[:shortest] for part in parts])


def to_arviz(**quantities: npt.ArrayLike) -> Any:
    """Convert arrays (chains, draws, …) to ArviZ's data: `InferenceData` in 0.x, `DataTree` in 1.x.

    Args:
        **quantities: Named arrays; they become the group `posterior`.
    """
    arviz = _arviz()
    named = {name: np.asarray(value) for name, value in quantities.items()}
    with warnings.catch_warnings():
        # ArviZ warns if there are more chains than draws, in case the axes were swapped; here they are not.
        warnings.simplefilter("ignore", UserWarning)
        if int(arviz.__version__.partition(".")[0]) < 1:
            return arviz.from_dict(posterior=named)
        return arviz.from_dict({"posterior": named})


def _checked(values: npt.ArrayLike, chains: int, what: str) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 2 or array.shape[0] < chains:
        count = array.shape[0] if array.ndim >= 2 else 1
        raise ValueError(
            f"{what} needs at least {chains} chains and there is {count}: run more with the option chains or "
            "under torchrun"
        )
    if array.shape[1] < _FEWEST:
        raise ValueError(
            f"{what} needs at least {_FEWEST} draws per chain and there are {array.shape[1]}: keep more "
            "samples"
        )
    return array


def rhat(values: npt.ArrayLike) -> Array:
    """Compute R-hat of every quantity: near 1 if the chains agree; above 1.01 they do not yet.

    Args:
        values: (chains, draws, …), at least 2 chains of 4 draws.

    Returns:
        An array of the remaining shape, NaN for a quantity that never changes.

    Raises:
        ValueError: If there are fewer than 2 chains or too few draws.
    """
    array = _checked(values, 2, "R-hat")
    with np.errstate(invalid="ignore", divide="ignore"):  # of constant quantities
        return np.asarray(_arviz().rhat(to_arviz(x=array), method="rank")["x"].values)


def ess(values: npt.ArrayLike) -> Array:
    """Compute the bulk effective sample size of every quantity.

    Args:
        values: (chains, draws, …), at least 4 draws per chain.
    """
    array = _checked(values, 1, "an effective sample size")
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(_arviz().ess(to_arviz(x=array), method="bulk")["x"].values)
