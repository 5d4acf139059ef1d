"""V-Half: two chunks of a V on each device at half the memory of 1F1B.

F, I and W of a V of 2D stages with at most floor((D+2)/2) Ma stored on any device. D=3, N=3, I and W as long as F:

    0  0F0 0F1 0F2 ... ... 5F0 5I0 5W0 5F1 5I1 5W1 ... 0I0 0W0 ... 5F2 5I2 5W2 ... 0I1 0W1 0I2 0W2
    1  ... 1F0 1F1 ... 4F0 ... 4F1 4I0 4W0 1F2 4I1 1I0 1W0 4W1 4F2 ... ... 4I2 1I1 1W1 1I2 4W2 1W2
    2  ... ... 2F0 3F0 2F1 3F1 ... ... 3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1 3I2 2I2 3W2 2W2 ...

Bubble at F=I=W, N >= D and D >= 3: 3D-7 forwards of a stage for even D, 3D-4 for odd D, whatever N, for all D to 16: a
ratio of (3D-7)/(6N+3D-7). The source has about D/(2N). Peak activations floor((D+2)/2) Ma, on every device for N >= 2D:
no more than BPipe, without its transfers. One replica of the weights, twice the messages of a linear pipeline. Any
D >= 1, any N >= 1.

Found from the published block and by list scheduling under that bound.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B for
our I; block and bound as in github.com/sail-sg/zero-bubble. The resulting schedule and its bubble formula are ours.
"""

from jaxpipe.schedules.methods._zero_bubble import CONTROLLABLE_MEMORY, v_shape, zero_bubble
from jaxpipe.schedules.methods.method import Formula, idle_ratio
from jaxpipe.schedules.ordering.memory_bounded import v_half_block

METHOD = zero_bubble(
    "v_half",
    v_shape,
    bound=lambda d: (d + 2) // 2,
    block=v_half_block,
    summary="ZB-V's V with at most floor((D+2)/2) microbatches stored: BPipe's bound, and nothing is sent for it",
    paper="Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362",
    bubble=(
        Formula("about D/(2N)", lambda d, n, o: d / (2 * n), source=CONTROLLABLE_MEMORY, holds=False),
        Formula(
            "x/(6N+x), x=3D-7 for even D, 3D-4 for odd D",
            lambda d, n, o: idle_ratio(3 * d - (4 if d % 2 else 7), n, 2) if n >= d and 3 <= d <= 16 else None,
            where="N >= D, D from 3 to 16",
        ),
    ),
    peak=(
        Formula(
            "floor((D+2)/2)",
            lambda d, n, o: ((d + 2) // 2 if n >= 2 * d else None, (d + 2) // 2 if n >= d else None),
            where="N >= D",
            source=CONTROLLABLE_MEMORY,
        ),
    ),
)
