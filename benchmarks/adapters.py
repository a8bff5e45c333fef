"""One step of every peer, on the same network and data, in the way that its documentation shows.

An adapter takes a network, a batch and its targets and gives back a `Peer`. Losses are on one scale: the
mean negative log-likelihood, with KL or prior divided by the size of the training set. Where a peer leaves
the optimiser to torch it gets torch's fused one, as torchbayes' own methods do, so that the comparison is
not one of optimisers. Where a peer leaves networks to the user, its layers take the places of the plain ones.

The peers that give per-example squares (BackPACK, Opacus, torch.func) have no VOGN: noise and update are
torchbayes' own functions, and what is compared is how they get the squares.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

from torchbayes.optim.vogn import vogn_draw, vogn_update
from torchbayes.variational import Hypernet

TRAIN_SIZE = 50_000


@dataclass
class Peer:
    """A peer at work: a step that gives back its loss, and a prediction of so many draws if it has one."""

    step: Callable[[], Tensor]
    predict: Callable[[Tensor, int], Tensor] | None = None
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A row: whose, what of ours it is compared with, and what makes it."""

    package: str
    ours: str
    make: Callable[[nn.Module, Tensor, Tensor], Peer]


def _adam(net: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)


def _trained(net: nn.Module, loss: Callable[[], Tensor], note: str = "") -> Peer:
    """A peer whose layers draw their weights in every forward pass, trained by Adam."""
    optimizer = _adam(net)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    @torch.no_grad()
    def predict(inputs: Tensor, draws: int) -> Tensor:
        net.eval()
        total = net(inputs).softmax(1)
        for _ in range(draws - 1):
            total += net(inputs).softmax(1)
        return total / draws

    return Peer(step, predict, note)


def _replace(net: nn.Module, rules: dict[type[nn.Module], Callable[[Any], nn.Module]]) -> None:
    """Put a peer's layers where the plain ones are."""
    for name, child in net.named_children():
        rule = rules.get(type(child))
        if rule is None:
            _replace(child, rules)
        else:
            setattr(net, name, rule(child))


def _conv_shape(layer: nn.Conv2d) -> dict[str, Any]:
    return {
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
        "bias": layer.bias is not None,
    }


def bayesian_torch(kind: str) -> Callable[[nn.Module, Tensor, Tensor], Peer]:
    """bayesian-torch's `dnn_to_bnn` with layers of a kind."""

    def make(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        dnn_to_bnn(
            net,
            {
                "prior_mu": 0.0,
                "prior_sigma": 1.0,
                "posterior_mu_init": 0.0,
                "posterior_rho_init": -3.0,
                "type": kind,
                "moped_enable": False,
            },
        )
        return _trained(
            net, lambda: F.cross_entropy(net(inputs), targets) + get_kl_loss(net) / TRAIN_SIZE
        )

    return make


def blitz(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """BLiTZ: its layers and `sample_elbo`."""
    from blitz.modules import BayesianConv2d, BayesianLinear
    from blitz.utils import variational_estimator

    _replace(
        net,
        {
            nn.Linear: lambda old: BayesianLinear(
                old.in_features, old.out_features, bias=old.bias is not None
            ),
            nn.Conv2d: lambda old: BayesianConv2d(**_conv_shape(old)),
        },
    )
    # The decorator adds its methods to a class: to one that nobody else has.
    net.__class__ = variational_estimator(type("Variational", (type(net),), {}))
    return _trained(
        net,
        lambda: net.sample_elbo(
            inputs, targets, F.cross_entropy, sample_nbr=1, complexity_cost_weight=1 / TRAIN_SIZE
        ),
    )


def torchbnn(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """Torchbnn: its layers and `BKLLoss`."""
    import torchbnn as bnn

    prior = {"prior_mu": 0.0, "prior_sigma": 0.1}
    _replace(
        net,
        {
            nn.Linear: lambda old: bnn.BayesLinear(
                **prior,
                in_features=old.in_features,
                out_features=old.out_features,
                bias=old.bias is not None,
            ),
            nn.Conv2d: lambda old: bnn.BayesConv2d(**prior, **_conv_shape(old)),
        },
    )
    divergence = bnn.BKLLoss(reduction="sum")
    return _trained(
        net,
        lambda: (F.cross_entropy(net(inputs), targets) + divergence(net) / TRAIN_SIZE).squeeze(),
    )


def _torch_uncertainty() -> None:
    """Let its layers and optimisers be imported without torchvision, which only its package file needs."""
    if find_spec("torchvision") is None and "torch_uncertainty" not in sys.modules:
        spec = find_spec("torch_uncertainty")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'torch_uncertainty'")
        for name in ("", ".utils", ".losses"):
            module = ModuleType(f"torch_uncertainty{name}")
            folder = spec.submodule_search_locations[0] + name.replace(".", "/")
            module.__path__ = [folder]
            sys.modules[module.__name__] = module


def torch_uncertainty(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """torch-uncertainty's Bayesian layers and `ELBOLoss`."""
    _torch_uncertainty()
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
    from torch_uncertainty.losses.bayesian import ELBOLoss

    _replace(
        net,
        {
            nn.Linear: lambda old: BayesLinear(
                old.in_features, old.out_features, bias=old.bias is not None
            ),
            nn.Conv2d: lambda old: BayesConv2d(**_conv_shape(old)),
        },
    )
    layers = sum(hasattr(module, "weight_sampler") for module in net.modules())
    # Its KL term is the mean over layers.
    loss = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=layers / TRAIN_SIZE, num_samples=1)
    return _trained(net, lambda: loss(inputs, targets).squeeze())


def torch_uncertainty_sampler(name: str) -> Callable[[nn.Module, Tensor, Tensor], Peer]:
    """torch-uncertainty's SGLD or SGHMC."""

    def make(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
        _torch_uncertainty()
        from torch_uncertainty.optim.sghmc import SGHMC
        from torch_uncertainty.optim.sgld import SGLD

        optimizer = (
            SGLD(net.parameters(), lr=1e-2, weight_decay=1 / TRAIN_SIZE)
            if name == "sgld"
            # Its burn-in, which costs more, is over.
            else SGHMC(net.parameters(), lr=1e-2, burn_in_steps=0, weight_decay=1 / TRAIN_SIZE)
        )

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Peer(step)

    return make


def tyxe(flipout: bool) -> Callable[[nn.Module, Tensor, Tensor], Peer]:
    """TyXe's `VariationalBNN`, with its Flipout context or without."""

    def make(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
        import pyro
        import pyro.distributions as dist
        import tyxe as peer

        if not hasattr(pyro.util, "deep_getattr"):  # later versions of pyro have moved it
            pyro.util.deep_getattr = lambda module, name: attrgetter(name)(module)
        pyro.clear_param_store()
        pyro.enable_validation(False)
        bnn = peer.VariationalBNN(
            net,
            peer.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=(nn.BatchNorm2d,)),
            peer.likelihoods.Categorical(dataset_size=TRAIN_SIZE),
            partial(peer.guides.AutoNormal, init_scale=0.01),
        )
        context = peer.poutine.flipout if flipout else contextlib.nullcontext
        with context():
            svi = bnn.fit([(inputs, targets)], pyro.optim.Adam({"lr": 1e-3}), 1)
        net.train()

        def step() -> Tensor:
            with context():
                return torch.tensor(svi.step((inputs,), targets) / TRAIN_SIZE)

        def predict(batch: Tensor, draws: int) -> Tensor:
            net.eval()
            result: Tensor = bnn.predict(batch, num_predictions=draws)
            return result

        return Peer(step, predict)

    return make


def posteriors(name: str) -> Callable[[nn.Module, Tensor, Tensor], Peer]:
    """The `build`, `init` and in-place `update` of posteriors' transform of this name."""

    def make(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
        import posteriors as peer
        import torchopt

        note = _functional_norms(net)
        parameters = {key: p.detach().clone() for key, p in net.named_parameters()}
        model = peer.model_to_function(net)

        def log_posterior(weights: Any, batch: Any) -> tuple[Tensor, Tensor]:
            outputs = model(weights, batch[0])
            prior = peer.diag_normal_log_prob(weights)
            return -F.cross_entropy(outputs, batch[1]) + prior / TRAIN_SIZE, outputs

        temperature = 1 / TRAIN_SIZE
        if name == "vi":
            transform = peer.vi.diag.build(
                log_posterior,
                torchopt.adam(lr=1e-3),
                temperature=temperature,
                init_log_sds=-4.6,
            )
        else:
            build = getattr(peer.sgmcmc, name).build
            start = {} if name == "sgld" else {"momenta": 0.0}
            transform = build(log_posterior, lr=3e-2, temperature=temperature, **start)
        state = transform.init(parameters)
        batch = (inputs, targets)

        def step() -> Tensor:
            nonlocal state
            state, _ = transform.update(state, batch, inplace=True)
            # Of a sampler the energy is what falls; of VI its bound.
            value = state.nelbo if name == "vi" else -state.log_posterior
            return value.detach().mean()

        return Peer(step, None, note)

    return make


def ivon(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """ivon-opt's IVON."""
    from ivon import IVON

    optimizer = IVON(net.parameters(), lr=0.1, ess=TRAIN_SIZE, hess_init=0.1)

    def step() -> Tensor:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def predict(batch: Tensor, draws: int) -> Tensor:
        net.eval()
        total = torch.zeros(())
        for _ in range(draws):
            with optimizer.sampled_params():
                total = total + net(batch).softmax(1)
        return total / draws

    return Peer(step, predict)


class Vogn:
    """VOGN with torchbayes' draw and update; gradients and their squares come from elsewhere."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.weights = [p.detach() for p in parameters]
        self.mean = [p.detach().clone() for p in parameters]
        self.momentum, self.precision = (
            [torch.zeros_like(p) for p in self.weights] for _ in range(2)
        )
        self.gamma, self.delta = 150 / TRAIN_SIZE, 1 / TRAIN_SIZE
        self.begun = False

    def draw(self) -> None:
        """Put a draw into the weights; the first step is at the mean, as ours, for want of a precision."""
        if not self.begun:
            self.begun = True
            return
        for w, mu, precision in zip(self.weights, self.mean, self.precision, strict=True):
            eta = w.normal_()
            vogn_draw(
                w, mu, precision, eta, delta=self.delta, gamma=self.gamma, tau=1.0, n=TRAIN_SIZE
            )

    def update(self, gradients: list[Tensor], squares: list[Tensor], factor: float = 1.0) -> None:
        """Move the mean, given ĝ and ĥ / factor."""
        columns = self.mean, self.momentum, self.precision, gradients, squares
        for tensors in zip(*columns, strict=True):
            vogn_update(
                *tensors, alpha=1e-4, beta1=0.9, beta2=0.1, delta=self.delta, gamma=self.gamma,
                prior_mean=0.0, h_factor=factor,
            )  # fmt: skip


def backpack(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """BackPACK's `SumGradSquared`."""
    from backpack import backpack as extended
    from backpack import extend
    from backpack.extensions import SumGradSquared

    note = _frozen_norms(net)
    net = extend(net)
    loss_of = extend(nn.CrossEntropyLoss())
    parameters = list(net.parameters())
    state = Vogn(parameters)
    size = len(targets)

    def step() -> Tensor:
        state.draw()
        net.zero_grad()
        with extended(SumGradSquared()):
            loss = loss_of(net(inputs), targets)
            loss.backward()
        # A per-example gradient has the 1/B of the mean loss in it: ĥ = B · its squares' sum.
        squares = [p.sum_grad_squared for p in parameters]
        state.update([p.grad for p in parameters], squares, size)
        return loss.detach()  # type: ignore[no-any-return]

    return Peer(step, None, note)


def opacus(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """Opacus' `GradSampleModule`."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    note = ""
    if any(isinstance(module, nn.BatchNorm2d) for module in net.modules()):
        net, note = ModuleValidator.fix(net), "its fix puts group norm for batch norm"
    net = GradSampleModule(net)
    parameters = list(net.parameters())
    state = Vogn(parameters)

    def step() -> Tensor:
        state.draw()
        net.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        squares = [p.grad_sample.square_().mean(0) for p in parameters]
        state.update([p.grad for p in parameters], squares)
        return loss.detach()

    return Peer(step, None, note)


def torch_func(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """`vmap(grad)` of torch.func, as in torch's tutorial on per-sample gradients."""
    note = _functional_norms(net)
    parameters = dict(net.named_parameters())
    state = Vogn(list(parameters.values()))

    def loss_of(weights: dict[str, Tensor], image: Tensor, target: Tensor) -> Any:
        outputs = functional_call(net, weights, (image.unsqueeze(0),))
        loss = F.cross_entropy(outputs, target.unsqueeze(0))
        return loss, loss.detach()

    each = vmap(grad(loss_of, has_aux=True), in_dims=(None, 0, 0))

    def step() -> Tensor:
        state.draw()
        weights = {name: p.detach() for name, p in parameters.items()}
        gradients, losses = each(weights, inputs, targets)
        means = [g.mean(0) for g in gradients.values()]
        state.update(means, [g.square_().mean(0) for g in gradients.values()])
        return losses.mean()  # type: ignore[no-any-return]

    return Peer(step, None, note)


def hypnettorch(net: nn.Module, inputs: Tensor, targets: Tensor) -> Peer:
    """Hypnettorch's `HMLP`, one hidden layer of 32 from a noise of 32, for the layers that ours generates."""
    from hypnettorch.hnets import HMLP

    names = list(Hypernet(deepcopy(net), latent_dim=1, hidden_dim=1).generated)
    weights = dict(net.named_parameters())
    generator = HMLP(
        [list(weights[name].shape) for name in names],
        uncond_in_size=32,
        cond_in_size=0,
        layers=(32,),
        num_cond_embs=0,
        verbose=False,
    )
    generator.apply_hyperfan_init()
    rest = [p for name, p in weights.items() if name not in names]
    optimizer = torch.optim.SGD(
        [*generator.parameters(), *rest],
        lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1 / TRAIN_SIZE, fused=True,
    )  # fmt: skip

    def step() -> Tensor:
        optimizer.zero_grad()
        generated = generator.forward(uncond_input=torch.randn(1, 32))
        outputs = functional_call(net, dict(zip(names, generated, strict=True)), (inputs,))
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Peer(step)


def _functional_norms(net: nn.Module) -> str:
    """Do what torch.func's documentation says of batch norm, which transforms cannot take as it is."""
    if any(isinstance(module, nn.BatchNorm2d) for module in net.modules()):
        replace_all_batch_norm_modules_(net)
        return "batch norm without running statistics"
    return ""


def _frozen_norms(net: nn.Module) -> str:
    """BackPACK takes batch norm in evaluation mode only."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()
    return "batch norm in evaluation mode" if norms else ""


PEERS: dict[str, Entry] = {
    "bayesian-torch reparameterisation": Entry(
        "bayesian-torch", "bbb", bayesian_torch("Reparameterization")
    ),
    "BLiTZ": Entry("blitz-bayesian-pytorch", "bbb", blitz),
    "torchbnn": Entry("torchbnn", "bbb", torchbnn),
    "TyXe": Entry("tyxe", "bbb", tyxe(flipout=False)),
    "torch-uncertainty": Entry("torch-uncertainty", "bbb", torch_uncertainty),
    "posteriors VI": Entry("posteriors", "bbb", posteriors("vi")),
    "bayesian-torch Flipout": Entry("bayesian-torch", "bbb flipout", bayesian_torch("Flipout")),
    "TyXe Flipout": Entry("tyxe", "bbb flipout", tyxe(flipout=True)),
    "BackPACK": Entry("backpack-for-pytorch", "vogn", backpack),
    "Opacus": Entry("opacus", "vogn", opacus),
    "torch.func": Entry("torch", "vogn", torch_func),
    "ivon-opt": Entry("ivon-opt", "ivon", ivon),
    "posteriors SGLD": Entry("posteriors", "sgld", posteriors("sgld")),
    "torch-uncertainty SGLD": Entry("torch-uncertainty", "sgld", torch_uncertainty_sampler("sgld")),
    "posteriors SGHMC": Entry("posteriors", "sghmc", posteriors("sghmc")),
    "torch-uncertainty SGHMC": Entry(
        "torch-uncertainty", "sghmc", torch_uncertainty_sampler("sghmc")
    ),
    "posteriors SGNHT": Entry("posteriors", "sgnht", posteriors("sgnht")),
    "hypnettorch": Entry("hypnettorch", "hypernet", hypnettorch),
}
