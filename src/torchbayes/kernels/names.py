"""The names of the loops, which can be had without numba."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Loop"]


class Loop(IntEnum):
    """What is done to every entry, with the columns of tensors that it takes | and the numbers.

    The first column is changed, and so are a sampler's own tensors. The loops up to `BBB` draw.
    With a number of theirs `torchbayes.kernels.loops` must change too: numba would not see that it is stale.
    """

    NORMAL = 0
    """x, which becomes a standard normal number."""
    GAUSSIAN = 1
    """x, mean, std; x becomes mean + std · ε."""
    SGLD = 2
    """θ, gradient | 1 − εδ/2, εn/2, √ε."""
    PSGLD = 3
    """θ, V, gradient | n, δ, α, (1 − α)/N², 1/(1 − αᵗ), λ, ε/2, √ε."""
    SGHMC = 4
    """θ, p, gradient | 1 − hD, hn, hδ, √(2hDm − h²V̂), h/m."""
    SGNHT = 5
    """θ, p, ξ, gradient | h, D, (mc)⁻², hn, hδ, 2mh, h/m."""
    ATMC = 6
    """As for SGNHT."""
    DRAW = 7
    """θ, μ, s | a, b; θ becomes μ + b ε / √(s + a)."""
    BBB = 8
    """w, ε, σ, slope, μ, ρ | the bounds of ρ; σ = softplus(ρ), w = μ + σε; sums Σσ², Σμ²,
    Σ log σ and Σε²."""
    SOFTPLUS = 9
    """σ, slope, ρ | the bounds of ρ."""
    BBB_GRADIENTS = 10
    """Δμ, Δρ, ∂w, ε, σ, slope, μ | s, sδ, sδm, where s is the weight of the KL term."""
    MIXTURE = 11
    """g, w | 1/σ₁², 1/σ₂² − 1/σ₁², the log-odds at 0 and the bounds of the log-odds u; the scale mixture
    prior's −∂log p/∂w, and sums Σw² and Σ softplus(u)."""
    VOGN = 12
    """μ, m, s, ĝ, ĥ | α, β1, 1 − β2, β2 (times what ĥ is to be multiplied by), δ̃, δ̃ + γ."""
    IVON = 13
    """μ, m, h, ĝ, θ | 1 − β1, 1 − β2, λ, δ, δ(1 − β1ᵗ), 1/(1 − β1ᵗ), α(h0 + δ), ξ."""
