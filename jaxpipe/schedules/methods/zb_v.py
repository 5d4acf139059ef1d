"""ZB-V: two chunks of a V on each device and no gap, at the memory of 1F1B.

F, I and W of a V of 2D stages with at most D Ma stored on any device. D=2, N=4, I and W as long as F:

    0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 0F3 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0W2 0I3 0W3 ...
    1  ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2W1 1W1 1F3 2F3 2I2 1I2 2W2 2I3 1I3 1W2 2W3 1W3

Bubble at F=I=W and N >= 2D-1: none, measured on each device from its own first action to its last one, as the source
does. Over the whole step the staggered start remains, (D-1) F of a stage, a ratio of (D-1)/(6N+D-1), which no order of
this placement falls below; it is reached for N >= D, while fewer microbatches leave more. Peak activations min(D, N)
Ma, on every device for N >= 2D. One replica of the weights, twice the messages of a linear pipeline. Any D >= 1, any N
>= 1.

Found from a block and by list scheduling under a bound of D Ma; devices that start first are also made to end first.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B for
our I, and github.com/sail-sg/zero-bubble for bound and bubble. Block and order are ours.
"""

from jaxpipe.schedules.methods._zero_bubble import ZERO_BUBBLE, v_shape, zero_bubble
from jaxpipe.schedules.methods.method import Formula, idle_ratio
from jaxpipe.schedules.ordering.memory_bounded import zb_v_block

METHOD = zero_bubble(
    "zb_v",
    v_shape,
    bound=lambda d: d,
    block=zb_v_block,
    staggered=True,
    summary="two stages on each device, in a V, and no gap, with as much stored as 1F1B",
    paper="Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362",
    bubble=(
        Formula(
            "0", lambda d, n, o: 0.0 if n >= 2 * d - 1 else None, where="N >= 2D-1", source=ZERO_BUBBLE, holds=False
        ),
        Formula("(D-1)/(6N+D-1)", lambda d, n, o: idle_ratio(d - 1, n, 2) if n >= d else None, where="N >= D"),
    ),
    peak=(Formula("at most D", lambda d, n, o: (d if n >= 2 * d else None, min(d, n)), source=ZERO_BUBBLE),),
)
