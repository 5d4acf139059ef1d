"""What one GPU says of every figure that is only predicted so far: `python -m experiments.gpu` fills a page."""
