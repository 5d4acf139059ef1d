"""Runs whose weights are streamed, and one of two processes that stream them.

python streamed_runs.py PORT PROCESS RUN BUCKET_BYTES FOLDER

What it has to say it writes to the file FOLDER/PROCESS: Gloo's threads write to the standard output, several into one
line.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from test_round_trip import new_run

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.convert import export_model
from jaxpipe.distributed.ports import free_port
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.errors import LostProcess
from jaxpipe.estimate import resolve
from jaxpipe.huggingface import Bucket, stream
from jaxpipe.huggingface.tensor_files import SINGLE, entries, read_header
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.run_folder import read_config, write_config
from jaxpipe.training.setup import build_pipeline

MESHES = {
    "all": {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2},
    "whole masters": {"mesh.data": 2, "mesh.pipe": 4, "mesh.shard": "none"},
    "v": {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2, "pipeline.schedule": "zb_v", "mesh.shard": "weights"},
    "replicas": {"mesh.pipe": 4, "mesh.tensor": 2, "pipeline.schedule": "bitpipe"},
    "expert": {"mesh.pipe": 2, "mesh.expert": 2, "mesh.tensor": 2},
    "adapters": {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2, "mesh.shard": "weights"},
    "vocabulary": {"mesh.pipe": 4, "mesh.tensor": 2, "pipeline.vocab_over_pipe": "true"},
}
NUM_LAYERS = {"replicas": 9}  # at least one for each stage
OTHERS = {
    "llama": {"num_kv_heads": 2},
    "gpt_oss": {"num_kv_heads": 2, "rope_scaling": "yarn", "rope_scaling_factor": 4.0},
} | {family: {"num_experts": 4} for family in ("mixtral", "qwen3_moe", "deepseek_v3")}
FIRST_WAIT_S, LAST_WAIT_S = 60.0, 2.0


def make_run(workdir: Path, family: str, mesh: str) -> Path:
    """A run of a model of ours, with noise in every parameter, whose first number is -0.0."""
    more = OTHERS.get(family, {}) | ({"lora_rank": 3, "lora_targets": "all"} if mesh == "adapters" else {})
    new_run(workdir, family, num_layers=NUM_LAYERS.get(mesh, 5), **more)
    write_config(workdir, RunConfig.of(read_config(str(workdir))).replaced(MESHES[mesh]))
    _, params = restore_canonical(workdir, model=LanguageModel(model_config(read_config(str(workdir)))))

    def with_negative_zero(leaf: np.ndarray) -> np.ndarray:
        leaf = leaf.copy()
        leaf.flat[0] = -0.0
        return leaf

    save_canonical(workdir, step=1, params=jax.tree.map(with_negative_zero, params))
    return workdir


def staged(run: Path) -> tuple[Any, Pipeline, RunConfig]:
    """The staged parameters of a run's last checkpoint, its pipeline and its config."""
    config = RunConfig.of(read_config(str(run)))
    _, params = restore_canonical(run, model=LanguageModel(model_config(config)))
    _, pipeline = build_pipeline(resolve(config, None, platform="cpu"), jax.devices()[: config.mesh.num_devices])
    shardings = pipeline.shardings(jax.eval_shape(pipeline.to_stages, params))
    return jax.jit(pipeline.to_stages, out_shardings=shardings)(params), pipeline, config


def exported(run: Path, folder: Path, *, dtype: str) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of each tensor that the file export writes, in the file's order."""
    export_model(str(run), str(folder), dtype=dtype)
    header = read_header(folder / SINGLE)
    content = (folder / SINGLE).read_bytes()[8 + len(header.encode()) :]
    return {name: (entry.shape, content[entry.start : entry.end]) for name, entry in entries(header).items()}


def live_bytes() -> int:
    """Bytes of all arrays on the first device."""
    # By shapes: to look at a shard would make one more array of it.
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        if jax.devices()[0] in array.sharding.device_set
    )


def digest(buckets: Iterable[Bucket]) -> str:
    """A digest of names and bytes."""
    sums = hashlib.sha256()
    for bucket in buckets:
        for name, array in bucket.tensors:
            sums.update(name.encode() + np.asarray(array).tobytes())
    return sums.hexdigest()


def told(buckets: Iterable[Bucket]) -> str:
    """The first line of the error with which a stream ends."""
    try:
        list(buckets)
    except LostProcess as error:
        return str(error).splitlines()[0]
    return "no error"


def in_two_processes(script: str | Path, *args: Any, env: dict[str, str]) -> list[str]:
    """Runs `script PORT PROCESS` and the arguments twice, at once; returns what each has written."""
    command = [sys.executable, script, str(free_port())]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env}
    processes = [
        subprocess.Popen(
            [*command, index, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for index in "01"
    ]
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [errors[-2000:] for _, errors in outputs]
    return [output for output, _ in outputs]


def main() -> None:
    port, process, run, bucket_bytes, folder = sys.argv[1:]
    is_first = process == "0"
    with ProcessGroup(f"localhost:{port}", 2, int(process), lost_after_s=FIRST_WAIT_S):
        params, pipeline, config = staged(Path(run))

        def new(lost_after_s: float = FIRST_WAIT_S) -> Any:
            fields = {"train.lost_after_s": lost_after_s}
            to = "host" if is_first else "device"
            return stream(params, pipeline, config.replaced(fields), bucket_bytes=int(bucket_bytes), to=to)

        said = [digest(new())]
        left = new()
        next(left)
        if is_first:
            said += [told(left), told(new(LAST_WAIT_S))]
        else:
            left.close()
        (Path(folder) / process).write_text("\n".join(said))


if __name__ == "__main__":
    main()
