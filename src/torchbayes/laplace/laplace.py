"""Laplace's approximation: a trained network and its training data in, a Gaussian posterior out.

E. Daxberger et al., Laplace Redux – Effortless Bayesian Deep Learning, NeurIPS 2021. The posterior is N(w*,
P⁻¹) around the trained weights w*, with the precision P = s·H + Δ of the training set's curvature H
(`outputs`) in one of four structures (`diagonal`, `kronecker`, `full`, `low_rank`) and of the prior N(μ,
Δ⁻¹).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbayes.core.batch import slice_batch
from torchbayes.core.names import named_parameters, named_weights, unwrapped
from torchbayes.core.outputs import Output
from torchbayes.core.shards import refuse_sharded
from torchbayes.laplace.arguments import (
    CURVATURES,
    STRUCTURES,
    PriorLike,
    check_outputs,
    check_size,
    curvature_for,
    in_copy,
    input_batches,
    likelihood_for,
    one_of,
    prior_terms,
    structure_for,
)
from torchbayes.laplace.checks import Some, check_types, warn_of_training_mode, warn_of_untrained
from torchbayes.laplace.evidence import log_evidence, maximise, scan
from torchbayes.laplace.gather import Batches, Checkpoint, gather
from torchbayes.laplace.linearised import Moments, moments
from torchbayes.laplace.links import bridge, draw_outputs, probit
from torchbayes.laplace.network import Network
from torchbayes.laplace.outputs import EXACT_UP_TO, Observed, noise_of
from torchbayes.laplace.reach import narrowed
from torchbayes.laplace.structure import Solved
from torchbayes.laplace.subset import Subset, subset_names
from torchbayes.likelihood import (
    Categorical,
    Likelihood,
)
from torchbayes.posterior import Posterior, Weights, Wrapper, snapshot
from torchbayes.posterior.partial import digest_of_rest, held_names
from torchbayes.predict.closed_form import GaussianPredictive
from torchbayes.predict.results import Predictive
from torchbayes.prior import GaussianPrior

__all__ = ["Laplace"]

_LINKS = ("probit", "mc", "bridge")
_VALIDATION_GRID = torch.logspace(-4, 6, 21, dtype=torch.float64)


class Laplace:
    """A posterior for a network that is already trained, from one pass over its training data.

    The network itself is not changed, and a copy of it is kept.

    Args:
        model: The trained network.
        train_data: What it was trained on, without augmentation: a pair (inputs, targets) of tensors, arrays
            or frames, a data set, or a loader. Weights of examples, a third entry, multiply their curvature.
            A loader that does not shuffle can be resumed.
        likelihood: Meaning of the outputs, as in training; by default what `fit` would infer, with Gaussian
            noise of the size of the training errors.
        structure: `"diagonal"`, `"kronecker"`, `"full"` (up to 20,000 weights) or `"low_rank"`.
        subset: Which weights are uncertain: `"all"` (that is, the trainable ones), `"last_layer"`, or names,
            patterns such as `"layer4.*"`, or modules.
        prior: Gaussian prior: a precision, one for every weight tensor by name, or a `GaussianPrior`. For a
            network that was trained with weight decay λ on a mean loss, λ·N.
        curvature: `"ggn"` (generalised Gauss–Newton, a backward pass for each output), `"sampled"` (its
            estimate from labels drawn from the model) or `"empirical"` (squared gradients of the data).
            If None, `"ggn"` for up to 32 outputs whose likelihood has one, otherwise `"sampled"`.
        samples: Labels drawn per example for `"sampled"`.
        rank: Number of directions of `"low_rank"`.
        batch_size: Examples per batch for a pair or a data set.
        train_size: Number of training examples, if you want it checked.
        folder: Folder for the statistics. If the pass is stopped, the same call resumes it; when it was
            finished, the same call needs no pass.
        generator: Source of the labels of `"sampled"`.
        output: Where the likelihood's tensor is in what the network returns; see `torchbayes.predictive`.
        check: Warn of a network in training mode, and of one that is far from a maximum of the posterior.

    Attributes:
        names: Names of the uncertain weights.
        train_size: Number of examples that were seen.
        likelihood: The likelihood, a copy, with the noise level that `optimize_prior` has found.

    Example:
        >>> import torch, torchbayes as tb
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> noise = tb.GaussianNoise(0.1)
        >>> net = torch.nn.Linear(1, 1)
        >>> net = tb.fit(net, (x, 2 * x), likelihood=noise, epochs=300, lr=0.05, progress=False).model
        >>> la = tb.Laplace(net.eval(), (x, 2 * x), likelihood=noise, structure="full")
        >>> p = la.predictive(torch.tensor([[0.0], [10.0]]))
        >>> bool(p.epistemic[1] > 5 * p.epistemic[0])   # far from the data
        True
    """

    def __init__(
        self, model: nn.Module, train_data: Any, likelihood: Likelihood | Any | None = None, *,
        structure: str = "kronecker", subset: Subset = "all", prior: PriorLike = 1.0,
        curvature: str | None = None, samples: int = 1, rank: int = 20, batch_size: int = 128,
        train_size: int | None = None, folder: str | Path | None = None,
        generator: torch.Generator | None = None, output: Output = None, check: bool = True,
    ) -> None:  # fmt: skip
        one_of("structure", structure, STRUCTURES)
        if curvature is not None:
            one_of("curvature", curvature, CURVATURES)
        for what, value in (("samples", samples), ("rank", rank), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{what} is {value}: expected a whole number of at least 1")
        network = unwrapped(model.model if isinstance(model, Wrapper) else model)
        refuse_sharded(
            network.parameters(),
            f"{type(network).__name__} is sharded (fully_shard), but Laplace needs whole weights: load its "
            "state dict into a network that is not sharded, and give that",
        )
        if check:
            warn_of_training_mode(network)
        batches = Batches(train_data, batch_size)
        self.model = copy.deepcopy(network).eval()
        parameters = named_parameters(self.model)
        self._network = Network(self.model, output)
        inputs, targets, given = batches.first()
        inputs = self._network.suited(slice_batch(inputs, 0, 2))
        targets = (targets if batches.targets is None else batches.targets).to(self._device)
        self.names = subset_names(self._network, in_copy(subset, network, self.model), inputs)
        for name, p in parameters.items():
            p.requires_grad_(name in self.names)
        weights: Weights = {name: parameters[name] for name in self.names}
        check_types(weights)
        with torch.no_grad():
            outputs = self._network(inputs)
        self.likelihood = likelihood_for(likelihood, outputs, targets, given).to(self._device)
        estimated = likelihood is None and noise_of(self.likelihood) is not None
        check_outputs(self.likelihood, outputs, targets)
        if batches.targets is not None:
            self.likelihood.check(outputs, targets)
        self._outputs = outputs[0].numel()
        self.curvature = curvature_for(curvature, self.likelihood, outputs)
        self.structure = structure
        self._structure = structure_for(structure, weights, rank)
        self.prior = prior
        if generator is None:
            generator = torch.Generator(self._device).manual_seed(0)
        self._observed = Observed(self.likelihood)
        settings = {
            "structure": structure, "curvature": self.curvature, "names": self.names,
            "samples": samples, "likelihood": type(self.likelihood).__name__,
        }  # fmt: skip
        self._some = some = Some(len(batches) or None)
        gather(
            self._network, self._structure, self._observed, batches, self.curvature, generator, samples,
            Checkpoint(folder, self.model, settings), some,
        )  # fmt: skip
        self.train_size = self._observed.examples
        check_size(self.train_size, train_size, batches.size)
        if estimated:
            self.noise = max(math.sqrt(self._observed.total / self._observed.count), 1e-6)
        kept = some.joined() if check else None
        if kept is not None:
            warn_of_untrained(
                self._network, self.likelihood, weights, self._precision, self._means, self.train_size,
                *kept,
            )  # fmt: skip

    # The prior and the noise.

    @property
    def prior(self) -> GaussianPrior:
        """The prior. Setting it, to a precision or as in the constructor, costs no new pass."""
        return self._prior

    @prior.setter
    def prior(self, value: PriorLike) -> None:
        weights = self._structure.weights
        self._precision, self._means = prior_terms(value, weights)
        if isinstance(value, GaussianPrior):
            self._prior = value
        else:
            deltas = list(self._precision.values())
            single = all(delta is deltas[0] for delta in deltas)
            self._prior = GaussianPrior(
                precision=float(deltas[0])
                if single
                else {name: delta.float() for name, delta in self._precision.items()}
            )
        self._kept: Solved | None = None

    @property
    def noise(self) -> Tensor | None:
        """The standard deviation of Gaussian noise of one size, which may be set; None for others."""
        noise = noise_of(self.likelihood)
        return None if noise is None else noise.std.detach()

    @noise.setter
    def noise(self, std: float | Tensor) -> None:
        noise = noise_of(self.likelihood)
        if noise is None:
            raise ValueError(
                f"a {type(self.likelihood).__name__} likelihood has no noise of one size to set: leave it"
            )
        if not 0 < float(std) < math.inf:
            raise ValueError(f"noise is {float(std):g}: expected a standard deviation above 0")
        noise.log_std.data.fill_(math.log(float(std)))
        self._kept = None

    @property
    def _solved(self) -> Solved:
        if self._kept is None:
            with torch.no_grad():
                scale = self._observed.scale(self.noise)
                self._kept = self._structure.solve(self._precision, scale)
        return self._kept

    # Results.

    def posterior(self, hold: Iterable[str] = ()) -> Posterior:
        """Return the posterior over the uncertain weights, to draw from, save and predict with.

        Args:
            hold: Names of weights and buffers to hold too, without a spread. What is not held has to be the
                same in the network that the posterior is used with.
        """
        names = held_names(self.model, self.names)
        held = [n for n in named_weights(self.model) if n in {*names, *hold}]
        return self._solved.posterior(
            snapshot(self.model, held), model_name=type(self.model).__name__,
            rest=digest_of_rest(self.model, held),
        )  # fmt: skip

    def log_marginal_likelihood(
        self, prior: PriorLike | None = None, noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the log evidence in nats, differentiable in the prior's precision and in the noise.

        Args:
            prior: Prior to use instead of the current one: also a tensor, of no dimension or with one entry
                for each of `names`.
            noise: Standard deviation of the noise to use instead of the current one.

        Example:
            >>> import torch, torchbayes as tb
            >>> x, net = torch.randn(20, 2), torch.nn.Linear(2, 3)
            >>> la = tb.Laplace(net, (x, net(x).argmax(1)), check=False)
            >>> delta = torch.tensor(2.0, requires_grad=True)
            >>> la.log_marginal_likelihood(delta).backward()
            >>> delta.grad.shape
            torch.Size([])
        """
        precision, means = self._precision, self._means
        if prior is not None:
            precision, means = prior_terms(prior, self._structure.weights)
        level = self.noise
        if noise is not None:
            if level is None:
                raise ValueError(
                    f"noise is given, but a {type(self.likelihood).__name__} likelihood has none of one "
                    "size: leave it out"
                )
            level = torch.as_tensor(noise, dtype=torch.float64)
            if not 0 < float(level.detach()) < math.inf:
                raise ValueError(
                    f"noise is {float(level.detach()):g}: expected a standard deviation above 0"
                )
        return log_evidence(self._structure, self._observed, precision, means, level)

    def optimize_prior(
        self, by: str = "evidence", *, per_layer: bool = False, noise: bool | None = None,
        validation: Any | None = None,
    ) -> GaussianPrior:  # fmt: skip
        """Choose the prior's precision, and the noise level if it is learned, and use them from here on.

        Args:
            by: `"evidence"`, or `"validation"` for the smallest held-out negative log-likelihood of the
                linearised prediction, on a grid of 21 precisions from 10⁻⁴ to 10⁶.
            per_layer: One precision for each weight tensor instead of one for all (evidence only).
            noise: Whether to choose the noise level too (evidence only); if None, where the likelihood
                learns it.
            validation: Held-out pair (inputs, targets) or loader, for `"validation"`.

        Returns:
            The new prior.
        """
        one_of("by", by, ("evidence", "validation"))
        if by == "validation":
            if validation is None:
                raise ValueError(
                    "by='validation' needs held-out data: pass validation=(inputs, targets)"
                )
            if per_layer or noise:
                raise ValueError(
                    "held-out data choose one precision: use by='evidence' for one per layer or the noise"
                )
            return self._by_validation(validation)
        if validation is not None:
            raise ValueError("the evidence needs no validation data: leave validation out")
        own = noise_of(self.likelihood)
        learns = own is not None and (own.learned if noise is None else noise)
        level = self.noise
        starts = [scan(lambda delta: self.log_marginal_likelihood(delta))]
        if learns and level is not None:
            starts.append(level.double().cpu())
        found = maximise(self._evidence_of, starts)
        if per_layer:
            starts = [found[0].expand(len(self.names)).clone(), *found[1:]]
            found = maximise(self._evidence_of, starts)
        self.prior = found[0]
        if len(found) > 1:
            self.noise = found[1]
        return self.prior

    def narrow(self) -> bool:
        """Raise the prior's precision until predictions by draws fit the training data as the network does.

        Where the approximation holds, averaging over draws costs next to nothing on the training data. It
        costs much where the posterior is too wide for it: mostly where the network fits its data
        perfectly, so that there is no curvature left. The precision is then doubled until the cost is at
        most 0.01 nats an example, and with labels at most a tenth of the network's own loss, on a few
        hundred training examples. It is not the evidence's choice any more, and the posterior is narrower
        than Bayes' rule makes it.

        Returns:
            Whether the precision was raised. It is not where fewer than 16 examples were kept, which are too
            few to tell, nor for a prior that is not one number.

        Example:
            >>> import torch, torchbayes as tb
            >>> y = torch.arange(60) % 2
            >>> x = torch.randn(60, 2) + 10 * y.unsqueeze(1)  # far apart: a network fits them perfectly
            >>> net = torch.nn.Linear(2, 2)
            >>> net = tb.fit(net, (x, y), epochs=200, lr=0.1, prior=1e-3, progress=False).model
            >>> la = tb.Laplace(net.eval(), (x, y), prior=1e-3)
            >>> la.narrow()
            True
        """
        if not self.prior.scalar:
            return False  # a prior that is not one number
        return narrowed(self, self._some.joined())

    def _evidence_of(self, delta: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.log_marginal_likelihood(delta, noise)

    def _by_validation(self, validation: Any) -> GaussianPrior:
        best, least = self._precision, math.inf
        for delta in _VALIDATION_GRID:
            self.prior = delta
            total = count = 0.0
            for _, inputs, targets, _ in Batches(validation, 512).each(0):
                generator = torch.Generator().manual_seed(0)
                p = self.predictive(inputs, generator=generator)
                log_probs = p.log_prob(targets.to(self._device))
                total, count = total - float(log_probs.double().sum()), count + len(targets)
            if total / count < least:
                best, least = self._precision, total / count
        self.prior = next(iter(best.values()))
        return self.prior

    @property
    def _device(self) -> torch.device:
        return self._network.device

    def predictive(
        self, inputs: Any, link: str | None = None, *, samples: int = 100,
        generator: torch.Generator | None = None, max_memory: int = 1 << 30,
    ) -> Predictive:  # fmt: skip
        """Predict with the network linearised in its weights: a Gaussian over the outputs, in closed form.

        For draws of the weights through the network itself, use `torchbayes.predictive` with `posterior()`.

        Args:
            inputs: A tensor, a tuple or a dictionary of tensors, or a loader.
            link: From the Gaussian over logits to probabilities: `"probit"`, `"bridge"` or `"mc"` (see
                `torchbayes.laplace.links`). If None, `"mc"` for up to 32 classes and `"probit"` for more,
                which needs no covariance of the outputs but ignores that logits move together. Gaussian
                noise of one size has a closed form, with the outputs' covariance for up to 32 outputs and
                with their variances for more; other likelihoods take `"mc"`.
            samples: Draws of the outputs for `"mc"`.
            generator: Source of these draws.
            max_memory: Limit in bytes on what is held at a time besides the result, checked before it
                starts.

        Example:
            >>> import torch, torchbayes as tb
            >>> x = torch.randn(60, 2)
            >>> y = (x[:, 0] > 0).long()
            >>> net = torch.nn.Linear(2, 2)
            >>> net = tb.fit(net, (x, y), epochs=100, lr=0.05, progress=False).model
            >>> p = tb.Laplace(net, (x, y)).predictive(x)
            >>> p.probs.shape, p.epistemic.shape
            (torch.Size([60, 2]), torch.Size([60]))
        """
        classes = isinstance(self.likelihood, Categorical)
        closed = noise_of(self.likelihood) is not None
        many = self._outputs > EXACT_UP_TO
        if link is not None:
            one_of("link", link, _LINKS)
            if not classes and link != "mc":
                raise ValueError(
                    f"link={link!r} is for classes, and the likelihood is {type(self.likelihood).__name__}: "
                    "leave link out"
                )
        elif not closed:
            link = "probit" if classes and many else "mc"
        if link == "mc" and samples < 1:
            raise ValueError(f"samples is {samples}: expected at least 1 draw")
        what = {"probit": "variance", "bridge": "row_sums"}.get(link or "", "covariance")
        if link is None and many:
            what = "variance"
        draws = samples if link == "mc" else 0
        parts: list[Predictive] = []
        network = self._network.private()  # hooks are set on it, and threads may share this object
        for batch in input_batches(inputs):
            batch = network.suited(batch)
            for part in moments(
                network, self._structure, self._solved, batch, what, max_memory, draws
            ):
                parts.append(self._linked(part, link, samples, generator))
                # Many small results between large temporary tensors would keep the memory of those from
                # being used again.
                while len(parts) > 1 and len(parts[-2]) <= len(parts[-1]):
                    parts[-2:] = [type(parts[0]).cat(parts[-2:])]
        if not parts:
            raise ValueError("there is nothing to predict: the inputs have no examples")
        return type(parts[0]).cat(parts)

    @torch.no_grad()
    def _linked(
        self, part: Moments, link: str | None, samples: int, generator: torch.Generator | None
    ) -> Predictive:
        if isinstance(self.likelihood, Categorical) and part.mean.dim() != 2 and link != "mc":
            raise ValueError(
                f"link={link!r} takes one prediction per example, and the network gives outputs of shape "
                f"{tuple(part.mean.shape[1:])}: use link='mc'"
            )
        if link == "probit":
            return probit(part.mean, part.variance)
        if link == "bridge":
            assert part.row_sums is not None
            return bridge(part.mean, part.variance, part.row_sums)
        if link == "mc":
            assert part.covariance is not None
            drawn = draw_outputs(part.mean, part.covariance, samples, generator)
            return self.likelihood.predictive(drawn)
        assert self.noise is not None
        spread = part.variance.view_as(part.mean) if part.covariance is None else part.covariance
        return GaussianPredictive(part.mean, spread, self.noise.to(part.mean))

    def __repr__(self) -> str:
        count = sum(w.numel() for w in self._structure.weights.values())
        return (
            f"Laplace({self.structure} over {count:,} weights of {type(self.model).__name__}, "
            f"curvature {self.curvature})"
        )
