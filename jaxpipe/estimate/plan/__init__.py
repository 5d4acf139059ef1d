"""The planner: ranks the ways to train a model on a cluster by their predicted time of a step."""
