"""ZB-H2: forwards enough ahead, and weight gradients late enough, that no device has a gap.

F, I and W of a linear pipeline with at most 2D-1 Ma stored on any device. D=3, N=6, I and W as long as F:

    0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0F5 0I2 0W1 0I3 0W2 0I4 0W3 0W4 0I5 0W5 ... ...
    1  ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1F5 1I4 1W1 1W2 1I5 1W3 1W4 1W5 ...
    2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

Bubble at F=I=W and N >= 2D-1: none, measured on each device from its own first action to its last one, as the source
does. Over the whole step the staggered start remains, (D-1) F, a ratio of (D-1)/(3N+D-1), which no order of this
placement falls below; it is reached for N >= D, while fewer microbatches leave (2D-1-N) F. Peak activations min(2D-1,
N) Ma on every device. One replica of the weights. Any D >= 1, any N >= 1.

Found as ZB-H1 is, under a higher bound; devices that start first are also made to end first, where no step is longer
for it. With times other than F=I=W gaps may remain, because W is then too short or too long for them.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), which writes B for our I. The order
is ours.
"""

from jaxpipe.schedules.methods._zero_bubble import ZERO_BUBBLE, zero_bubble
from jaxpipe.schedules.methods.method import Formula, idle_ratio
from jaxpipe.schedules.placement import linear

METHOD = zero_bubble(
    "zb_h2",
    linear,
    bound=lambda d: 2 * d - 1,
    staggered=True,
    summary="ZB-H1 with up to 2D-1 microbatches stored, and no gap",
    paper="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
    bubble=(
        Formula(
            "0", lambda d, n, o: 0.0 if n >= 2 * d - 1 else None, where="N >= 2D-1", source=ZERO_BUBBLE, holds=False
        ),
        Formula("(D-1)/(3N+D-1)", lambda d, n, o: idle_ratio(d - 1, n) if n >= d else None, where="N >= D"),
        Formula(
            "(2D-1-N)/(2N+2D-1)",
            lambda d, n, o: idle_ratio(2 * d - 1 - n, n) if n < d else None,
            where="N < D",
        ),
    ),
    peak=(
        Formula(
            "about 2D-1",
            lambda d, n, o: (2 * d - 1,) * 2 if n >= 2 * d else None,
            where="N >= 2D",
            source=ZERO_BUBBLE,
            holds=False,
        ),
        Formula("min(2D-1, N)", lambda d, n, o: (min(2 * d - 1, n),) * 2),
    ),
)
