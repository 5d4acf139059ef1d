"""The pieces of the trainer: model and pipeline from a config, optimizer, train step, metrics."""
