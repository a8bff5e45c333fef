"""torchbayes: networks that know what they don't know.

Train any `nn.Module` with a Bayesian method and get predictions with calibrated uncertainty:

    run = tb.fit(model, (inputs, targets), method="ensemble", epochs=20)
    p = run.predict(new_inputs)
    p.probs, p.confidence, p.epistemic
"""

from typing import TYPE_CHECKING, Any

from torchbayes._version import __version__
from torchbayes.applications.distill import distill
from torchbayes.applications.prune import prune, signal_to_noise
from torchbayes.average import (
    HWA,
    SWA,
    SWAG,
    branching,
    freeze,
    parallelizing,
    recalibrated_samples,
    widening,
)
from torchbayes.checks.nuts import compare_to_nuts
from torchbayes.checks.verify import verify
from torchbayes.core.storage import PosteriorFileError
from torchbayes.data import load_data
from torchbayes.likelihood import Categorical, GaussianNoise, Likelihood, Observation
from torchbayes.optim import (
    ATMC,
    IVON,
    KFAC,
    OGN,
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    VOGN,
    NoisyKFAC,
)
from torchbayes.posterior import (
    Gaussian,
    Generated,
    KroneckerGaussian,
    LowRankGaussian,
    Point,
    Posterior,
    Samples,
    Weights,
    latents,
    load,
    snapshot,
)
from torchbayes.posthoc import conformal_sets, decide, temperature_scaling
from torchbayes.predict.batchnorm import recalibrate_batchnorm
from torchbayes.predict.predictive import predictive
from torchbayes.predict.results import ClassPredictive, Predictive, RegressionPredictive
from torchbayes.prior import (
    GaussianPrior,
    GroupLaplacePrior,
    Prior,
    PriorByName,
    ScaleMixturePrior,
    UnitDirectionPrior,
    resnetpp_prior,
)
from torchbayes.train.failures import TrainingError
from torchbayes.train.fit import Run, fit
from torchbayes.train.methods import METHODS
from torchbayes.train.schedule import Schedule
from torchbayes.train.tracking import Logger, TensorBoard
from torchbayes.variational import (
    Hypernet,
    HypernetSGD,
    MCDropout,
    MeanField,
    flipout,
    local_reparameterisation,
    shared_draw,
)

if TYPE_CHECKING:
    from torchbayes.sklearn import BayesianClassifier, BayesianRegressor

__all__ = [
    "ATMC",
    "HWA",
    "IVON",
    "KFAC",
    "METHODS",
    "OGN",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "SWA",
    "SWAG",
    "VOGN",
    "BayesianClassifier",
    "BayesianRegressor",
    "Categorical",
    "ClassPredictive",
    "Gaussian",
    "GaussianNoise",
    "GaussianPrior",
    "Generated",
    "GroupLaplacePrior",
    "Hypernet",
    "HypernetSGD",
    "KroneckerGaussian",
    "Likelihood",
    "Logger",
    "LowRankGaussian",
    "MCDropout",
    "MeanField",
    "NoisyKFAC",
    "Observation",
    "Point",
    "Posterior",
    "PosteriorFileError",
    "Predictive",
    "Prior",
    "PriorByName",
    "RegressionPredictive",
    "Run",
    "Samples",
    "ScaleMixturePrior",
    "Schedule",
    "TensorBoard",
    "TrainingError",
    "UnitDirectionPrior",
    "Weights",
    "__version__",
    "branching",
    "compare_to_nuts",
    "conformal_sets",
    "decide",
    "distill",
    "fit",
    "flipout",
    "freeze",
    "latents",
    "load",
    "load_data",
    "local_reparameterisation",
    "parallelizing",
    "predictive",
    "prune",
    "recalibrate_batchnorm",
    "recalibrated_samples",
    "resnetpp_prior",
    "shared_draw",
    "signal_to_noise",
    "snapshot",
    "temperature_scaling",
    "verify",
    "widening",
]


def __getattr__(name: str) -> Any:
    # With scikit-learn, which they need, an import of torchbayes takes nearly twice as long.
    if name in ("BayesianClassifier", "BayesianRegressor"):
        from torchbayes import sklearn as estimators

        return getattr(estimators, name)
    raise AttributeError(f"module 'torchbayes' has no attribute {name!r}")
