"""Hanayo: one replica whose microbatches run over the devices in waves."""

from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import Option, at_least
from jaxpipe.schedules.ordering.whole_backwards import Preference, job_order, machines_of, rows_of_jobs
from jaxpipe.schedules.placement import zig_zag
from jaxpipe.schedules.schedule import Schedule


def hanayo(*, num_devices: int, num_microbatches: int, waves: int = 1) -> Schedule:
    """Returns Hanayo: a zig-zag of 2W chunks on each device, with at most D Ma stored on any.

    D=2, W=1, N=3, backward twice the forward:

        0  0F0 0F1 0F2 3F0 3B0 3B0 3F1 3B1 3B1 ... ... 0B0 0B0 3F2 3B2 3B2 0B1 0B1 ... ... 0B2 0B2
        1  ... 1F0 2F0 1F1 2F1 ... 2B0 2B0 1F2 1B0 1B0 2F2 2B1 2B1 1B1 1B1 2B2 2B2 1B2 1B2 ... ...

    Bubble at N=KD: 2(D-1) backwards of a stage, where a backward takes one, two or three forwards; a ratio of
    (D-1)/(2WN+D-1) at one forward and 2(D-1)/(3WN+2(D-1)) at two. Up to N=D that is the closed form below; for more
    every case tried has it. Where D does not divide N, the last, shorter unit leaves more. No order of
    a zig-zag has less than D-1 forwards and D-1 backwards; list scheduling comes to that with about 3D/2 Ma. Peak
    activations min(D, N) Ma. One replica of the weights. Any D >= 1, any N >= 1, any W >= 1.

    Up to D microbatches, step k of the 4WD steps of microbatch i has slot 2i + k, and a device's row is its steps in
    slot order; no two share a slot. For more microbatches a free device takes the ready step with the least slot. Units
    of D microbatches start half their length apart, 2WD slots, and backwards count one slot later. No forward starts
    while its device stores D Ma.

    Args:
        waves: W, each a way up and a way down the devices.

    Source: Liu et al., Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
    Efficiency, SC 2023 (arXiv 2308.15762), for waves and placement. The order and its formulas are ours: the paper's
    bubble formula was not at hand.
    """
    placement = zig_zag(num_devices, 2 * waves)
    num_stages = placement.num_stages
    order = None
    if num_microbatches > num_devices:
        # Units start 2WD slots apart, half of their 4WD steps, so that each overlaps the next.
        by_slot = Preference(
            spacing=2,
            pace=1,
            # Of a forward and a backward with one slot the forward goes first, which starts work on other devices.
            delay=1,
            cap=num_stages,
            num_capped=num_stages,
            group=num_devices,
            group_spacing=num_stages,
        )
        order = job_order(machines_of(placement), num_microbatches, by_slot)
    # No case is known where the cap stops all devices, and there is no proof that none exists.
    rows = order.rows if order else _unit_after_unit(placement.devices[0], num_devices, num_microbatches)
    return Schedule(
        "hanayo", placement, num_microbatches, rows_of_jobs(rows, placement, num_microbatches=num_microbatches)
    )


def _unit_after_unit(route: tuple[int, ...], num_devices: int, num_microbatches: int) -> list[list[int]]:
    """Returns [device][position] -> microbatch * steps + step, in slot order, where units follow each other whole."""
    device_of = (*route, *reversed(route))
    num_steps = len(device_of)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]
    for microbatch in range(num_microbatches):
        unit, i = divmod(microbatch, num_devices)
        for step, device in enumerate(device_of):
            # No two share a slot: two steps on a device differ by an odd number or by a multiple of 2D, and 2(i - j)
            # does neither.
            rows[device].append((num_steps * unit + 2 * i + step, num_steps * microbatch + step))
    return [[index for _, index in sorted(row)] for row in rows]


METHOD = Method(
    name="hanayo",
    generator=hanayo,
    summary="one replica in W waves: 2W stages on each device, in a zig-zag",
    paper="Liu et al., Hanayo, SC 2023, arXiv 2308.15762",
    options=(Option("waves", at_least(1), values=(1, 2), multiplies=True, note="W"),),
    period=lambda num_devices, options: num_devices,
    bubble=(
        Formula(
            "x/(3WN+x), x=2(D-1)",
            lambda d, n, o: None if n % d else 2 * (d - 1) / (3 * o["waves"] * n + 2 * (d - 1)),
            where="N a multiple of D",
        ),
    ),
    peak=(Formula("at most min(D, N)", lambda d, n, o: (None, min(d, n))),),
)
