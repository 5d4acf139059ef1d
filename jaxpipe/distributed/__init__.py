"""Several processes that run one program: how they start, find, agree with and watch each other."""
