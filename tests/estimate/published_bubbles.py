"""Times of a stage and bubbles of ZB-H1 and ZB-H2 as published.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, tables 5 and 6: A100 SXM, milliseconds.
"""

from typing import NamedTuple


class Published(NamedTuple):
    """One model and number of microbatches."""

    model: str
    pipe: int
    num_microbatches: int
    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float
    bubbles: dict[str, float]

    @property
    def costs(self) -> str:
        """The times as `pipeline.costs` takes them."""
        return f"forward={self.forward},input_gradient={self.input_gradient},weight_gradient={self.weight_gradient}"


PUBLISHED = [
    Published(model, pipe, num, f, i, w, transfer, {"zb_h1": h1, "zb_h2": h2})
    for model, pipe, num, f, i, w, transfer, h1, h2 in (
        ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.1083),
        ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0837),
        ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0444),
        ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0698),
        ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0559),
        ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0294),
        ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0672),
        ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0516),
        ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0266),
        ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421, 0.0641),
        ("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.1106, 0.0490),
        ("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.0594, 0.0257),
    )
]
