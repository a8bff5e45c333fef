"""From a posterior to predictions: averaging over the weights, the results, and batch-norm statistics."""
