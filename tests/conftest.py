"""One thread per test process: the tensors here are small, and threads would only wait for each other."""

import contextlib
import gc
import os
import warnings

# Some virtual machines advertise AMX and then fault on its instructions, which torch's bfloat16 layers use:
# the process dies of an illegal instruction. Processes that tests start inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)

# Importing it, as for doctests, would register its method in this process.
collect_ignore = ["plugin/package"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        help="accelerator for tests/accelerator, such as cuda; a simulated one by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Once a day ArviZ warns of what will change and writes the day to a file; of two processes that do so at
    # the same moment one fails. So it is done here, before there are any workers.
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import arviz  # noqa: F401


def pytest_collection_finish() -> None:
    # Half a million objects of the imported modules and of the collected tests live until the end. Every
    # training run on the command line collects garbage before it measures its memory, and a third of a
    # second each time would go into looking through them again.
    gc.freeze()
