"""What a schedule does over time: dependencies, times, waiting, stored activations. Values in, numbers out."""
