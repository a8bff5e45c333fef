"""Two processes under torchrun, as on a machine with two accelerators: each takes its own and both agree."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchbayes as tb
from torchbayes.core import distributed

from ..conformance.problems import blobs, small_net
from ..conformance.test_methods import tensors
from ..processes import processes
from .simulated import KIND, simulated_accelerators


class _Copying(dist.ProcessGroup):
    """A back end for the simulated accelerators: copies to the CPU, and gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "copying"

    def allreduce(self, given: list[Tensor], options: Any) -> Any:
        return self._sent("allreduce", [t.cpu() for t in given], given, options)

    def broadcast(self, given: list[Tensor], options: Any) -> Any:
        return self._sent("broadcast", [t.cpu() for t in given], given, options)

    def allgather(self, results: list[list[Tensor]], given: list[Tensor], options: Any) -> Any:
        there = [[t.cpu() for t in some] for some in results]
        work = self._gloo.allgather(there, [t.cpu() for t in given], options)
        work.wait()
        for some, found in zip(results, there, strict=True):
            torch._foreach_copy_(some, found)
        return work

    def _sent(self, name: str, there: list[Tensor], given: list[Tensor], options: Any) -> Any:
        work = getattr(self._gloo, name)(there, options)
        work.wait()
        for tensor, found in zip(given, there, strict=True):
            tensor.copy_(found)
        return work


def _fitted(folder: str) -> None:
    found: dict[str, Any] = {}
    with simulated_accelerators():
        dist.Backend.register_backend("copying", _Copying, devices=[KIND])
        with distributed.process_group(KIND):
            for method in ("vogn", "ivon", "sgld"):
                options = {"epochs": 1, "batch_size": 16, "device": KIND, "progress": False}
                run = tb.fit(small_net, blobs(48), method, **options)
                places = {str(t.device) for t in tensors(run.posterior).values()}
                total = sum(float(t.double().sum()) for t in run.posterior.mean().values())
                found[method] = [str(next(run.model.parameters()).device), sorted(places), total]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_each_process_trains_on_its_own_device(tmp_path: Path) -> None:
    done = processes(2, _fitted, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for method in found[0]:
        for rank in range(2):
            device, places, _ = found[rank][method]
            assert (device, places) == (f"{KIND}:{rank}", [f"{KIND}:{rank}"]), method
    for method in ("vogn", "ivon"):  # chains differ
        assert found[0][method][2] == found[1][method][2], method
