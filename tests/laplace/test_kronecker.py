import torch
from torch import nn

import torchbayes as tb
from torchbayes.laplace import kronecker


def test_a_large_factor_has_the_eigenvalues_that_torch_finds_for_it():
    """From 1,024 on LAPACK is asked another way, and sees the lower triangle alone."""
    torch.manual_seed(0)
    size = kronecker._LARGE
    rows = torch.randn(300, size)  # far fewer than its size: most eigenvalues are 0
    whole = (rows.t() @ rows / 300).double()
    found = kronecker._Factor.of(whole.float().tril())
    values = torch.linalg.eigvalsh(whole)
    torch.testing.assert_close(found.values, values.clamp_min(0), rtol=1e-4, atol=1e-4)
    vectors = found.vectors.double()
    torch.testing.assert_close(vectors * found.values @ vectors.t(), whole, rtol=0, atol=1e-4)
    identity = torch.eye(size, dtype=torch.double)
    torch.testing.assert_close(vectors.t() @ vectors, identity, rtol=0, atol=1e-3)


def test_the_factors_of_a_wide_layer_are_sums_over_all_examples(tmp_path):
    """In blocks of columns, half of which are left to symmetry."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(520, 70), nn.Tanh(), nn.Linear(70, 1)).double()
    x, y = torch.randn(40, 520).double(), torch.randn(40, 1).double()
    la = tb.Laplace(net, (x, y), tb.GaussianNoise(1.0), batch_size=16, check=False)
    inner = 1 - net[0](x).detach().tanh().square()
    g = net[2].weight.detach() * inner
    inputs, outputs = x.t() @ x / 40, g.t() @ g
    wanted = torch.outer(torch.linalg.eigvalsh(outputs), torch.linalg.eigvalsh(inputs))
    precision = la._structure._precision(
        "0.weight", {"0.weight": torch.tensor(0.0)}, torch.tensor(1.0)
    )
    torch.testing.assert_close(precision.sort().values, wanted.clamp_min(0).sort().values)
    path = tmp_path / "posterior.safetensors"
    la.posterior().save(path)
    assert tb.load(path, net).sample()["0.weight"].shape == (70, 520)
