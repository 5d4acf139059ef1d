"""Measures how long the parts of a step take on the device at hand."""
