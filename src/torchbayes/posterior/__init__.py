"""What a method has learned about the weights, in one of a few forms that everything downstream shares.

A `Posterior` is the narrow waist of the library: every method produces one, and predictions, metrics and
reports start from one without knowing which method produced it. A draw is a plain dictionary from the names
of `model.state_dict()` to tensors, ready for `torch.func.functional_call`.

Files are safetensors with a JSON header. Reading one never unpickles and never runs code.
"""

from torchbayes.core.storage import PosteriorFileError
from torchbayes.posterior.dropout import DropoutPosterior
from torchbayes.posterior.files import load
from torchbayes.posterior.full import FullGaussian
from torchbayes.posterior.gaussian import Gaussian, LowRankGaussian
from torchbayes.posterior.generated import Generated
from torchbayes.posterior.kronecker import KroneckerGaussian
from torchbayes.posterior.partial import digest_of_rest, held_names
from torchbayes.posterior.point import Point
from torchbayes.posterior.posterior import Posterior, Weights, Wrapper, snapshot
from torchbayes.posterior.rows import RowGaussian
from torchbayes.posterior.samples import Samples
from torchbayes.posterior.shrunk import ShrunkGaussian

__all__ = [
    "DropoutPosterior",
    "FullGaussian",
    "Gaussian",
    "Generated",
    "KroneckerGaussian",
    "LowRankGaussian",
    "Point",
    "Posterior",
    "PosteriorFileError",
    "RowGaussian",
    "Samples",
    "ShrunkGaussian",
    "Weights",
    "Wrapper",
    "digest_of_rest",
    "held_names",
    "load",
    "snapshot",
]
