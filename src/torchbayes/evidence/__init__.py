"""Evidence: recipes run and recorded, the papers' claims judged by what was measured.

recipes/PAPER/NAME.toml ──run──► results/PAPER/NAME.json ──claims.toml──► docs/results.md, README.md
"""

from torchbayes.evidence.claims import Claim, Judgement, judge, read_claims
from torchbayes.evidence.page import record_table, results_page
from torchbayes.evidence.readme import filled_in
from torchbayes.experiments.record import Record, read_records, record_of

__all__ = [
    "Claim",
    "Judgement",
    "Record",
    "filled_in",
    "judge",
    "read_claims",
    "read_records",
    "record_of",
    "record_table",
    "results_page",
]
