"""ZB-H1: 1F1B with split backwards, whose weight gradients fill the end of the step, at the memory of 1F1B.

F, I and W of a linear pipeline with at most D Ma stored on any device. D=3, N=4, I and W as long as F:

    0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1  ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Bubble at F=I=W: (D-1) F for N >= D, a ratio of (D-1)/(3N+D-1), a third of 1F1B's; (2D-1-N) F for fewer. No order
has less: the last device starts D-1 forwards after the first. Published for other times: (D-1)(F+I-W), of the authors'
greedy order. Peak activations min(D, N) Ma on every device: they are kept until W, so that the memory that 1F1B leaves
free on its last devices is spent on W that wait. One replica of the weights. Any D >= 1, any N >= 1.

Found as the others of these methods are; the result nearly always is the published order, in which device d does I, W
and F in turn and each W waits for d further I.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), which writes B for our I; published
formulas as in github.com/sail-sg/zero-bubble.
"""

from jaxpipe.schedules.methods._zero_bubble import ZERO_BUBBLE, zero_bubble
from jaxpipe.schedules.methods.method import Formula, idle_ratio
from jaxpipe.schedules.ordering.memory_bounded import line_block
from jaxpipe.schedules.placement import linear

METHOD = zero_bubble(
    "zb_h1",
    linear,
    bound=lambda d: d,
    block=line_block,
    summary="1F1B in two parts: weight gradients fill its end, with as much stored",
    paper="Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
    bubble=(
        Formula(
            "(D-1)/(3N+D-1)",
            lambda d, n, o: idle_ratio(d - 1, n) if n >= d else None,
            where="N >= D",
            source=ZERO_BUBBLE,
        ),
        Formula(
            "(2D-1-N)/(2N+2D-1)",
            lambda d, n, o: idle_ratio(2 * d - 1 - n, n) if n < d else None,
            where="N < D",
        ),
    ),
    peak=(Formula("min(D, N)", lambda d, n, o: (min(d, n),) * 2, source=ZERO_BUBBLE),),
)
