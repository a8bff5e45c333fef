"""Laplace's approximation at the end of ordinary training: MAP, then one pass for a Gaussian around it.

D. MacKay, A Practical Bayesian Framework for Backpropagation Networks, Neural Computation 1992; E. Daxberger
et al., Laplace Redux – Effortless Bayesian Deep Learning, NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchbayes.core.declaration import register
from torchbayes.laplace import Laplace
from torchbayes.laplace.arguments import CURVATURES, STRUCTURES, one_of
from torchbayes.likelihood import Likelihood
from torchbayes.optim import MAP
from torchbayes.posterior import Posterior
from torchbayes.train.method import Plan
from torchbayes.train.optimizer import MapMethod, Share

__all__ = ["LaplaceMethod"]


@register(
    "laplace",
    family="a Gaussian",
    posterior="KroneckerGaussian",
    summary="a trained network, and a Gaussian around its last layer from one more pass",
    paper="MacKay 1992; Daxberger et al. 2021, Laplace Redux",
)
class LaplaceMethod(MapMethod):
    """MAP, and at its end the Laplace posterior of the trained network, from one pass over the data.

    Predictions draw weights; `torchbayes.Laplace` has the linearised prediction too, and more choices.

    Args:
        structure: Form of the curvature: kronecker, diagonal, full or low_rank.
        subset: Which weights are uncertain: last_layer, all (of them, draws predict badly) or a pattern such
            as layer4.*; the others stay at their trained values.
        curvature: ggn, sampled or empirical; if None, ggn for up to 32 outputs, otherwise sampled.
        evidence: Whether the evidence chooses the posterior's prior precision, which is then raised until
            draws together lose next to nothing on the training data: at most 0.01 nats an example, and with
            labels at most a tenth of the network's own loss (`Laplace.narrow`). Otherwise it is the one of
            training.
    """

    uses = (MAP,)
    trains_with = MAP

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, plan: Plan, *, structure: str = "kronecker",
        subset: str = "last_layer", curvature: str | None = None, evidence: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, likelihood, plan, **options)
        one_of("structure", structure, STRUCTURES)
        if curvature is not None:
            one_of("curvature", curvature, CURVATURES)
        precision = self._map.precision
        if precision is None or (precision == 0 and not evidence):
            raise ValueError(
                f"the prior is {self._map.prior!r}, and method laplace takes one precision above 0: give a "
                "number, or train with method map and use torchbayes.Laplace"
            )
        self.structure, self.subset, self.curvature = structure, subset, curvature
        self.evidence = evidence
        self._result: Posterior | None = None

    def end_epoch(self, epoch: int, batches: Iterable[Any]) -> None:
        """Make the posterior at the end of the run."""
        super().end_epoch(epoch, batches)
        if epoch + 1 < self.epochs:
            return
        held = self._map._held()  # before evaluation mode: it tells which buffers change
        la = Laplace(
            self.model, Share(batches, self.plan), self.likelihood, structure=self.structure,
            subset=self.subset, prior=self._map.precision or 1.0, curvature=self.curvature,
            output=self.plan.output, check=False,
        )  # fmt: skip
        if self.evidence:
            la.optimize_prior(noise=False)
            la.narrow()
        self.noted["laplace_precision"] = float(la.prior.scalar or 0.0)
        self._result = la.posterior(held)

    def posterior(self) -> Posterior:
        """Return the Laplace posterior, and until the run has ended the weights alone."""
        return super().posterior() if self._result is None else self._result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training and, at its end, the posterior."""
        q = self._result
        if q is None:
            return super().state_dict() | {"posterior": None}
        kept = {
            "kind": q.kind, "tensors": {group: dict(w) for group, w in q._file_tensors().items()},
            "settings": q._file_settings(), "model_name": q.model_name, "rest": q.rest,
        }  # fmt: skip
        return super().state_dict() | {"posterior": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        super().load_state_dict(state)
        kept = state["posterior"]
        if kept is not None:
            q = Posterior.kinds[kept["kind"]]._from_file(kept["tensors"], kept["settings"])
            q.model_name, q.rest = kept["model_name"], kept["rest"]
            self._result = q
