"""Notebooks for researchers, kept with what they show; `execute` shows it anew."""
