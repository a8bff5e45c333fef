"""Observers of another optimiser's path: averages of weights, or of a mean field's means and variances."""

from torchbayes.average.batchnorm import recalibrated_samples
from torchbayes.average.hwa import HWA
from torchbayes.average.swa import SWA
from torchbayes.average.swag import SWAG

__all__ = ["HWA", "SWA", "SWAG", "recalibrated_samples"]
