"""From a network and data to a posterior: `fit`, its loop, and who owns the weights meanwhile."""
