"""One thread per test process: the tensors here are small, and threads would only wait for each other."""

import gc
import os

# Some virtual machines advertise AMX and then fault on its instructions, which torch's bfloat16 layers use:
# the process dies of an illegal instruction. Processes that tests start inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # Half a million objects of the imported modules and of the collected tests live until the end. Every
    # training run on the command line collects garbage before it measures its memory, and a third of a
    # second each time would go into looking through them again.
    gc.freeze()
