"""Corrections after training: temperature, sets and intervals with a coverage guarantee, abstention.

Each is fitted to predictions on examples that were not trained on, and then applied to new ones.
"""

from torchbayes.posthoc.abstain import Abstention, abstain
from torchbayes.posthoc.calibration import Calibration, calibrate
from torchbayes.posthoc.conformal import (
    ConformalIntervals,
    ConformalSets,
    conformal_intervals,
    conformal_sets,
)
from torchbayes.posthoc.temperature import TemperatureScaling, temperature_scaling

__all__ = [
    "Abstention",
    "Calibration",
    "ConformalIntervals",
    "ConformalSets",
    "TemperatureScaling",
    "abstain",
    "calibrate",
    "conformal_intervals",
    "conformal_sets",
    "temperature_scaling",
]
