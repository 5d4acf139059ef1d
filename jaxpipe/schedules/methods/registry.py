"""All schedules by name; `build` is the one way from a name to a Schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.schedules.methods.bitpipe import bitpipe
from jaxpipe.schedules.methods.bpipe import bpipe
from jaxpipe.schedules.methods.breadth_first import breadth_first
from jaxpipe.schedules.methods.chimera import chimera
from jaxpipe.schedules.methods.dualpipe import dualpipe
from jaxpipe.schedules.methods.dualpipe_v import dualpipe_v
from jaxpipe.schedules.methods.gems import gems
from jaxpipe.schedules.methods.gpipe import gpipe
from jaxpipe.schedules.methods.hanayo import hanayo
from jaxpipe.schedules.methods.interleaved_1f1b import interleaved_1f1b
from jaxpipe.schedules.methods.mixpipe import mixpipe
from jaxpipe.schedules.methods.one_f_one_b import one_f_one_b
from jaxpipe.schedules.methods.v_half import v_half
from jaxpipe.schedules.methods.v_min import v_min
from jaxpipe.schedules.methods.zb_h1 import zb_h1
from jaxpipe.schedules.methods.zb_h2 import zb_h2
from jaxpipe.schedules.methods.zb_v import zb_v
from jaxpipe.schedules.schedule import Schedule

REGISTRY: dict[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "bitpipe": bitpipe,
    "bpipe": bpipe,
    "breadth_first": breadth_first,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "gems": gems,
    "gpipe": gpipe,
    "hanayo": hanayo,
    "interleaved_1f1b": interleaved_1f1b,
    "mixpipe": mixpipe,
    "v_half": v_half,
    "v_min": v_min,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
}


def build(name: str, *, num_devices: int, num_microbatches: int, **options: object) -> Schedule:
    """The schedule that `REGISTRY[name]` generates.

    Args:
        name: a key of `REGISTRY`.
        num_devices: devices on the `pipe` axis, >= 1.
        num_microbatches: microbatches of one step, >= 1.
        options: what else the generator takes, for example `num_chunks`.

    Raises:
        ScheduleError: unknown name or option, or a count below 1.

    Example:
        >>> [str(action) for action in build("1f1b", num_devices=2, num_microbatches=2).rows[0]]
        ['0F0', '0F1', '0B0', '0B1']
    """
    if name not in REGISTRY:
        raise ScheduleError(
            f"unknown schedule {name!r}.{closest(name, list(REGISTRY))}\n"
            f"  rule schedule-name: one of {', '.join(sorted(REGISTRY))}\n"
            "  repair: use one of these names, or give your own schedule as a CSV file"
        )
    for field, value in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(
                f"{field}={value} for schedule {name!r}.\n"
                f"  rule at-least-one: a schedule has at least one device and one microbatch\n"
                f"  repair: set {field}=1 or more"
            )
    generator = REGISTRY[name]
    known = [p for p in inspect.signature(generator).parameters if p not in ("num_devices", "num_microbatches")]
    for option in options:
        if option not in known:
            raise ScheduleError(
                f"schedule {name!r} has no option {option!r}.{closest(option, known)}\n"
                f"  rule schedule-option: {name!r} takes {', '.join(known) or 'no options'}\n"
                f"  repair: leave {option!r} out"
            )
    return generator(num_devices=num_devices, num_microbatches=num_microbatches, **options)
