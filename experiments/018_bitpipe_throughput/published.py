"""What the BitPipe paper has measured, as far as it is in numbers: Wu, Chen and Yu, arXiv 2410.19367.

Figures 8 to 12 are images; of figures 9 and 10 the text gives averages, of figure 12 nothing. Table 4 is as we read it,
checked by data x pipe = GPUs.
"""

from __future__ import annotations

METHODS: tuple[str, ...] = ("DAPPLE", "1F1B-Int", "MixPipe", "BitPipe")

# Table 7: samples/s on 32 GPUs, by (model, D); a mini-batch of 128 (BERT-64) and 32 (GPT-96).
TABLE_7: dict[tuple[str, int], dict[str, float]] = {
    ("BERT-64", 4): dict(zip(METHODS, (85.10, 89.88, 38.59, 47.15), strict=True)),
    ("BERT-64", 8): dict(zip(METHODS, (87.79, 85.90, 95.10, 96.90), strict=True)),
    ("BERT-64", 16): dict(zip(METHODS, (82.26, 60.32, 76.97, 75.16), strict=True)),
    ("GPT-96", 8): dict(zip(METHODS, (20.51, 22.30, 25.45, 25.70), strict=True)),
    ("GPT-96", 16): dict(zip(METHODS, (19.44, 19.51, 24.06, 22.22), strict=True)),
}

# Figure 9, its text: BitPipe's speed-up on one node of 8 GPUs, D = 8, averaged over N = D, 2D, 4D.
FIGURE_9: dict[str, dict[str, float]] = {
    "BERT-64": {"DAPPLE": 1.27, "1F1B-Int": 1.12, "Chimera": 1.09},
    "GPT-96": {"DAPPLE": 1.15, "1F1B-Int": 1.03, "Chimera": 1.09},
}

# Figure 10, its text: BitPipe's speed-up with data parallelism, averaged over 8, 16 and 32 GPUs.
FIGURE_10: dict[str, dict[str, float]] = {
    "BERT-64": {"DAPPLE": 1.28, "1F1B-Int": 1.13, "MixPipe": 1.06},
    "GPT-96": {"DAPPLE": 1.27, "1F1B-Int": 1.15, "MixPipe": 1.05},
}

# Table 4: the best (W, D, B), pipelines, their depth and microbatch size, by (model, GPUs).
TABLE_4: dict[tuple[str, int], dict[str, tuple[int, int, int]]] = {
    ("BERT-64", 8): dict(zip(METHODS, ((2, 4, 4), (2, 4, 4), (1, 8, 4), (1, 8, 4)), strict=True)),
    ("BERT-64", 16): dict.fromkeys(METHODS, (4, 4, 4)),
    ("BERT-64", 32): dict(zip(METHODS, ((4, 8, 2), (8, 4, 2), (4, 8, 4), (4, 8, 4)), strict=True)),
    ("GPT-96", 8): dict.fromkeys(METHODS, (1, 8, 1)),
    ("GPT-96", 16): dict.fromkeys(METHODS, (2, 8, 1)),
    ("GPT-96", 32): dict.fromkeys(METHODS, (4, 8, 1)),
}

# What Table 4's search tried: pipelines, depths, microbatch sizes.
SEARCHED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "BERT-64": ((1, 2, 4, 8), (4, 8, 16), (1, 2, 4, 8)),
    "GPT-96": ((1, 2, 4), (8, 16), (1, 2)),
}
