"""What can be put right after training: temperature, sets with a coverage guarantee, abstention.

Each is fitted on predictions of examples that were not trained on, and then applied to new ones.
"""

from torchbayes.posthoc.conformal import ConformalSets, conformal_sets
from torchbayes.posthoc.decide import Abstention, decide
from torchbayes.posthoc.temperature import TemperatureScaling, temperature_scaling

__all__ = [
    "Abstention",
    "ConformalSets",
    "TemperatureScaling",
    "conformal_sets",
    "decide",
    "temperature_scaling",
]
