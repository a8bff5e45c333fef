"""One thread per test process: the tensors here are small, and threads would only wait for each other."""

import os

# Some virtual machines advertise AMX and then fault on its instructions, which torch's bfloat16 layers use:
# the process dies of an illegal instruction. Processes that tests start inherit this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)
