"""What a process holds while it streams, as the system counts it: its state and two buckets."""

import sys
from pathlib import Path
from typing import Any

import pytest
from streamed_runs import in_two_processes

from jaxpipe.config import base_config, model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.estimate import resolve
from jaxpipe.huggingface import stream
from jaxpipe.models import LanguageModel
from jaxpipe.training.setup import build_pipeline

BUCKET_BYTES = 2**27
MODES = [(to, dtype) for dtype in ("float32", "bfloat16") for to in ("device", "host")]


def config_of() -> RunConfig:
    """Parameters of 1.1 GB in float32, of which two processes have a half each."""
    config = base_config("llama")
    config.model.update(num_layers=24, hidden=1024, num_heads=16, num_kv_heads=8, feed_forward=2816, vocab_size=8000)
    config.mesh.update(pipe=2, platform="cpu")
    config.pipeline.update(num_microbatches=4)
    return RunConfig.of(config)


def resident(what: str) -> int:
    """Bytes of this process in memory: "VmRSS" now, "VmHWM" at most."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith(what))


def peak_of(walk: Any) -> int:
    """Bytes that `walk` needs beside what the process has."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    walk()
    return resident("VmHWM") - before


def main() -> None:
    port, process = sys.argv[1:]
    with ProcessGroup(f"localhost:{port}", 2, int(process), lost_after_s=300.0):
        import jax

        config = config_of()
        model = LanguageModel(model_config(config))
        _, pipeline = build_pipeline(resolve(config, None, platform="cpu"), jax.devices())
        shapes = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))

        def half(leaf: Any, sharding: Any) -> Any:
            return jax.jit(lambda: jax.numpy.full(leaf.shape, 0.5, leaf.dtype), out_shardings=sharding)()

        params = jax.tree.map(half, shapes, pipeline.shardings(shapes))
        for to, dtype in MODES:

            def walk(to: str = to, dtype: str = dtype) -> None:
                for bucket in stream(params, pipeline, config, bucket_bytes=BUCKET_BYTES, dtype=dtype, to=to):
                    assert bucket.num_bytes <= BUCKET_BYTES

            walk()  # compiles
            print(f"\nPEAK {to} {dtype} {peak_of(walk)}", flush=True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are counted by Linux")
def test_each_process_needs_two_buckets_beside_its_state():
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "MALLOC_MMAP_THRESHOLD_": str(2**20),  # an array that is freed goes back to the system
    }
    said = in_two_processes(__file__, env=flags)
    for output in said:
        peaks = [line.split()[1:] for line in output.splitlines() if line.startswith("PEAK")]
        assert [(to, dtype) for to, dtype, _ in peaks] == MODES
        for to, dtype, peak in peaks:
            print(f"{to} {dtype}: {int(peak) / 2**20:.0f} of {2 * BUCKET_BYTES / 2**20:.0f} MiB")
            assert BUCKET_BYTES < int(peak) <= 2 * BUCKET_BYTES, (to, dtype)


if __name__ == "__main__":
    main()
