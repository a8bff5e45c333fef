"""Is a method's posterior right at your own scale? Answered on problems whose answer is known."""

from torchbayes.verification.conjugate import LinearRegression
from torchbayes.verification.nuts import NutsAgreement, compare_to_nuts
from torchbayes.verification.run import TARGETS, Verification, verify

__all__ = [
    "TARGETS",
    "LinearRegression",
    "NutsAgreement",
    "Verification",
    "compare_to_nuts",
    "verify",
]
