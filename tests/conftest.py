"""One thread per test process: the tensors here are small, and threads would only wait for each other."""

import torch

torch.set_num_threads(1)
