"""What travels between devices, one file for each kind: its payloads, permutes, rows, buffers and durations."""
