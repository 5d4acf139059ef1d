"""BitPipe's ablation as published: what is left without the V, and without eager exchange of gradients.

Source: BitPipe (arXiv 2410.19367), Table 5: BERT-64 on D GPUs of one node.
"""

from __future__ import annotations

# (D, mini-batch) -> variant -> samples/s.
TABLE_5: dict[tuple[int, int], dict[str, float]] = {
    (4, 16): {"BitPipe": 19.58, "without V": 19.48, "without eager sync": 18.82},
    (4, 32): {"BitPipe": 22.54, "without V": 22.40, "without eager sync": 21.99},
    (4, 64): {"BitPipe": 24.28, "without V": 24.19, "without eager sync": 24.11},
    (8, 32): {"BitPipe": 39.17, "without V": 38.78, "without eager sync": 38.32},
    (8, 64): {"BitPipe": 43.69, "without V": 43.38, "without eager sync": 43.18},
    (8, 128): {"BitPipe": 46.43, "without V": 46.29, "without eager sync": 46.05},
}
