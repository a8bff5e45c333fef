"""From a posterior to predictions: the weights averaged out, the results, and batch-norm statistics."""
