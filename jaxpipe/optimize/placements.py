"""Placements by name, for the command line, and the placements that a file has a place for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Placement, bidirectional, linear, looped, zig_zag
from jaxpipe.schedules.option_checks import check_even
from jaxpipe.schedules.ordering.problem import usual_placements

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "linear": linear,
    "v": lambda num_devices: zig_zag(num_devices, 2),
    "w": lambda num_devices: zig_zag(num_devices, 4),
    "looped": lambda num_devices: looped(num_devices, 2),
    "looped_3": lambda num_devices: looped(num_devices, 3),
    "looped_4": lambda num_devices: looped(num_devices, 4),
    "bidirectional": lambda num_devices: bidirectional(linear(num_devices)),
    "bidirectional_v": lambda num_devices: bidirectional(zig_zag(num_devices, 2)),
    "bidirectional_looped": lambda num_devices: bidirectional(looped(num_devices, 2)),
}


def placements_of(names: Iterable[str], num_devices: int, *, output: str = "") -> tuple[Placement, ...]:
    """The placements with these `names` or, without any, those that are usual and that `output` has a place for.

    Args:
        names: keys of PLACEMENTS.
        num_devices: devices on the `pipe` axis.
        output: a file's name; a CSV has no place for a second replica.

    Returns:
        None at all if any placement will do.

    Raises:
        ScheduleError: an odd number of devices for two replicas, or a name that `output` has no place for.
    """
    names = tuple(dict.fromkeys(names))
    is_csv = Path(output).suffix == ".csv"
    for name in names:
        if name.startswith("bidirectional"):
            check_even(name, num_devices)
    placements = tuple(PLACEMENTS[name](num_devices) for name in names)
    if is_csv and any(placement.num_replicas > 1 for placement in placements):
        raise ScheduleError(
            f"--output={output} cannot hold what --placement={_refused(names)} asks for.\n"
            "  rule output-form: a CSV has no place for a second replica of the stages; JSON has\n"
            f"  repair: give --output={Path(output).with_suffix('.json')}, or leave that placement out"
        )
    if is_csv and not placements:
        return tuple(placement for placement in usual_placements(num_devices) if placement.num_replicas == 1)
    return placements


def name_of(placement: Placement) -> str:
    """The name of `placement`, or the devices of its stages where it has none.

    Example:
        >>> name_of(zig_zag(3, 2)), name_of(zig_zag(2, 3))
        ('v', 'stages on devices 0 1 1 0 0 1')
    """
    for name, make in PLACEMENTS.items():
        if make(placement.num_devices) == placement:
            return name
    devices = " ".join(map(str, placement.devices[0]))
    return f"stages on devices {devices}{', and mirrored' if placement.num_replicas > 1 else ''}"


def _refused(names: Iterable[str]) -> str:
    return next(name for name in names if name.startswith("bidirectional"))
