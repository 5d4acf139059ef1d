"""The quickstart's BERT: masked bytes and the order of segments are learned, and evaluated on another mesh."""

import math
import re

import pytest
from running import metrics, run, train

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "bert"
    arguments = ["--config.train.steps=40", "--config.train.eval_every=40", "--config.data.batch_size=24"]
    return workdir, train(workdir, *arguments, config="configs/quickstart_bert.py")


def test_the_text_as_masked_words_lowers_the_loss(trained):
    workdir, done = trained
    assert done.returncode == 0, done.stderr
    rows = metrics(workdir)
    # Before anything is learned a mean of 260 words and one of two orders, each as likely as the other; a little more,
    # since the model has random opinions, and how much depends on the text.
    assert rows[0]["masked_lm_loss"] == pytest.approx(math.log(260), abs=1.0)
    assert rows[0]["sentence_order_loss"] == pytest.approx(math.log(2), abs=0.5)
    for row in rows:
        assert row["loss"] == pytest.approx(row["masked_lm_loss"] + row["sentence_order_loss"], rel=1e-6)
    assert rows[-1]["eval_masked_lm_loss"] < rows[0]["masked_lm_loss"] - 1.0


def test_eval_says_each_kind_of_loss_on_another_mesh(trained):
    workdir, _ = trained
    other = ["--config.mesh.data=1", "--config.pipeline.schedule=gpipe", "--config.pipeline.vocab_over_pipe=true"]
    done = run("eval", f"--workdir={workdir}", *other)
    number = r"([\d.]+)"
    found = re.search(
        rf"step 40: held-out loss {number} nats \(masked_lm {number}, sentence_order {number}\)", done.stdout
    )
    assert found, done.stderr
    names = ("eval_loss", "eval_masked_lm_loss", "eval_sentence_order_loss")
    assert list(map(float, found.groups())) == pytest.approx([metrics(workdir)[-1][name] for name in names], abs=1e-3)
