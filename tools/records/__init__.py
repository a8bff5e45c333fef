"""What this repository says of its own measurements; no part of the installed package.

recipes/PAPER/NAME.toml ──recipes run──► results/PAPER/NAME.json ──claims.toml──► docs/results.md, README.md
benchmarks/*.py ──make bench──► results/*.json ──► docs/benchmarks.md, README.md
"""
