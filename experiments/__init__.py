"""What was tried, with its numbers: a numbered folder each; `run_all` makes their figures anew."""
