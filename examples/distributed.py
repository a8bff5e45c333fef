"""Train on several processes: each draws its own weights for its share of a batch.

Run: torchrun --nproc-per-node 2 examples/distributed.py
"""

from __future__ import annotations

import torchbayes as tb
from torchbayes.core import distributed
from torchbayes.data import make_loader
from torchbayes.models import mlp


def main() -> None:
    data = tb.load_data("digits")
    with distributed.process_group():  # joins what torchrun has started; does nothing otherwise
        rank, world = distributed.rank(), distributed.world_size()
        loader = make_loader(data, data.train, 64, shuffle=True, rank=rank, world_size=world)
        run = tb.fit(
            lambda: mlp(64, num_classes=10, hidden=(64,)), loader, method="vogn", epochs=10,
            lr=0.01, progress=False,
        )  # fmt: skip
        if rank == 0:
            p = run.predict(make_loader(data, data.test, 500))
            right = (p.prediction == data.test.targets).float().mean()
            print(f"{world} process(es): {right:.1%} test accuracy")
        distributed.barrier()  # leave together: a process that ends early closes the others' connections


if __name__ == "__main__":
    main()
