"""Which numbers of devices a registered schedule takes, for tests over all of them."""

LEAST_DEVICES = {"bpipe": 4}
TWO_REPLICAS = ("bitpipe", "chimera", "gems", "mixpipe")  # on an even number of devices


def takes(name: str, num_devices: int) -> bool:
    """Whether the schedule `name` is one of `num_devices` devices."""
    return num_devices >= LEAST_DEVICES.get(name, 1) and not (name in TWO_REPLICAS and num_devices % 2)
