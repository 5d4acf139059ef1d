"""A LLaMA and a mixture trained by `jaxpipe.train`, the LLaMA in PyTorch too: tokens a second, MFU, bytes."""

from __future__ import annotations

import runpy
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.runs import metrics_of_run
from jaxpipe.cluster import Topology
from jaxpipe.config import check
from jaxpipe.estimate import Roofline, estimate, memory, setting_of

DENSE, MIXTURE = (Path(__file__).with_name(name) for name in ("llama_1b.py", "mixture_2b.py"))
WARM_UP = 5  # steps that are not counted
_SMALL = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 128}
SMALL = {DENSE: _SMALL, MIXTURE: _SMALL | {"num_experts": 4, "experts_per_token": 2}}  # sizes of quick runs


def cells(size: Size) -> Iterator[Cell]:
    """Ours, PyTorch's, and a mixture of ours."""
    yield Cell("jaxpipe, 1F1B", partial(_ours, size, DENSE, "1f1b"))
    yield Cell("PyTorch", partial(_theirs, size))
    yield Cell("jaxpipe, ZB-V", partial(_ours, size, DENSE, "zb_v"))
    yield Cell("jaxpipe, a mixture, 1F1B", partial(_ours, size, MIXTURE, "1f1b"))


PART = Part("training", "A training run", cells, minutes=5)


def _fields(size: Size, preset: Path, schedule: str) -> dict[str, object]:
    fields: dict[str, object] = {"mesh.platform": size.device.platform, "train.steps": 30}
    fields["pipeline.schedule"] = schedule
    if size.quick:
        fields |= {f"model.{name}": value for name, value in SMALL[preset].items()}
        fields |= {
            "model.vocab_size": 256,
            "model.attention": "chunked",
            "data.seq_len": 64,
            "train.steps": WARM_UP + 3,
        }
        fields |= {"data.batch_size": 4, "pipeline.num_microbatches": 2}
    return fields


def config_of_run(size: Size, preset: Path, schedule: str) -> ConfigDict:
    """The checked config of a run; small if `size` is quick."""
    config = runpy.run_path(str(preset))["get_config"]()
    config.update_from_flattened_dict(_fields(size, preset, schedule))
    check(config)
    return config


def _ours(size: Size, preset: Path, schedule: str) -> Record:
    rows = metrics_of_run(preset, _fields(size, preset, schedule))
    record: Record = {"steps": len(rows), "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"]}
    for name in ("tokens_per_s", "mfu"):
        if name in rows[-1]:
            record[name] = statistics.median(row[name] for row in rows[WARM_UP:])
    if "peak_bytes_in_use" in rows[-1]:
        record["peak_gib"] = rows[-1]["peak_bytes_in_use"] / 2**30
    if size.hardware:
        setting = setting_of(config_of_run(size, preset, schedule), Topology(size.hardware, 1, 1))
        found = estimate(setting, Roofline(size.hardware))
        record |= {"estimated_tokens_per_s": found.tokens_per_s, "estimated_mfu": found.mfu}
        record["estimated_gib"] = memory(setting).total / 2**30
    return record


def _theirs(size: Size) -> Record:
    try:
        from experiments.gpu import torch_training
    except ImportError:
        return {"left_out": "there is no PyTorch"}
    return torch_training.train(config_of_run(size, DENSE, "1f1b"), size, warm_up=WARM_UP)
