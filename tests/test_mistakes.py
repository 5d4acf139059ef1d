"""Mistakes on the command line: each ends with a short error in five parts, no traceback and no exit status 0."""

import importlib

import pytest

SHOW = "show 1f1b --num_devices=4 --num_microbatches=4"
SEARCH = "optimize --num_devices=4 --num_microbatches=4 --memory_bound=2"
PLAN = "plan --config=config.py --topology=a100-80g:1x4"
COMPILE = "compile --config=config.py --topology=a100-80g:1x8"
MEASURE = "measure --config=config.py"
BENCH = "bench --config=config.py"
CONFIG = "from jaxpipe.config import base_config\n\n\ndef get_config(arg=''):\n    config = base_config()\n    {}\n"

FILES = {
    "config.py": CONFIG.format("return config"),
    "raises.py": CONFIG.format("raise ValueError('mine')"),
    "divides.py": CONFIG.format("return 1 / 0"),
    "opens.py": CONFIG.format("open('nowhere')"),
    "typed.py": CONFIG.format("config.model.hidden = 'wide'"),
    "nothing.py": CONFIG.format("config.model.hidden = 64"),
    "lacks.py": CONFIG.format("config.unlock()\n    del config.mesh.pipe\n    return config"),
    "bare.py": "from ml_collections import ConfigDict as get_config\n",
    "exits.py": "import sys\n\nsys.exit(0)\n",
    "imports.py": "import nowhere_to_be_found\n",
    "syntax.py": "\ndef get_config(:\n",
    "binary.py": "\0\1\2",
    "text.md": "Don't run this.\n",
    "empty.json": "",
    "object.json": "{}",
}

MISTAKES = [
    (
        "train --config=raises.py --workdir=run",
        "'raises.py' cannot be run: ValueError: mine",
        "line 6: raise",
    ),
    ("compile --config=divides.py --topology=a100-80g:1x8", "ZeroDivisionError", "line 6: return 1 / 0"),
    ("bench --config=opens.py", "FileNotFoundError", "line 6: open('nowhere')"),
    ("measure --config=typed.py", "typed.py, line 6: config.model.hidden = 'wide'"),
    ("plan --config=nothing.py --topology=a100-80g:1x4", "returns None, no config"),
    ("plan --config=lacks.py --topology=a100-80g:1x4", "lacks mesh.pipe"),
    ("show --config=bare.py", "lacks model, data, pipeline"),
    ("show --config=exits.py", "'exits.py' cannot be run: SystemExit: 0", "line 3: sys.exit(0)"),
    ("train --config=imports.py --workdir=run", "No module named 'nowhere_to_be_found'"),
    ("train --config=syntax.py --workdir=run", "SyntaxError", "line 2: def get_config(:"),
    ("train --config=binary.py --workdir=run", "'binary.py' cannot be run"),
    ("plan --help --config=text.md", "'text.md' cannot be run: SyntaxError"),
    ("train --help --config=folder", "no config file 'folder'"),
    ("show exits.py --num_devices=4 --num_microbatches=4", "SystemExit: 0"),
    ("show --list --method=exits.py", "SystemExit: 0"),
    (f"{SEARCH} --method=exits.py", "SystemExit: 0"),
    (f"{PLAN} --method=exits.py", "SystemExit: 0"),
    (f"{COMPILE} --method=syntax.py", "SyntaxError"),
    (f"{BENCH} --method=config.py", "defines no method"),
    ("show 1f1b --num_devices=99999999999999999999 --num_microbatches=4", "rule most-actions"),
    ("optimize --num_devices=99999 --num_microbatches=99999 --memory_bound=2", "rule most-actions"),
    ("show interleaved_1f1b --num_devices=4 --num_microbatches=4 --num_chunks=10000000", "rule most-actions"),
    (f"{PLAN} --config.model.num_layers=1000000000", "model.num_layers is at most 10000"),
    (f"{PLAN} --memory_margin=nan", "--memory_margin=nan"),
    (f"{PLAN} --write_config=planned.py:11", "rule plan-row", "--top=11"),
    ("prepare --input=text.md --output=p --tokenizer=bpe:300 --num_workers=1000000000", "--num_workers=1000000000"),
    (f"{SHOW} --forward=1e308", "at most 1e+18"),
    ("optimize --num_devices=4 --num_microbatches=4 --memory_bound=1e308", "at most 1e+18"),
    (f"{SHOW} --placement --topology=a100-80g:1x99999999", "at most 1,048,576 GPUs"),
    ("plan --config=config.py --topology=a100-80g:999999x8", "at most 1,048,576 GPUs"),
    (f"{SHOW} --json=object.json", "--name=1f1b has no effect"),
    (f"{SHOW} --output=folder", "cannot write 'folder'"),
    (f"{SEARCH} --output=folder", "cannot write --output=folder"),
    (f"{SEARCH} --placement=sideways", "--placement=sideways"),
    ("optimize --memory_bound=2 --schedule=empty.json", "empty.json: this is not a schedule in JSON"),
    (f"{PLAN} --overwrite", "--overwrite=True has no effect: it needs --write_config"),
    (f"{PLAN} --costs=folder", "costs='folder' cannot be read"),
    (f"{PLAN} --costs=object.json", "costs='object.json' cannot be read"),
    (f"{PLAN} --write_config=folder", "cannot write --write_config=folder"),
    (f"{COMPILE} --config.pipeline.costs=empty.json", "empty.json"),
    (f"{COMPILE} --config.mesh.pipe=0", "mesh.pipe=0"),
    ("compile --config=config.py --topology=a100-80g:1x1", "rule compile-devices"),
    (f"{MEASURE} --overwrite", "--overwrite=True has no effect: it needs --output"),
    (f"{MEASURE} --output=folder --overwrite", "--output=folder is a folder"),
    (f"{MEASURE} --microbatch_sizes=1,,2", "wrong: ''"),
    (f"{MEASURE} --num_layers=0", "--num_layers=0"),
    (f"{BENCH} --num_repeats=x", "--num_repeats=x"),
    (f"{BENCH} --process_id=0", "--coordinator_address missing"),
    ("launch --num_processes=100000 -- --config=config.py", "[1, 1024]"),
    ("launch --num_processes=2 --grace_s=nan -- --config=config.py", "'nan' is not a time"),
    ("launch --num_processes=2 --module=jaxpipe.schedules", "no module 'jaxpipe.schedules'"),
    (f"{MEASURE} --num_layers=99999999999999", "[1, 1000]"),
    (f"{MEASURE} --microbatch_sizes=99999999999", "wrong: '99999999999'"),
    ("prepare --input=text.md --tokenizer=byte --output=folder/", "rule output-prefix"),
    ("checkpoints list folder", "folder"),
    ("checkpoints lits folder", "<list|verify>"),
    ("checkpoints verify config.py", "config.py"),
]


@pytest.mark.parametrize(("line", "words"), [(line, words) for line, *words in MISTAKES])
def test_a_mistake_is_a_short_error(line, words, tmp_path, monkeypatch, capfd):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["jaxpipe"])
    command, *arguments = line.split()
    is_package = command in ("checkpoints", "compile", "measure")
    module = importlib.import_module(f"jaxpipe.{command}{'.__main__' if is_package else ''}")
    assert module.main(arguments) == 2
    error = capfd.readouterr().err
    assert [word for word in [*words, "  rule ", "  repair: "] if word not in error] == [], error
    assert "Traceback" not in error
    assert error.count("\n") <= 40
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES, "folder", "__pycache__"}
