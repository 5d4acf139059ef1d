"""Passes: functions from a schedule, or its rows, to another one."""
