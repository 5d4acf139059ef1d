"""A Llama and a Qwen3 of random numbers, converted, tuned on 200 chats on eight devices, and given back."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from their_models import LLAMA, load, new_model, our_logits, their_logits

from jaxpipe.config import model_config
from jaxpipe.convert import convert
from jaxpipe.models import LanguageModel
from jaxpipe.prepare import main as prepare
from jaxpipe.sample import main as sample
from jaxpipe.train import main as train
from jaxpipe.training.batches import batches_of, read_corpus
from jaxpipe.training.run_folder import read_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = LLAMA | {"vocab_size": 300, "num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": False}
SIZES |= {"bos_token_id": None, "eos_token_id": 0}
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES, "1f1b"),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 16}, "zb_v"),
}
ANIMALS, SOUNDS = ["cat", "dog", "cow", "owl"], ["meow", "woof", "moo", "hoo"]


def chats() -> str:
    """200 lines: what an animal says, once or several times."""
    lines = []
    for i in range(200):
        ask = {"role": "user", "content": f"What does the {ANIMALS[i % 4]} say, {i}?"}
        messages = [ask, {"role": "assistant", "content": f"{SOUNDS[i % 4]} " * (1 + i % 3)}]
        lines.append(json.dumps({"messages": messages * (1 + i % 2)}))
    return "\n".join(lines)


def write_tokenizer(path) -> None:
    """Byte-level pairs of the chats."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([chats()], trainer)
    library.save(str(path))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name == "llama" else pytest.mark.slow) for name in MODELS]
)
def test_a_model_learns_the_answers_stops_and_goes_back(transformers, tmp_path, capsys, monkeypatch, name):
    kind, sizes, schedule = MODELS[name]
    theirs = tmp_path / "theirs"
    new_model(transformers, kind, sizes).save_pretrained(theirs)
    write_tokenizer(theirs / "tokenizer.json")
    # As a base model's: its files name the end of a document, and the template ends a turn otherwise.
    beside = {"chat_template": TEMPLATE, "eos_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(beside))
    (tmp_path / "chats.jsonl").write_text(chats())
    convert(f"hf:{theirs}", str(tmp_path / "ours"))
    flags = ["--format=chat", "--seq_len=128", f"--tokenizer={theirs}", f"--output={tmp_path / 'data'}"]
    assert prepare([f"--input={tmp_path / 'chats.jsonl'}", *flags]) == 0
    config = f"--config=configs/finetune.py:{tmp_path / 'ours'}"
    mesh = [f"--config.mesh.{axis}=2" for axis in ("data", "pipe", "tensor")]
    sizes = ["--config.data.batch_size=16", "--config.data.seq_len=128", "--config.pipeline.num_microbatches=4"]
    run = tmp_path / "run"
    more = [f"--config.data.files=indexed:{tmp_path / 'data'}", "--config.train.steps=30"]
    rates = ["--config.optimizer.learning_rate=0.01", f"--config.pipeline.schedule={schedule}"]
    assert train([config, f"--workdir={run}", *mesh, *sizes, *more, *rates]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]

    # Positions whose next token is the prompt's have no part in the loss: nothing flows back from them.
    saved = read_config(str(run))
    model = LanguageModel(model_config(saved))
    batch = {key: values[0] for key, values in batches_of(saved, read_corpus(saved).train).at(0).items()}
    shared = model.init(jax.random.key(0))["shared"]
    x = jax.random.normal(jax.random.key(1), (*batch["tokens"].shape, model.config.anatomy.hidden))
    gradient = np.asarray(jax.jit(jax.grad(lambda x: model.head(shared, x, batch)))(x))
    is_learned = batch["targets"] >= 0
    assert 0.1 < is_learned.mean() < 0.6
    assert not gradient[~is_learned].any()
    assert np.abs(gradient[is_learned]).sum(axis=-1).min() > 0

    convert(str(run), f"hf:{tmp_path / 'back'}")
    back = load(transformers, tmp_path / "back", kind)
    tokens = {"tokens": batch["tokens"][:1, : int((batch["positions"][0][1:] == 0).argmax()) + 1]}  # one document
    ours, wanted = our_logits(run, tokens)["masked_lm"], their_logits(back, tokens)["masked_lm"]
    assert np.abs(ours - wanted).max() < 1e-4

    # It stops where a turn ends, here and in transformers.
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for animal, sound in list(zip(ANIMALS, SOUNDS, strict=True))[:2]:
        question = f"What does the {animal} say, {ANIMALS.index(animal)}?"
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = back.generate(**prompt, do_sample=False, max_new_tokens=60)[0, prompt["input_ids"].shape[1] :].tolist()
        assert tokens.index(2) == len(tokens) - 1
        assert sound in tokenizer.decode(tokens)
        # The second question as it is written for the model, names of special tokens and all.
        written = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        given = [f"--prompt={question}", "--chat"] if animal == ANIMALS[0] else [f"--prompt={written}"]
        capsys.readouterr()
        assert sample([f"--workdir={run}", *given, "--temperature=0", "--num_tokens=60"]) == 0
        assert capsys.readouterr().out.partition("\n")[2] == written + tokenizer.decode(tokens[:-1]) + "\n"

    # Names of special tokens are text if one asks for it, but not in a question.
    given = []
    monkeypatch.setattr("jaxpipe.sample.generate", lambda model, params, prompt, **_: given.append(prompt) or iter(()))
    flags = [f"--workdir={run}", f"--prompt={written}"]
    assert [sample(flags), sample([*flags, "--nomarkup"]), sample([*flags, "--nomarkup", "--chat"])] == [0, 0, 2]
    assert given[0] == tokenizer(written, add_special_tokens=False)["input_ids"]
    assert not {1, 2} & set(given[1])
    assert tokenizer.decode(given[1]) == written
