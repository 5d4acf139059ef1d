"""Our logits are those of transformers, for random weights in every parameter."""

import json
import shutil

import jax
import numpy as np
import pytest
from their_models import MODELS, family_of, load, logits_of, microbatch, new_model, read_model, their_logits

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import REGISTRY, build
from jaxpipe.training import log_probs

# float32 rounds to 6e-8; logits of a few units, through sums of some hundred terms, to a few 1e-6.
TOLERANCE = 1e-4

SHAPES = [(3, 18), (1, 20), (5, 7)]
ONE_OF_A_FAMILY = ["gpt2", "llama3", "bert"]


def assert_same_logits(transformers, folder, name, *, batch, seq, is_padded=False):
    numbers = microbatch(family_of(name), batch=batch, seq=seq, seed=batch, is_padded=is_padded)
    ours = logits_of(*read_model(folder), numbers)
    theirs = their_logits(load(transformers, folder, MODELS[name][0]), numbers)
    assert ours.keys() == theirs.keys()
    assert np.abs(theirs["masked_lm"]).max() > 1  # or the tolerance would say little
    for head, logits in theirs.items():
        assert ours[head].shape == logits.shape
        assert ours[head].dtype == np.float32
        assert np.abs(ours[head] - logits).max() < TOLERANCE


def tier(name, index):
    """One of a family always, of the others every second one in the second tier."""
    return () if name in ONE_OF_A_FAMILY else pytest.mark.slow if index % 2 else pytest.mark.ci


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(name, SHAPES[index % 3], marks=tier(name, index), id=name) for index, name in enumerate(MODELS)],
)
def test_logits_are_those_of_transformers(transformers, saved, name, shape):
    assert_same_logits(transformers, saved(name), name, batch=shape[0], seq=shape[1])


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.ci), "llama3", pytest.param("mistral", marks=pytest.mark.ci)]
)
def test_logits_of_padded_texts_are_those_of_transformers(transformers, saved, name):
    assert_same_logits(transformers, saved(name), name, batch=3, seq=18, is_padded=True)


# Every method with `tensor` 1 and 2; each family meets half of the methods.
FAMILIES = ["llama3", "gpt2", "qwen3", "mixtral"]
SWEEP = [
    (FAMILIES[(index + place) % 4], schedule, axes)
    for index, schedule in enumerate(REGISTRY)
    for place, axes in enumerate([{}, {"tensor": 2}])
]
OF_CI = [
    ("llama3", "1f1b", {"tensor": 2}),
    ("gpt2", "zb_h1", {"tensor": 2}),
]
CASES = (
    OF_CI
    + [("qwen3", "bitpipe", {"data": 2}), ("mixtral", "zb_v", {"expert": 2})]
    + [case for case in SWEEP if case not in OF_CI]
)


@pytest.mark.parametrize(
    ("name", "schedule", "axes"),
    [pytest.param(*case, marks=pytest.mark.ci if case in OF_CI else pytest.mark.slow) for case in CASES],
    ids=lambda part: "-".join(f"{axis}{size}" for axis, size in part.items()) if isinstance(part, dict) else part,
)
def test_log_probs_through_a_schedule_are_those_of_transformers(transformers, tmp_path, name, schedule, axes):
    """Every second row has two documents, which transformers reads one by one; half of the rows have masked prompts."""
    num_devices = 4 if schedule == "bpipe" else 2
    table = build(schedule, num_devices=num_devices, num_microbatches=4)
    kind, fields = MODELS[name]
    layers = {"n_layer" if "n_layer" in fields else "num_hidden_layers": table.num_stages + 1}
    more = {"num_local_experts": 4} if name == "mixtral" else {}
    theirs = new_model(transformers, kind, fields | layers | more)
    theirs.save_pretrained(tmp_path)
    plain, params = read_model(tmp_path)
    sizes = {"data": 1, "expert": 1, "tensor": 1} | axes
    model = StageFunctions.of(LanguageModel(plain.config, TensorAxis.of(**sizes)))
    pipeline = Pipeline(table, make_mesh(pipe=num_devices, **sizes), model, num_layers=table.num_stages + 1)
    num_rows = 4 * sizes["data"] * sizes["expert"]
    tokens = microbatch(family_of(name), batch=num_rows, seq=18, seed=3)["tokens"]
    documents = np.zeros(tokens.shape, np.int32)
    documents[1::2, 7:] = 1
    is_answer = np.ones(tokens.shape, bool)
    is_answer[num_rows // 2 :] = np.arange(18) % 7 > 2
    found = log_probs(pipeline, pipeline.to_stages(params), tokens, documents=documents, is_answer=is_answer)
    for row in range(num_rows):
        for start, stop in ((0, 7), (7, 18)) if row % 2 else ((0, 18),):
            document = tokens[row : row + 1, start:stop]
            of_all = jax.nn.log_softmax(their_logits(theirs, {"tokens": document})["masked_lm"][0, :-1])
            of_tokens = np.concatenate([[0.0], of_all[np.arange(stop - start - 1), document[0, 1:]]])
            wanted = of_tokens * is_answer[row, start:stop]
            assert np.abs(found.log_probs[row, start:stop] - wanted).max() < TOLERANCE
            assert wanted.min() < -1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), *SHAPES])
def test_logits_are_those_of_transformers_in_every_shape(transformers, saved, name, batch, seq):
    assert_same_logits(transformers, saved(name), name, batch=batch, seq=seq)


@pytest.mark.ci
def test_an_original_length_at_the_top_of_the_config_is_read_as_in_transformers(transformers, saved, tmp_path):
    """As Phi-3 and some conversions write it; the length inside, if there is one, then says nothing."""
    folder = shutil.copytree(saved("llama3"), tmp_path / "model")
    theirs = json.loads((folder / "config.json").read_text())
    top = theirs["rope_parameters"]["original_max_position_embeddings"]
    for inside in ({"original_max_position_embeddings": 4 * top}, {}):
        rope = {key: value for key, value in theirs["rope_parameters"].items() if key[:8] != "original"} | inside
        changed = theirs | {"rope_parameters": rope, "original_max_position_embeddings": top}
        (folder / "config.json").write_text(json.dumps(changed))
        assert_same_logits(transformers, folder, "llama3", batch=2, seq=18)
