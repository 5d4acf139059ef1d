"""Training: setup from a config, the train step, the loop over steps, metrics, resuming."""
