"""scikit-learn estimators: any method by name, any network, NumPy in and out.

They fit into pipelines, `cross_val_score` and `GridSearchCV`, and can be cloned and pickled.
"""

from torchbayes.sklearn.classifier import BayesianClassifier
from torchbayes.sklearn.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
