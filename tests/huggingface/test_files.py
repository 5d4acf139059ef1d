"""Files that are not a whole model are refused, with the names of the tensors, and nothing is left behind."""

import errno
import json
import os
import tracemalloc
import weakref

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from their_models import LLAMA

from jaxpipe import files
from jaxpipe.checkpoints.params import SavedParams
from jaxpipe.convert import export_model, import_model
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import configs
from jaxpipe.huggingface.source_model import SourceModel
from jaxpipe.huggingface.tensor_files import TensorWriter
from jaxpipe.huggingface.tensors import TensorMap
from jaxpipe.huggingface.writing import files_of_source, new_files

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


def tensors(**changes) -> dict[str, np.ndarray]:
    config = configs.read_config(CONFIG | changes, where="config.json")
    architecture = configs.ARCHITECTURES["LlamaForCausalLM"]
    generator = np.random.default_rng(0)
    shapes = TensorMap(architecture, configs.model_config(config)).new_tensors
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(folder, arrays, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shards(folder, first, second, weight_map):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, arrays in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(arrays, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_import_holds_all_parameters_once_and_an_export_one_of_them(tmp_path, monkeypatch):
    sizes = {"hidden_size": 384, "intermediate_size": 1024}
    arrays = tensors(**sizes)
    num_bytes = sum(array.nbytes for array in arrays.values())
    folder = write(tmp_path / "hf", arrays, **sizes)
    # Python makes room for the largest text before it reads a small one.
    monkeypatch.setattr(files, "MOST_WHOLE_BYTES", 2**16)
    tracemalloc.start()
    try:
        import_model(str(folder), str(tmp_path / "run"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes < peak < 1.3 * num_bytes
    read, given, alive = SavedParams.read, [], []

    def watched(self, path):
        alive.append([earlier for earlier, array in given if array() is not None])
        # A copy owns its numbers, so that all views keep it alive.
        array = read(self, path).copy()
        given.append((path, weakref.ref(array)))
        return array

    monkeypatch.setattr(SavedParams, "read", watched)
    export_model(str(tmp_path / "run"), str(tmp_path / "back"))
    assert len(alive) > 5
    assert alive == [[]] * len(alive)


def refused(folder, tmp_path, rule: str, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        import_model(str(folder), str(tmp_path / "run"))
    text = str(error.value)
    for word in (f"  rule {rule}: ", "  repair: ", *words):
        assert word in text
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    return text


def test_missing_tensors_are_named_five_of_them(tmp_path):
    arrays = {name: array for name, array in tensors().items() if ".1." not in name}
    text = refused(
        write(tmp_path / "hf", arrays), tmp_path, "huggingface-tensors", "tensors: 9 missing", NORM, "and 4 more"
    )
    assert text.count("model.layers.1.") == 5


def test_tensors_that_are_not_known_are_named(tmp_path):
    arrays = tensors() | {"model.layers.0.adapter.weight": np.zeros(3, np.float32)}
    refused(
        write(tmp_path / "hf", arrays),
        tmp_path,
        "huggingface-tensors",
        "tensors: 1 unknown",
        "model.layers.0.adapter.weight",
    )


def test_both_shapes_of_a_tensor_of_another_shape_are_named(tmp_path):
    arrays = tensors() | {NORM: np.zeros(47, np.float32)}
    text = f"{NORM}: (47,) in the file, (48,) by config.json"
    refused(write(tmp_path / "hf", arrays), tmp_path, "huggingface-tensors", "tensors: 1 of another shape", text)


def test_a_config_of_another_size_is_seen_in_the_tensors(tmp_path):
    folder = write(tmp_path / "hf", tensors(), num_hidden_layers=4, vocab_size=60)
    refused(folder, tmp_path, "huggingface-tensors", "9 missing, 2 of another shape", "(61, 48) in the file, (60, 48)")


def test_tables_of_old_versions_are_left_out(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write(tmp_path / "hf", tensors() | {name: np.zeros(4, np.float32)})
    assert "without 1 that are no parameters" in import_model(str(folder), str(tmp_path / "run"))


def test_names_of_one_parameter_with_different_numbers_are_refused(tmp_path):
    arrays = tensors() | {"lm_head.weight": np.ones((61, 48), np.float32)}
    folder = write(tmp_path / "hf", arrays, tie_word_embeddings=True)
    refused(folder, tmp_path, "huggingface-tied", "model.embed_tokens.weight and lm_head.weight")


def test_parameters_of_another_dtype_are_refused(tmp_path):
    folder = write(tmp_path / "hf", tensors() | {NORM: np.zeros(48, np.int8)})
    refused(folder, tmp_path, "huggingface-dtype", f"{NORM} of {folder}/model.safetensors has dtype I8")


def halves() -> tuple[dict, dict, dict]:
    arrays = tensors()
    names = list(arrays)
    first, second = ({name: arrays[name] for name in part} for part in (names[:2], names[2:]))
    return first, second, dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")


def test_shards_of_any_name_are_read(tmp_path):
    folder = write_shards(tmp_path / "hf", *halves())
    assert f"in {len(tensors())} tensors" in import_model(str(folder), str(tmp_path / "run"))


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = write_shards(tmp_path / "hf", *halves())
    (folder / "b.safetensors").unlink()
    refused(folder, tmp_path, "huggingface-shards", "lacks 1 of the 2 files", "b.safetensors")


def test_a_tensor_in_two_shards_is_named(tmp_path):
    first, second, weight_map = halves()
    folder = write_shards(tmp_path / "hf", first | {NORM: second[NORM]}, second, weight_map)
    refused(folder, tmp_path, "huggingface-shards", f"{NORM}: in a.safetensors and in b.safetensors")


def test_an_index_that_says_otherwise_is_refused(tmp_path):
    first, second, weight_map = halves()
    folder = write_shards(tmp_path / "hf", first, second, weight_map | {NORM: "a.safetensors"})
    refused(folder, tmp_path, "huggingface-index", f"{NORM}: a.safetensors in the index, b.safetensors in fact")
    (folder / INDEX).write_text('{"metadata": {}}')
    refused(folder, tmp_path, "huggingface-index", "'weight_map'")
    for damaged in (
        b'{"weight_map": {"\xff": "a"}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": ["x"]}}',
        b'{"weight_map": {"a": "b"}, "metadata": "x"}',
    ):
        (folder / INDEX).write_bytes(damaged)
        refused(folder, tmp_path, "huggingface-index", "cannot be read")


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"", lambda data: b"version https://git-lfs"])
def test_a_file_that_is_not_whole_is_named(tmp_path, damage):
    folder = write(tmp_path / "hf", tensors())
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(folder, tmp_path, "huggingface-files", f"{file} cannot be read: ")


def test_a_folder_of_pickled_files_is_refused(tmp_path):
    folder = write(tmp_path / "hf", tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, tmp_path, "huggingface-files", "there is pytorch_model.bin", "save_pretrained")


def test_targets_that_are_there_are_refused(tmp_path):
    folder = write(tmp_path / "hf", tensors())
    (tmp_path / "run").mkdir()
    import_model(str(folder), str(tmp_path / "run"))  # an empty folder is none
    with pytest.raises(ConfigError, match=r"--to=.*run exists already\n *rule convert-target[^\n]*\n *found: check"):
        import_model(str(folder), str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="rule convert-target"):
        export_model(str(tmp_path / "run"), str(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="found: a file"):
        export_model(str(tmp_path / "run"), str(tmp_path / "file"))


def test_what_fails_late_leaves_nothing(tmp_path):
    """One number is beyond float16, which shows when other tensors have been written."""
    arrays = tensors()
    arrays["lm_head.weight"][3, 4] = 70000.0
    import_model(str(write(tmp_path / "hf", arrays)), str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"lm_head.weight does not fit float16: 1 of its 2928 numbers\n *rule"):
        export_model(str(tmp_path / "run"), str(tmp_path / "back"), dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    export_model(str(tmp_path / "run"), str(tmp_path / "back"), dtype="bfloat16")
    assert load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"][3, 4] == 70144  # 137 * 2**9


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    import_model(str(write(tmp_path / "hf", tensors())), str(tmp_path / "run"))
    monkeypatch.setattr(TensorWriter, "write", full)
    with pytest.raises(ConfigError, match=r"back cannot be written\n *rule convert-target[^\n]*\n *while writing: No"):
        export_model(str(tmp_path / "run"), str(tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_a_run_that_is_another_model_than_its_origin_is_refused(tmp_path):
    import_model(str(write(tmp_path / "hf", tensors())), str(tmp_path / "run"))
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    with pytest.raises(ConfigError, match=r"rule huggingface-origin[^\n]*\n *model.rope_theta: 500.0 in the run, 1000"):
        export_model(str(tmp_path / "run"), str(tmp_path / "back"))
    (tmp_path / "run" / "hf" / "safetensors.json").unlink()
    with pytest.raises(ConfigError, match=r"hf/safetensors.json cannot be read[^\n]*\n *rule huggingface-origin"):
        export_model(str(tmp_path / "run"), str(tmp_path / "back"))


def test_steps_that_are_not_there_are_refused(tmp_path):
    import_model(str(write(tmp_path / "hf", tensors())), str(tmp_path / "run"))
    with pytest.raises(
        ConfigError, match=r"no checkpoint of step 7[^\n]*\n *rule checkpoint-there[^\n]*\n *there: 0\n"
    ):
        export_model(str(tmp_path / "run"), str(tmp_path / "back"), step=7)


def test_an_index_whose_metadata_is_null_is_written_anew(tmp_path):
    folder = write_shards(tmp_path / "hf", *halves())
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"metadata": None}))
    import_model(str(folder), str(tmp_path / "run"))
    export_model(str(tmp_path / "run"), str(tmp_path / "back"), dtype="bfloat16")
    assert json.loads((tmp_path / "back" / INDEX).read_text())["metadata"]["total_size"] > 0


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    files = new_files({"a": (4,), "b": (100,), "c": (4,), "d": (2,)}, dtype="float32", max_bytes=32)
    assert [text.count('"dtype"') for text in files.headers.values()] == [1, 1, 2]
    assert json.loads(files.index or "")["metadata"] == {"total_size": 440}


def test_tensors_stay_in_their_order_when_some_are_left_out(tmp_path):
    header = (
        '{"__metadata__":{"format":"pt"},"c":{"dtype":"F32","shape":[2],"data_offsets":[20,28]},'
        '"d":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F16","shape":[4],"data_offsets":[12,20]}}'
    )
    (found,) = files_of_source(SourceModel(tmp_path, {"x": header}, None, ("a",)), dtype="").headers.values()
    assert json.loads(found) == {
        "__metadata__": {"format": "pt"},
        "d": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "c": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
    }
    assert files_of_source(SourceModel(tmp_path, {"x": header}, None, ()), dtype="").headers == {"x": header}
