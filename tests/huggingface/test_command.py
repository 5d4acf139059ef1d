"""The command goes both ways, says what it did, and its errors have no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from test_files import tensors, write, write_shards
from tokenizers import decoders, models, pre_tokenizers

from jaxpipe.config import check
from jaxpipe.config.command_line import read_config_file
from jaxpipe.convert import convert, main
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import configs, source_model
from jaxpipe.huggingface.source_model import copied_path, copy_source_model
from jaxpipe.training import fit
from jaxpipe.training.run_folder import read_config

ROOT = Path(__file__).parents[2]

TOKENIZER = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str()


def command(*arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxpipe.convert", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_there_and_back(tmp_path, capsys, in_process):
    folder = write(tmp_path / "hf", tensors())
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "notes.txt").write_text("stays behind")
    run = tmp_path / "the run"
    arguments = [f"--from=hf:{folder}", f"--to={run}"]
    if in_process:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
    else:
        done = command(*arguments)
        out, err = done.stdout, done.stderr
        assert done.returncode == 0
    assert err == ""
    num_params = sum(array.size for array in tensors().values())
    assert f"LlamaForCausalLM from {folder}: {num_params:,} parameters in 30 tensors" in out
    assert f"python -m jaxpipe.train --config='configs/finetune.py:{run}' --workdir" in out
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "hf"]
    config = read_config(str(run))
    assert config.data.seq_len == 64
    assert config.data.tokenizer == f"{run}/hf/tokenizer.json"
    assert (run / "hf" / "tokenizer.json").read_text() == TOKENIZER

    said = convert(str(run), f"hf:{tmp_path / 'back'}", step=0)
    assert f"{num_params:,} parameters; model.safetensors, config.json, tokenizer.json" in said
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "back" / "notes.txt").exists()


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_tokens", [62, 200])  # within the rows of padding, and beyond
def test_the_tables_of_a_model_grow_for_a_larger_tokenizer(tmp_path, tied, num_tokens):
    arrays = tensors(tie_word_embeddings=tied)
    folder = write(tmp_path / "hf", arrays, tie_word_embeddings=tied)
    convert(f"hf:{folder}", str(tmp_path / "run"), vocab_size=num_tokens)
    assert read_config(str(tmp_path / "run")).model.vocab_size == num_tokens
    convert(str(tmp_path / "run"), f"hf:{tmp_path / 'back'}")
    assert configs.load_config(tmp_path / "back") == configs.load_config(folder) | {"vocab_size": num_tokens}
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        old, new = np.split(found[name], [len(array)])
        np.testing.assert_array_equal(old, array)
        assert len(new) == (num_tokens - len(array) if name in (HEAD, TABLE) else 0)
        if len(new):
            np.testing.assert_allclose(new, np.broadcast_to(array.mean(axis=0), new.shape), atol=1e-6)


def test_the_tables_of_a_model_in_shards_grow(tmp_path):
    arrays = tensors()
    names = sorted(arrays)
    first, second = ({name: arrays[name] for name in some} for some in (names[:9], names[9:]))
    weight_map = {name: "a.safetensors" if name in first else "b.safetensors" for name in names}
    folder = write_shards(tmp_path / "hf", first, second, weight_map)
    convert(f"hf:{folder}", str(tmp_path / "run"), vocab_size=70)
    convert(str(tmp_path / "run"), f"hf:{tmp_path / 'back'}")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    found = load_file(tmp_path / "back" / "a.safetensors") | load_file(tmp_path / "back" / "b.safetensors")
    assert index == {"metadata": {"total_size": sum(one.nbytes for one in found.values())}, "weight_map": weight_map}
    assert found[TABLE].shape == (70, 48)


def write_tokenizer(folder, *, num_tokens):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", *letters, *(f"word {i}" for i in range(num_tokens - len(letters) - 1))]
    library = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(names[:1])
    library.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_larger_than_the_model_is_refused_once_and_the_repair_works(tmp_path):
    """Before training, whether there are rows of padding for its tokens or not."""
    folder = write(tmp_path / "hf", tensors(vocab_size=270), vocab_size=270)
    write_tokenizer(folder, num_tokens=277)
    (tmp_path / "a.txt").write_text("to be or not " * 400)

    def config_of(run, **changes):
        convert(f"hf:{folder}", str(run), **changes)
        config = read_config_file(f"configs/finetune.py:{run}")
        config.update({"data": {"files": str(tmp_path / "a.txt"), "seq_len": 16, "batch_size": 4}})
        config.update({"pipeline": {"num_microbatches": 1}, "train": {"steps": 1}, "mesh": {"platform": "cpu"}})
        return config

    config = config_of(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"model.vocab_size=270 is less than the number(.|\n)*--vocab_size=277 of"):
        check(config, name="config")
    config.model.vocab_size = 277
    with pytest.raises(ConfigError, match=r"checkpoint.init_from of 270(.|\n)*--vocab_size=277 of"):
        fit(config, tmp_path / "run", dry_run=True)
    config = config_of(tmp_path / "second", vocab_size=277)
    check(config, name="config")
    source_model.check_vocabulary(config)


def test_errors_are_told_without_a_traceback(capsys):
    assert main(["--to=run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: --from is missing\n  rule flags: ")


@pytest.mark.ci
def test_a_process_ends_with_the_status_of_its_error():
    done = command("--to=run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigError: --from is missing\n  rule flags: ")


@pytest.mark.parametrize(
    ("source", "target", "options", "words"),
    [
        ("/no/run", "hf:b", {"vocab_size": 9}, ["--vocab_size=9 with --from=/no/run", "rule flags"]),
        ("a", "b", {}, ["--from=a with --to=b", "rule convert-direction"]),
        ("hf:a", "hf:b", {}, ["--from=hf:a with --to=hf:b", "rule convert-direction"]),
        ("hf:a", "b", {"step": 3}, ["--step=3 with --from=hf:a", "rule flags"]),
        ("hf:a", "b", {"dtype": "bfloat16"}, ["--dtype=bfloat16 with --from=hf:a", "rule flags"]),
        ("hf:/no/such", "/no/run", {}, ["/no/such contains no model of transformers", "rule huggingface-folder"]),
        ("/no/such", "hf:/no/model", {}, ["holds no run", "rule workdir-run"]),
    ],
)
def test_conversions_that_cannot_be_are_refused(source, target, options, words):
    with pytest.raises(ConfigError) as error:
        convert(source, target, **options)
    for word in [*words, "  repair: "]:
        assert word in str(error.value)


def test_a_run_that_starts_from_a_converted_one_has_its_tokenizer(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "hf").mkdir(parents=True)
    (first / "hf" / "tokenizer.json").write_text("{}")
    second.mkdir()
    copy_source_model(first, second)
    name = copied_path(str(first / "hf" / "tokenizer.json"), first, second)
    assert Path(name).read_text() == "{}"
    assert Path(name).is_relative_to(second)
    for other in ("byte", str(tmp_path / "tokenizer.json")):
        assert copied_path(other, first, second) == other


def test_a_run_without_an_origin_has_none_to_copy(tmp_path):
    (tmp_path / "later").mkdir()
    copy_source_model(tmp_path, tmp_path / "later")
    assert list((tmp_path / "later").iterdir()) == []
