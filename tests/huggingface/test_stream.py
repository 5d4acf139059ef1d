"""The stream of a pipeline on any mesh hands out what the file export writes, and holds two buckets at most."""

import jax
import numpy as np
import pytest
import streamed_runs
from streamed_runs import digest, exported, in_two_processes, live_bytes, make_run, staged
from their_models import logits_of, microbatch, their_logits
from tiers import tiers

from jaxpipe.config import base_config, model_config
from jaxpipe.errors import JaxpipeError
from jaxpipe.huggingface import stream, streaming
from jaxpipe.models import LanguageModel

BUCKET_BYTES = 60_000
CASES = {
    "llama": ("all", "whole masters", "v", "replicas", "adapters"),
    "gpt": ("all", "vocabulary", "adapters"),
    "mixtral": ("expert", "v"),
    "qwen3_moe": ("expert",),
    "gpt_oss": ("expert",),
    "deepseek_v3": ("expert",),
    "bert": ("all", "vocabulary"),
}
TIERS = {
    ("llama", "all"): (),
    **dict.fromkeys([("gpt", "vocabulary"), ("mixtral", "expert")], pytest.mark.ci),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Staged parameters, pipeline and config."""
    return staged(make_run(tmp_path_factory.mktemp("llama") / "run", "llama", "all"))


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=TIERS.get((family, mesh), pytest.mark.slow))
        for family, meshes in CASES.items()
        for mesh in meshes
    ],
)
def test_names_order_and_bytes_are_those_of_the_file_export(family, mesh, tmp_path):
    run = make_run(tmp_path / "run", family, mesh)
    params, pipeline, config = staged(run)
    buckets = list(stream(params, pipeline, config, bucket_bytes=BUCKET_BYTES, dtype="bfloat16", to="host"))
    found = [pair for bucket in buckets for pair in bucket.tensors]
    wanted = exported(run, tmp_path / "file", dtype="bfloat16")
    assert [name for name, _ in found] == list(wanted)
    for name, array in found:
        assert isinstance(array, np.ndarray)
        assert (array.dtype.name, array.shape, array.tobytes()) == ("bfloat16", *wanted[name])
    assert len(buckets) > 2
    for bucket in buckets:
        # One layer's parameter is never divided: of all experts, or a large one.
        assert bucket.num_bytes <= BUCKET_BYTES or len({array.shape for _, array in bucket.tensors}) == 1
        assert bucket.num_bytes <= sum(array.nbytes for _, array in bucket.tensors)
        assert bucket.seconds > 0


def test_a_device_holds_two_buckets_beside_the_state_and_a_second_stream_compiles_nothing(llama, monkeypatch):
    params, pipeline, config = llama
    peaks = []
    gathered = streaming._Gather._arrays

    def watched(self, group):
        arrays = gathered(self, group)
        peaks.append(live_bytes())
        return arrays

    monkeypatch.setattr(streaming._Gather, "_arrays", watched)
    before = live_bytes()
    num_bytes = [bucket.num_bytes for bucket in stream(params, pipeline, config, bucket_bytes=BUCKET_BYTES)]
    # Two buckets, and of each layer's parameter the count of the numbers that are lost.
    assert max(num_bytes) < max(peaks) - before <= 2 * BUCKET_BYTES + 4 * len(peaks)
    assert len(num_bytes) > 4
    peaks.clear()
    # A caller that keeps none: the stream keeps none either.
    for bucket in stream(params, pipeline, config, bucket_bytes=BUCKET_BYTES):
        bucket.tensors.clear()
    assert peaks
    assert max(peaks) - before <= BUCKET_BYTES + 4 * len(peaks)
    num_programs = streaming._program.cache_info().misses
    list(stream(params, pipeline, config, bucket_bytes=10**9))
    assert streaming._program.cache_info().misses == num_programs
    assert {streaming._program(*key)._cache_size() for key in programs_of(params, pipeline, config)} == {1}


def programs_of(params, pipeline, config):
    """The arguments of `_program` for all kinds of parameters."""
    keys = []
    make = streaming._program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_program", lambda *key: keys.append(key) or make(*key))
        list(stream(params, pipeline, config))
    return dict.fromkeys(keys)


MISTAKES = {
    "dtype": ({"dtype": "float8"}, ["dtype='float8'", "bfloat16"]),
    "place": ({"to": "gpu"}, ["to='gpu'", "device, host"]),
    "bytes": ({"bucket_bytes": 0}, ["bucket_bytes=0", "bucket-bytes"]),
    "canonical": ({"params": "canonical"}, ["stream-params", "layers.attention.norm.scale", "pipeline.to_stages"]),
    "model": ({"config": "gpt"}, ["stream-params", "layers.attention.output.bias: missing"]),
    # The table of tokens and the first norms of all layers fill a bucket.
    "range": (
        {"dtype": "float16", "params": "large", "bucket_bytes": 4800},
        ["2 parameters do not fit float16", "embed_tokens.weight: 3 ", "input_layernorm.weight: 1 ", "bfloat16"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name, llama):
    given, words = MISTAKES[name]
    params, pipeline, config = llama
    if given.get("params") == "canonical":
        given = given | {"params": jax.jit(pipeline.from_stages)(params)}
    if given.get("params") == "large":
        # Infinities of the parameter itself are none that the dtype loses; of the layers one on the last stage has one.
        token = params["shared"]["embedding"]["token"].at[60, :4].set(np.float32([1e6, -7e4, 65520.0, np.inf]))
        scale = params["layers"]["attention"]["norm"]["scale"].at[1, 0, 0, 5].set(1e6)
        shared = {**params["shared"], "embedding": {"token": token}}
        attention = {**params["layers"]["attention"], "norm": {"scale": scale}}
        large = {**params, "shared": shared, "layers": {**params["layers"], "attention": attention}}
        given = given | {"params": jax.device_put(large, pipeline.shardings(large))}
    if "config" in given:
        given = given | {"config": base_config(given["config"])}
    with pytest.raises(JaxpipeError) as error:
        list(stream(**{"params": params, "pipeline": pipeline, "config": config} | given))
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("family", tiers([], ci=["mixtral"], slow=["llama"]))
def test_transformers_takes_the_tensors_in_memory_and_has_our_logits(transformers, tmp_path, family):
    import torch

    from jaxpipe.huggingface import configs

    params, pipeline, config = staged(make_run(tmp_path / "run", family, "all"))
    theirs = configs.new_config(config, dtype="float32")
    kind = getattr(transformers, theirs["architectures"][0])
    named = [pair for bucket in stream(params, pipeline, config) for pair in bucket.tensors]
    state = {name: torch.from_dlpack(array.addressable_data(0)) for name, array in named}
    model = kind.from_pretrained(None, config=kind.config_class(**theirs), state_dict=state).eval()
    numbers = microbatch(family)
    canonical = jax.tree.map(np.asarray, jax.jit(pipeline.from_stages)(params))
    ours = logits_of(LanguageModel(model_config(config)), canonical, numbers)["masked_lm"]
    assert np.abs(ours).max() > 0.5
    np.testing.assert_allclose(their_logits(model, numbers)["masked_lm"], ours, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_two_processes_get_what_one_gets_and_one_that_leaves_is_named(tmp_path, family):
    run = make_run(tmp_path / "run", family, CASES[family][0])
    params, pipeline, config = staged(run)
    wanted = digest(stream(params, pipeline, config, bucket_bytes=BUCKET_BYTES))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    in_two_processes(streamed_runs.__file__, run, BUCKET_BYTES, tmp_path, env=flags)
    first, second = ((tmp_path / process).read_text().splitlines() for process in "01")
    assert (first[0], second[0]) == (wanted, wanted)
    assert second[1:] == []
    assert "process 1 of 2 does not begin part 2" in first[1]
    assert "it left before the last part" in first[1]
    assert "process 1 of 2 does not begin part 1" in first[2]
    assert "it has not come in" in first[2]
