"""Schedules on one HTML page: Python packs the data, the scripts in `assets/` draw it in the browser."""
