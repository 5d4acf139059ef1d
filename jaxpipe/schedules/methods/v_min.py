"""V-Min: two chunks of a V on each device at a third of the memory of 1F1B.

F, I and W of a V of 2D stages with at most floor((D+4)/3) Ma stored on any device. D=4, N=3, waits left out:

    0  0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 7F2 7I2 0I1 7W2 0W1 0I2 0W2
    1  1F0 1F1 6F0 6F1 6I0 6W0 1F2 6I1 6W1 1I0 1W0 6F2 1I1 6I2 1W1 6W2 1I2 1W2
    2  2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5W1 5F2 2I1 2W1 5I2 5W2 2I2 2W2
    3  3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2

Bubble at F=I=W, N >= D and D >= 3, in forwards of a stage, whatever N, for all D to 16: 4D-7, 4D-5 or 4D-9 where D
modulo 3 is 0, 1 or 2: a ratio of (4D-5)/(6N+4D-5) and so on. The source has about 2D/(3N). Where W is shorter than F or
I it grows with N: at D=8, N=32 and times 1, 1.2, 0.8 it is 48 forwards, against 23 at F=I=W. Peak activations
floor((D+4)/3) Ma, on every device for N >= 2D. One replica of the weights, twice the messages of a linear pipeline. Any
D >= 1, any N >= 1.

Found as V-Half is, from a block of its own and under a lower bound.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B for
our I; block and bound as in github.com/sail-sg/zero-bubble. The resulting schedule and its bubble formula are ours.
"""

from jaxpipe.schedules.methods._zero_bubble import CONTROLLABLE_MEMORY, v_shape, zero_bubble
from jaxpipe.schedules.methods.method import Formula, idle_ratio
from jaxpipe.schedules.ordering.memory_bounded import v_min_block

METHOD = zero_bubble(
    "v_min",
    v_shape,
    bound=lambda d: (d + 4) // 3,
    block=v_min_block,
    summary="ZB-V's V with at most floor((D+4)/3) microbatches stored",
    paper="Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362",
    bubble=(
        Formula("about 2D/(3N)", lambda d, n, o: 2 * d / (3 * n), source=CONTROLLABLE_MEMORY, holds=False),
        Formula(
            "x/(6N+x), x=4D-7, 4D-5, 4D-9 for D mod 3 = 0, 1, 2",
            lambda d, n, o: idle_ratio(4 * d - (7, 5, 9)[d % 3], n, 2) if n >= d and 3 <= d <= 16 else None,
            where="N >= D, D from 3 to 16",
        ),
    ),
    peak=(
        Formula(
            "floor((D+4)/3)",
            lambda d, n, o: ((d + 4) // 3 if n >= 2 * d else None, (d + 4) // 3 if n >= d else None),
            where="N >= D",
            source=CONTROLLABLE_MEMORY,
        ),
    ),
)
