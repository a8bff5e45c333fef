"""The code that practitioners already have: other packages' models, loaders and trainers."""
