"""Many requests to a server at once: every answer is the one that it gives alone, and the weights stay.

`python -m tests.campaigns.requests RUN --threads 8 --requests 500` prints the counts; a test runs a part.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

import torchbayes as tb
from torchbayes.train.run import Run

from ..serving.running import running


@dataclass(frozen=True)
class Outcome:
    """What became of the requests.

    Attributes:
        answers: Number of answers.
        different: Number of those that are not the single-threaded answer, bit for bit.
        touched: Names of weights of the run's network that have changed.
        seconds: Time that the requests of all threads took.
    """

    answers: int
    different: int
    touched: list[str]
    seconds: float


def bodies(run: Run, count: int) -> list[dict[str, object]]:
    """Return random requests for a run on arrays or images, of one to three examples each."""
    source = torch.Generator().manual_seed(0)
    shape = run.preprocessing.shape
    made = (torch.rand(1 + i % 3, *shape, generator=source) for i in range(count))
    return [{"inputs": inputs.tolist()} for inputs in made]


def campaign(run: Run, threads: int, requests: int, samples: int = 32) -> Outcome:
    """Send `requests` requests from each of `threads` threads, and compare with one thread's answers."""
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with running(tb.serving.app(run, samples)) as address:
        asked = bodies(run, min(requests, 40))
        with httpx.Client(base_url=address, timeout=120) as client:
            alone = [
                client.post("/predict", json=body).raise_for_status().content for body in asked
            ]
        counts: list[tuple[int, int]] = []

        def ask(offset: int) -> None:
            answers = different = 0
            with httpx.Client(base_url=address, timeout=120) as client:
                for number in range(requests):
                    which = (offset + number) % len(asked)
                    given = client.post("/predict", json=asked[which])
                    answers += given.status_code == 200
                    different += given.content != alone[which]
            counts.append((answers, different))

        started = time.monotonic()
        workers = [threading.Thread(target=ask, args=(5 * i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.monotonic() - started
    after = run.model.state_dict()
    touched = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    return Outcome(sum(a for a, _ in counts), sum(d for _, d in counts), touched, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--samples", type=int, default=32)
    given = parser.parse_args(arguments)
    found = campaign(tb.load_run(given.run), given.threads, given.requests, given.samples)
    print(
        f"{found.answers} answers, {found.different} different from the single-threaded ones, "
        f"{len(found.touched)} weights touched, {found.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
