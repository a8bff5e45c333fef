"""torchbayes: networks that know what they don't know.

Train any `nn.Module` with a Bayesian method and get predictions with calibrated uncertainty:

    run = tb.fit(model, (inputs, targets), method="ensemble", epochs=20)
    p = run.predict(new_inputs)
    p.probs, p.confidence, p.epistemic
"""

from typing import TYPE_CHECKING

from torchbayes._version import __version__ as __version__

# A name is imported when it is first used, so that neither `import torchbayes` nor the command line's help
# waits for torch. Type checkers read the imports, Python the table below; a test holds them equal.
if TYPE_CHECKING:
    from torchbayes import (
        applications as applications,
        average as average,
        checks as checks,
        data as data,
        likelihood as likelihood,
        metrics as metrics,
        models as models,
        optim as optim,
        posterior as posterior,
        posthoc as posthoc,
        prior as prior,
        serving as serving,
        variational as variational,
    )
    from torchbayes.average import HWA as HWA, SWA as SWA, SWAG as SWAG
    from torchbayes.checks.verify import verify as verify
    from torchbayes.data import load_data as load_data
    from torchbayes.laplace import Laplace as Laplace
    from torchbayes.likelihood import (
        Bernoulli as Bernoulli,
        Categorical as Categorical,
        GaussianNoise as GaussianNoise,
        Likelihood as Likelihood,
        Poisson as Poisson,
        StudentT as StudentT,
    )
    from torchbayes.optim import *
    from torchbayes.posterior import (
        Gaussian as Gaussian,
        KroneckerGaussian as KroneckerGaussian,
        LowRankGaussian as LowRankGaussian,
        Point as Point,
        Posterior as Posterior,
        Samples as Samples,
        Weights as Weights,
        latents as latents,
        load as load,
        snapshot as snapshot,
    )
    from torchbayes.predict.batchnorm import recalibrate_batchnorm as recalibrate_batchnorm
    from torchbayes.predict.binary import BinaryPredictive as BinaryPredictive
    from torchbayes.predict.predictive import predictive as predictive
    from torchbayes.predict.predictor import Predictor as Predictor
    from torchbayes.predict.results import (
        ClassPredictive as ClassPredictive,
        Predictive as Predictive,
        RegressionPredictive as RegressionPredictive,
    )
    from torchbayes.prior import (
        GaussianPrior as GaussianPrior,
        Prior as Prior,
        ScaleMixturePrior as ScaleMixturePrior,
    )
    from torchbayes.sklearn import (
        BayesianClassifier as BayesianClassifier,
        BayesianRegressor as BayesianRegressor,
    )
    from torchbayes.train.failures import TrainingError as TrainingError
    from torchbayes.train.fit import fit as fit
    from torchbayes.core.declaration import register as register
    from torchbayes.train.method import Method as Method
    from torchbayes.train.registry import METHODS as METHODS
    from torchbayes.train.run import Run as Run, load_run as load_run
    from torchbayes.train.schedule import Schedule as Schedule
    from torchbayes.train.tracking import TensorBoard as TensorBoard
    from torchbayes.tuning import tune as tune
    from torchbayes.variational import (
        VBLL as VBLL,
        Hypernet as Hypernet,
        MCDropout as MCDropout,
        MeanField as MeanField,
        flipout as flipout,
        local_reparameterisation as local_reparameterisation,
        shared_draw as shared_draw,
    )
else:
    from importlib import import_module as _import

    _NAMESPACES = (
        "applications", "average", "checks", "data", "likelihood", "metrics", "models", "optim",
        "posterior", "posthoc", "prior", "serving", "variational",
    )  # fmt: skip
    # Of optim everything is public here, so that a new algorithm is listed in optim/__init__.py only.
    _NAMES = {
        "average": "HWA SWA SWAG",
        "checks.verify": "verify",
        "data": "load_data",
        "laplace": "Laplace",
        "likelihood": "Bernoulli Categorical GaussianNoise Likelihood Poisson StudentT",
        "posterior": (
            "Gaussian KroneckerGaussian LowRankGaussian Point Posterior Samples Weights latents load snapshot"
        ),
        "predict.batchnorm": "recalibrate_batchnorm",
        "predict.binary": "BinaryPredictive",
        "predict.predictive": "predictive",
        "predict.predictor": "Predictor",
        "predict.results": "ClassPredictive Predictive RegressionPredictive",
        "prior": "GaussianPrior Prior ScaleMixturePrior",
        "sklearn": "BayesianClassifier BayesianRegressor",
        "train.failures": "TrainingError",
        "train.fit": "fit",
        "core.declaration": "register",
        "train.method": "Method",
        "train.registry": "METHODS",
        "train.run": "Run load_run",
        "train.schedule": "Schedule",
        "train.tracking": "TensorBoard",
        "tuning": "tune",
        "variational": (
            "Hypernet MCDropout MeanField VBLL flipout local_reparameterisation shared_draw"
        ),
    }
    _HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

    def __getattr__(name):
        if name in _NAMESPACES:
            return _import(f"torchbayes.{name}")
        if name == "__all__":
            value = sorted([*_HOMES, *_import("torchbayes.optim").__all__])
        elif name in _HOMES:
            value = getattr(_import(f"torchbayes.{_HOMES[name]}"), name)
        elif name[:1].isupper() and name in _import("torchbayes.optim").__all__:
            value = getattr(_import("torchbayes.optim"), name)
        else:
            raise AttributeError(f"module 'torchbayes' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_NAMESPACES, *__getattr__("__all__")})
