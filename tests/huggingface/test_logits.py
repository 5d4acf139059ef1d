"""Our logits are those of transformers, for random weights in every parameter."""

import json
import shutil

import jax
import numpy as np
import pytest
from their_models import MODELS, family_of, load, logits_of, microbatch, read_model, their_logits

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, SHAPES[index % 3], marks=() if name in ONE_OF_A_FAMILY else pytest.mark.ci, id=name)
        for index, name in enumerate(MODELS)
    ],
)
def test_logits_are_those_of_transformers(transformers, saved, name, shape):
    assert_same_logits(transformers, saved(name), name, batch=shape[0], seq=shape[1])


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2", marks=pytest.mark.ci), "llama3", pytest.param("mistral", marks=pytest.mark.ci)]
)
def test_logits_of_padded_texts_are_those_of_transformers(transformers, saved, name):
    assert_same_logits(transformers, saved(name), name, batch=3, seq=18, is_padded=True)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "schedule"), [("llama3", "1f1b"), ("gpt2", "zb_h1")])
def test_log_probs_through_a_schedule_are_those_of_transformers(transformers, saved, name, schedule):
    """Two rows of one document, two of two, which transformers reads one by one; prompts are masked."""
    plain, params = read_model(saved(name))
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    schedule = build(schedule, num_devices=2, num_microbatches=4)
    mesh = make_mesh(data=1, pipe=2, tensor=2)
    model = StageFunctions.of(LanguageModel(plain.config, TensorAxis.of(tensor=2)))
    pipeline = Pipeline(schedule, mesh, model, num_layers=num_layers)
    tokens = microbatch(family_of(name), batch=4, seq=18, seed=3)["tokens"]
    documents = np.zeros(tokens.shape, np.int32)
    documents[2:, 7:] = 1
    is_answer = np.arange(18) % 7 > 2
    found = log_probs(
        pipeline, pipeline.to_stages(params), tokens, documents=documents, is_answer=np.tile(is_answer, (4, 1))
    )
    theirs = load(transformers, saved(name), MODELS[name][0])
    for row in range(4):
        for start, stop in ((0, 18),) if row < 2 else ((0, 7), (7, 18)):
            document = tokens[row : row + 1, start:stop]
            of_all = jax.nn.log_softmax(their_logits(theirs, {"tokens": document})["masked_lm"][0, :-1])
            wanted = (
                np.concatenate([[0.0], of_all[np.arange(stop - start - 1), document[0, 1:]]]) * is_answer[start:stop]
            )
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
