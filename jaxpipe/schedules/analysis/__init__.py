"""Analysis of a schedule over time: dependencies, times, bubbles, stored activations. Values in, numbers out."""
