"""Checks of what devices with equal copies of a layer share, and of what each keeps whole all the same."""

from __future__ import annotations

from jaxpipe.config.base import RunConfig
from jaxpipe.config.pipeline import outline
from jaxpipe.errors import ConfigError
from jaxpipe.sharding import NEEDS_FLUSH, NONE_KEPT, Shard
from jaxpipe.units import bytes_of


def check_shard(config: RunConfig) -> None:
    """Raises ConfigError for parts of gradients or weights without a flush."""
    if Shard(config.mesh.shard).splits_gradients and outline(config).delays:
        raise ConfigError(
            f"mesh.shard={config.mesh.shard!r} with pipeline.schedule={config.pipeline.schedule!r}",
            rule=NEEDS_FLUSH,
            repair=f"set mesh.shard={Shard.OPTIMIZER.value!r}, or pipeline.schedule='1f1b'",
        )


def check_kept(config: RunConfig) -> None:
    """Raises ConfigError for a bound of gathered weights or of sums that is no number of bytes, or has no effect."""
    shard = Shard(config.mesh.shard)
    for name, of, is_split, least in (
        ("keep_gathered", "weights", shard.splits_weights, Shard.WEIGHTS),
        ("keep_sums", "gradients", shard.splits_gradients, Shard.GRADIENTS),
    ):
        keep = getattr(config.mesh, name)
        if keep == NONE_KEPT:
            continue
        if bytes_of(keep) is None:
            raise ConfigError(
                f"mesh.{name}={keep!r} names no bytes",
                rule=f"keep-bytes: {NONE_KEPT!r}, or the bytes that a device may keep of whole layers, in GiB or MiB",
                repair=f"set for example mesh.{name}='12GiB'",
            )
        if not is_split:
            raise ConfigError(
                f"mesh.{name}={keep!r} with mesh.shard={config.mesh.shard!r}",
                rule=f"keep-of-{of}: a device keeps all {of} of its layers, unless devices share them",
                repair=f"set mesh.{name}={NONE_KEPT!r}, or mesh.shard={least.value!r}",
            )
    if config.mesh.keep_sums != NONE_KEPT and outline(config).num_replicas > 1:
        raise ConfigError(
            f"mesh.keep_sums={config.mesh.keep_sums!r} with pipeline.schedule={config.pipeline.schedule!r}",
            rule="keep-alone: of two replicas the other holder of a stage waits for its sums, so that none are kept",
            repair=f"set mesh.keep_sums={NONE_KEPT!r}, or pipeline.schedule='1f1b'",
        )
