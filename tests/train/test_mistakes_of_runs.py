"""Mistakes on the command line: each ends with 2 and a few lines that name it, never with a traceback."""

from pathlib import Path

import pytest
from running import run

CONFIG = "--config=configs/quickstart.py"
FILES = {
    "no_code.py": "not a config",
    "no_module.py": "import nothing_here",
    "raises.py": "def get_config(arg=''):\n    return 1 / 0\n",
    "empty.json": "",
    "deep.json": "[" * 100_000,
    "cut/config.json": "{",
    "deep/config.json": "[" * 100_000,
    "text.txt": "a text",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    return folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --config=@/folder --workdir=@/run", "no config file"),
        ("train --config=@/no_code.py --workdir=@/run", "no_code.py' cannot be run: SyntaxError"),
        ("train --config=@/no_module.py --workdir=@/run", "no_module.py' cannot be run: ModuleNotFoundError"),
        ("train --config=@/raises.py --workdir=@/run", "raises.py' cannot be run: ZeroDivisionError"),
        (f"train {CONFIG} --workdir=@/empty.json", "empty.json is a file"),
        (f"train {CONFIG} --workdir=@/{'a' * 5000}", "File name too long"),
        (f"train {CONFIG} --workdir=@/run --config.train.steps=1e3", "--config.train.steps=1e3"),
        (f"train {CONFIG} --workdir=@/run --config.data.files=@/folder", "matches no file"),
        (f"train {CONFIG} --workdir=@/run --config.data.tokenizer=@/deep.json", "rule tokenizer-form"),
        (f"train {CONFIG} --workdir=@/run --config.data.files=indexed:@/text", "rule indexed-files"),
        (f"train {CONFIG} --workdir=@/run --config.pipeline.schedule=@/empty.json", "rule schedule-json"),
        (f"train {CONFIG} --workdir=@/run --profile_steps=\uff15:\uff19", "cannot be traced"),
        ("eval --workdir=@/folder", "rule workdir-run"),
        ("eval --workdir=@/cut", "cut/config.json cannot be read"),
        ("eval --workdir=@/deep", "deep/config.json cannot be read"),
        ("sample --workdir=@/deep --prompt=a", "deep/config.json cannot be read"),
        ("sample --workdir=@/deep --prompt=a --temperature=nan", "'nan' is not a temperature"),
        ("convert --from=@/deep --to=hf:@/new", "deep/config.json cannot be read"),
        ("convert --from=hf:@/folder --to=@/new", "rule huggingface-folder"),
        ("prepare --input=@/folder --tokenizer=byte --output=@/new", "names no file"),
        ("prepare --input=@/text.txt --tokenizer=byte --output=@/folder/", "rule output-prefix"),
        ("prepare --input=@/text.txt --tokenizer=byte --output=@/empty.json/x", "rule output-files"),
        ("prepare --input=@/text.txt --tokenizer=@/deep.json --output=@/new", "rule tokenizer-form"),
        ("checkpoints.__main__ list @/folder", "rule checkpoint-there"),
        ("checkpoints.__main__ rm @/folder", "value should be one of <list|verify>"),
        ("measure.__main__ --config=configs/bench_cpu.py --output=@/folder", "is a folder"),
        ("measure.__main__ --config=configs/bench_cpu.py --microbatch_sizes=\uff12", "rule microbatch-sizes"),
        ("bench --config=configs/bench_cpu.py --workdir=@/run", "no flag --workdir"),
        (f"plan {CONFIG} --topology=a100-80g:1x8 --costs=@/deep.json", "deep.json' cannot be read"),
        (f"plan {CONFIG} --topology=a100-80g:1x8 --write_config=@/folder", "rule plan-output"),
        ("optimize --num_devices=2 --num_microbatches=4 --memory_bound=4 --output=@/none/x.json", "cannot write"),
        ("show 1f1b --num_devices=2 --num_microbatches=4 --output=@/folder", "Is a directory"),
        ("show --json=@/deep.json", "rule schedule-json"),
    ],
    ids=lambda text: text[:60].replace("/", "_"),
)
def test_a_mistake_is_told_in_a_few_lines(files: Path, command: str, words: str):
    module, *arguments = command.replace("@", str(files)).split()
    done = run(module, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 40
    assert max(map(len, done.stderr.splitlines())) < 600
