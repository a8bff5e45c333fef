"""Two gloo processes with half a batch each equal one with two micro-batches and the same draws."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbayes.optim.ivon import IVON
from torchbayes.optim.noisy_kfac import NoisyKFAC
from torchbayes.optim.vogn import VOGN

NAMES = ("VOGN", "IVON", "NoisyKFAC")
# The batch of 12 is shared unevenly, and one layer is used by the first process only.
SHARES = (slice(0, 5), slice(5, 12))

COMMON = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(27, 3)
        self.extra = nn.Linear(27, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x, rank):
        h = self.conv(x).tanh().flatten(1)
        return self.head(h) + (self.extra(h) if rank == 0 else 0.0)

def network():
    torch.manual_seed(0)
    return Net().double()

def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 5, 5, dtype=torch.float64, generator=generator)
    return x, torch.arange(12) % 3
"""
SCRIPT = (
    COMMON
    + """
import sys
import torch.nn.functional as F
from torchbayes import distributed, optim

with distributed.process_group():
    rank = distributed.rank()
    share = [slice(0, 5), slice(5, 12)][rank]
    result = {}
    for name in sys.argv[2:]:
        net, (x, y) = network(), batch()
        optimizer = getattr(optim, name)(
            net, 0.05, train_size=40, generator=torch.Generator().manual_seed(10 + rank)
        )
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x[share], rank), y[share])
            loss.backward()
            return loss
        for _ in range(4):
            optimizer.step(closure)
        result[name] = {key: p.detach().clone() for key, p in net.named_parameters()}
    torch.save(result, f"{sys.argv[1]}/{rank}.pt")
"""
)


def one_process(name: str) -> dict[str, Tensor]:
    space: dict = {}
    exec(COMMON, space)
    net, (x, y) = space["network"](), space["batch"]()
    assert isinstance(net, nn.Module)
    cls = {"VOGN": VOGN, "IVON": IVON, "NoisyKFAC": NoisyKFAC}[name]
    generators = [torch.Generator().manual_seed(10 + rank) for rank in range(2)]
    optimizer = cls(net, 0.05, train_size=40, generator=generators[0])
    for _ in range(4):
        for rank, share in enumerate(SHARES):
            optimizer.generator = generators[rank]
            with optimizer.sampled():
                optimizer.zero_grad()
                F.cross_entropy(net(x[share], rank), y[share]).backward()
        optimizer.step()
    return {key: p.detach().clone() for key, p in net.named_parameters()}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("two")
    (folder / "run.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(port),
        str(folder / "run.py"), str(folder), *NAMES,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_two_micro_batches(
    name: str, of_two: list[dict[str, dict[str, Tensor]]]
) -> None:
    alone = one_process(name)
    for key, value in alone.items():
        assert torch.equal(of_two[0][name][key], of_two[1][name][key]), key
        torch.testing.assert_close(of_two[0][name][key], value, rtol=1e-9, atol=1e-11)
