"""A ranked list of ways to train a model on a cluster."""
