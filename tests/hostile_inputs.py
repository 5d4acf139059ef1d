"""Inputs that nobody writes by hand: damaged, huge, nested, of another type. One table, over all that is parsed.

A case is a command line and the files that stand beside those of `make_world`, in its place where they have one's name.
Run as a program it takes such cases in one process, under limits of time and memory, and prints what became of each.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_SECONDS, MOST_BYTES = 30, 4 * 2**30
PACKAGES = ("checkpoints", "compile", "measure")
DEEP = b"[" * 100_000
LONG_NUMBER = b"1" * 5000
CONFIG = "from jaxpipe.config import base_config\n\n\ndef get_config(arg=''):\n    config = base_config()\n    {}\n"

SMALL = (
    "--config.mesh.platform=cpu --config.mesh.pipe=2 --config.pipeline.num_microbatches=2 --config.model.num_layers=2"
    " --config.model.hidden=8 --config.model.num_heads=1 --config.data.batch_size=4 --config.data.seq_len=8"
    " --config.data.files=text.txt --config.train.steps=1"
)
TRAIN = f"train --config=config.py --workdir=new {SMALL}"
PREPARE = "prepare --tokenizer=byte --output=out"
CHAT = "prepare --input=chat.jsonl --format=chat --seq_len=64 --tokenizer=byte --output=out"
FROM_HF, TO_HF = "convert --from=hf:model --to=new", "convert --from=run --to=hf:new"
SHOW = "show 1f1b --num_devices=2 --num_microbatches=2"
PLAN = f"plan --config=config.py --topology=a100-80g:1x2 {SMALL}"
OPTIMIZE = "optimize --num_devices=2 --num_microbatches=2 --memory_bound=2 --num_trials=2"
MEASURE, BENCH = f"measure --config=config.py {SMALL}", f"bench --config=config.py {SMALL}"


def make_world(folder: Path) -> None:
    """Writes what is legal: a run, its text, prepared tokens, a model of transformers, schedules, measured times."""
    from jaxpipe.cluster.topology import parse_topology
    from jaxpipe.config import base_config
    from jaxpipe.estimate import Times, setting_of
    from jaxpipe.estimate.measured import Measurement, subject_of

    with zipfile.ZipFile(ROOT / "tests" / "golden" / "run_33dd3c0.zip") as archive:
        archive.extractall(folder)
    config = json.loads((folder / "run" / "config.json").read_text())
    config["data"]["files"] = str(folder / "text.txt")
    (folder / "run" / "config.json").write_text(json.dumps(config))
    (folder / "config.py").write_text(CONFIG.format("return config"))
    shutil.copy(folder / "run" / "schedule.json", folder / "schedule.json")
    measured = Measurement(
        identity={"device_kind": "test"},
        subject=subject_of(setting_of(base_config(), parse_topology("h200:1x8"))),
        times={1: Times(*(7 * [1e-3]), update_s=0.5)},
        spread_ratio={1: 0.01},
        num_layer_parameters=100,
        num_shared_parameters=50,
        num_update_parameters=1000,
        link=None,
    )
    (folder / "costs.json").write_text(json.dumps(measured.to_json()))
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for line in (
            "prepare --input=text.txt --tokenizer=byte --output=data",
            "convert --from=run --to=hf:model",
            "convert --from=hf:model --to=again",
        ):
            assert call(line) == 0, line


# Of a file: bytes; a function of the legal bytes; the size of a file of zeros that takes no room; where a link leads;
# None: no file; a FIFO.
Contents = bytes | Callable[[bytes], bytes] | int | Path | None
FIFO = Path()


@dataclass(frozen=True)
class Case:
    """A hostile input.

    Attributes:
        name: which parser, and what it is given.
        line: the command line.
        files: name -> contents, or what makes them.
        status: exit statuses that are right.
    """

    name: str
    line: str
    files: dict[str, Contents] = field(default_factory=dict)
    status: tuple[int, ...] = (2,)


def edited(**changes: object) -> Callable[[bytes], bytes]:
    """JSON with other values; "a/b" is the key b of the object a."""

    def edit(legal: bytes) -> bytes:
        whole = json.loads(legal)
        for path, value in changes.items():
            *above, last = path.split("/")
            inner = whole
            for key in above:
                inner = inner[key]
            inner[last] = value
        return json.dumps(whole).encode()

    return edit


def patched(place: int, form: str, *values: int) -> Callable[[bytes], bytes]:
    """Bytes of a binary file with other numbers at `place`."""
    packed = struct.pack(form, *values)
    return lambda legal: legal[:place] + packed + legal[place + len(packed) :]


def header(text: bytes, *, says: int | None = None) -> bytes:
    """A file of safetensors with this header."""
    return struct.pack("<Q", len(text) if says is None else says) + text


def short(text: str) -> str:
    """A part of a name, printable."""
    return ascii(text.replace(SMALL, "").replace(" --config=config.py", ""))[1:-1][:90]


def of_config(name: str, line: str) -> Case:
    return Case(f"config file: {name}", TRAIN, {"config.py": CONFIG.format(line).encode()})


def of_field(argument: str) -> Case:
    return Case(f"config field: {short(argument)}", f"{TRAIN} {shlex.quote(argument)}")


def of_json(
    file: str, line: str, *, more: dict[str, Contents] | None = None, must_be_file: bool = True, **damages: Contents
) -> list[Case]:
    """The damages that every reader of JSON meets, and those of this one; `more` files stand beside it.

    What is no file is refused, except where a pipe may stand, as `<(program)` of bash, or where there need be none.
    """
    common = {
        "deep": DEEP,
        "a long number": LONG_NUMBER,
        "not UTF-8": b"\xff\xfe{",
        "null": b"null",
        "list": b"[1]",
        "empty": b"",
        "a terabyte": 2**40,
    }
    if must_be_file:
        common |= {"a device": Path("/dev/zero"), "a link to itself": Path(Path(file).name), "a FIFO": FIFO}
    files = more or {}
    return [Case(f"{file}: {name}", line, {file: damage} | files) for name, damage in (common | damages).items()]


CSV = "show --csv=schedule.csv"
JSON = "show --json=schedule.json"
SAMPLE = "sample --workdir=run --prompt=a --num_tokens=2"
EVAL = "eval --workdir=run"
TENSORS = "model/model.safetensors"

CASES = [
    # ---- Schedules: CSV, JSON, Python
    *(
        Case(f"schedule.csv: {name}", CSV, {"schedule.csv": damage})
        for name, damage in {
            "empty": b"",
            "NUL bytes": b"\0" * 100,
            "not UTF-8": b"\xff\xfe0F0",
            "a stage of many digits": b"0F0,0B0\n" + LONG_NUMBER + b"F0\n",
            "one field of a megabyte": b"x" * 2**20,
            "an open quote": b'"0F0,0B0\n' * 1000,
            "a microbatch of 10^9": b"0F1000000000,0B1000000000\n",
            "digits of another script": "\u0661F0,0B0\n".encode(),
        }.items()
    ),
    *of_json(
        "schedule.json",
        JSON,
        must_be_file=False,
        device=Path("/dev/zero"),
        negative=edited(num_devices=-1),
        infinite=lambda legal: legal.replace(b'"num_microbatches": 2', b'"num_microbatches": Infinity'),
        huge=edited(num_devices=10**12),
        microbatches=edited(num_microbatches=10**12),
        parked=edited(parked=["1/0"]),
        devices=edited(devices=[[10**12, -5]]),
        delays=edited(delays=[10**9, 0]),
        batches=edited(num_batches=10**9),
    ),
    Case("method file: recursion", f"{SHOW} --option=x=1", {}),
    Case(
        "method file: a class that raises",
        "show mine.py --num_devices=2 --num_microbatches=2",
        {"mine.py": b"raise KeyboardInterrupt\n"},
        (2, 130),
    ),
    Case(
        "method file: not a method",
        "show mine.py --num_devices=2 --num_microbatches=2",
        {"mine.py": b"import jaxpipe.schedules\nMethod = jaxpipe.schedules.REGISTRY['1f1b']\n"},
    ),
    Case(
        "method file: recursion in it",
        "show mine.py --num_devices=2 --num_microbatches=2",
        {"mine.py": b"def f(): f()\nf()\n"},
    ),
    # ---- Configs and their fields
    of_config("a BaseException", "raise GeneratorExit"),
    of_config("a list of itself", "x = []; x.append(x); config.model.hidden = x; return config"),
    of_config("NaN", "config.optimizer.learning_rate = float('nan'); return config"),
    of_config("a text with NUL", "config.checkpoint.init_from = 'a\\0b'; return config"),
    of_config("a surrogate", "config.data.tokenizer = '\\udc80'; return config"),
    of_config("a number of 10^400", "config.train.seed = 10**400; return config"),
    *map(
        of_field,
        (
            "--config.checkpoint.async=true",
            "--config.class=1",
            "--config.model.lambda=1",
            "--config.=1",
            "--config.model.=1",
            "--config..model=1",
            "--config.model=1",
            "--config.model.hidden",
            "--config.model.hidden=",
            "--config.model[0]=1",
            "--config.model.hidden.x=1",
            "--config.model.__class__=1",
            "--config.data.seq_len[0]=1",
            "--config.1=2",
            "--config.a b=1",
            f"--config.train.steps={10**400}",
            "--config.optimizer.learning_rate=1e400",
            "--config.optimizer.beta1=nan",
            "--config.pipeline.options=num_chunks=" + "9" * 5000,
            "--config.pipeline.options=,,,=",
            "--config.pipeline.costs=forward=1e-320",
            "--config.pipeline.layers_per_stage=1,-1,2",
            "--config.pipeline.layers_per_stage=" + "1," * 5000,
            "--config.data.files=\udcff",
            "--config.data.files=[",
            "--config.data.tokenizer=\udcff",
            "--config.data.files=" + "a" * 5000,
            "--config.pipeline.schedule=\udcff.json",
            "--config.checkpoint.init_from=" + "a/" * 3000,
            "--config.\u043c\u043e\u0434\u0435\u043b\u044c=1",
            "--config.mesh.order=" + "x" * 10**5,
        ),
    ),
    Case("workdir: NUL", f"train --config=config.py --workdir=a\0b {SMALL}"),
    Case("workdir: a name of 300 letters", f"train --config=config.py --workdir={'a' * 300} {SMALL}"),
    Case("config flag: NUL", "train --config=a\0b --workdir=new"),
    # ---- Topologies and flags
    *(
        Case(f"topology: {short(text)}", f"plan --config=config.py --topology={shlex.quote(text)} {SMALL}")
        for text in (
            "",
            ":",
            "a100-80g",
            "a100-80g:x",
            "a100-80g:0x0",
            "a100-80g:-1x8",
            f"a100-80g:{'9' * 5000}x8",
            "a100-80g:1e3x8",
            "a100-80g:\u0661x\u0662",
            "\udcff:1x2",
            "a100-80g:1x2:3x4",
        )
    ),
    *(
        Case(f"flags: {short(line)}", line)
        for line in (
            f"{SHOW} --transfer=nan",
            f"{SHOW} --option=",
            f"{SHOW} --option==",
            f"{SHOW} --option=a=b=c",
            f"{SHOW} --slot_bytes=-1 --html=a.html",
            f"{SHOW} --output=a\0b",
            "show --num_devices=2",
            f"show 1f1b --num_devices={'9' * 5000} --num_microbatches=2",
            "show \udcff --num_devices=2 --num_microbatches=2",
            f"{SHOW} --format=png --output=/dev/full",
            f"{SHOW} --html=/proc/x.html",
            f"{OPTIMIZE} --num_trials=-1",
            "show zb_h1 --num_devices=2 --num_microbatches=4 --option=input_gradient=1e308",
            "show zb_h1 --num_devices=2 --num_microbatches=4 --option=input_gradient=1e-320",
            f"{OPTIMIZE} --schedule=\udcff",
            f"{OPTIMIZE} --output=a\0b.json",
            f"{OPTIMIZE} --forward=1e-300",
            f"{PLAN} --top=-1",
            f"{PLAN} --top={'9' * 5000}",
            f"{PLAN} --write_config=a\0b",
            f"{PLAN} --costs=a\0b",
            f"{MEASURE} --microbatch_sizes=1e3",
            f"{MEASURE} --output=a\0b",
            f"{BENCH} --num_repeats=-1",
            f"{BENCH} --num_processes=-1",
            "launch --num_processes=0 -- x",
            "launch --num_processes=2 --module=.. -- x",
            "launch --num_processes=2 --module=\udcff",
            "launch --num_processes=1 --module=jaxpipe.train --grace_s=-1",
            "checkpoints list a\0b",
            "checkpoints verify run --step=-1",
            "compile --config=config.py --topology=a100-80g:1xx",
            f"{SAMPLE} --temperature=nan",
            f"{SAMPLE} --seed=-1",
            f"{SAMPLE} --top_k=0",
            f"{SAMPLE} --stop=\udcff",
            "sample --workdir=run --prompt=\udcff",
            "sample --workdir=a\0b --prompt=a",
            "eval --workdir=a\0b",
            f"{TRAIN} --profile_steps=1:{'9' * 5000}",
            f"{TRAIN} --num_processes=2 --process_id=9 --coordinator_address=x",
            f"{TRAIN} --flagfile=nowhere",
            f"{TRAIN} --flagfile=text.txt",
        )
    ),
    # ---- Measured times
    *of_json(
        "costs.json",
        f"{PLAN} --costs=costs.json",
        must_be_file=False,
        device=Path("/dev/zero"),
        negative=lambda legal: legal.replace(b"0.001", b"-0.001"),
        infinite=lambda legal: legal.replace(b"0.001", b"Infinity"),
        texts=lambda legal: legal.replace(b"0.001", b'"0.001"'),
        huge=lambda legal: legal.replace(b"0.001", b"1e308"),
    ),
    # ---- Text, tokenizers, conversations
    Case("text: a folder", f"{PREPARE} --input=run"),
    Case("text: NUL in the name", f"{PREPARE} --input=a\0b"),
    Case("text: a gzip that is none", f"{PREPARE} --input=a.txt.gz", {"a.txt.gz": b"\x1f\x8b\x08" + b"\0" * 50}),
    *of_json(
        "tokenizer.json",
        "prepare --input=text.txt --tokenizer=tokenizer.json --output=out",
        model=b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
        merges=b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        empty=b"{}",
        cyclic=b'{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
        regex=b'{"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((("}, "invert": false},'
        b' "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    ),
    *of_json(
        "chat.jsonl",
        CHAT,
        roles=b'{"messages": [{"role": 1, "content": "a"}]}\n',
        content=b'{"messages": [{"role": "user", "content": {"a": []}}]}\n',
        empty=b'{"messages": []}\n',
        surrogate=b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}\n',
        number=b'{"prompt": 1, "answer": NaN}\n',
    ),
    *of_json("line.jsonl", f"{PREPARE} --input=line.jsonl", key=b'{"text": null}', texts=b'{"text": ["a"]}'),
    # ---- Prepared tokens
    *(
        Case(f"prepared: {name}", f"{TRAIN} --config.data.files=indexed:data", {file: damage})
        for name, file, damage in (
            ("index empty", "data.idx", b""),
            ("index of zeros", "data.idx", b"\0" * 1000),
            ("dtype 255", "data.idx", patched(17, "<B", 255)),
            ("2^62 documents", "data.idx", patched(18, "<Q", 2**62)),
            ("2^64-1 documents", "data.idx", patched(18, "<Q", 2**64 - 1)),
            ("a negative length", "data.idx", patched(34, "<i", -5)),
            ("version 2^63", "data.idx", patched(9, "<Q", 2**63)),
            ("tokens cut", "data.bin", lambda legal: legal[: len(legal) // 2 - 1]),
            ("tokenizer no JSON", "data.tokenizer.json", b"\xff"),
        )
    ),
    # ---- A run: its config and what it has written
    *of_json(
        "run/config.json",
        SAMPLE,
        section=edited(model=[]),
        family=edited(**{"model/family": 7}),
        families=edited(**{"model/family": "\udcff.py"}),
        deep_family=edited(**{"model/family": "nowhere/x.py"}),
        unknown=edited(**{"model/lambda": 1}),
        typed=edited(**{"model/hidden": "wide"}),
        listed=edited(**{"model/hidden": [8]}),
        negative=edited(**{"model/hidden": -8}),
        huge=edited(**{"model/hidden": 2**40}),
        layers=edited(**{"model/num_layers": 10**9}),
        infinite=lambda legal: legal.replace(b'"hidden": 8', b'"hidden": Infinity'),
        tokenizer=edited(**{"data/tokenizer": "\0"}),
        positions=edited(**{"model/num_positions": "9" * 5000}),
    ),
    *(
        Case(f"run/{file}: {name}", EVAL, {f"run/{file}": damage})
        for file, name, damage in (
            ("schedule.json", "deep", DEEP),
            ("checkpoints/2/about.json", "deep", DEEP),
            ("checkpoints/2/about.json", "list", b"[]"),
            ("checkpoints/2/about.json", "a FIFO", FIFO),
            ("checkpoints/2/about.json", "not UTF-8", b"\xff"),
            ("checkpoints/2/about.json", "empty", b"{}"),
            ("checkpoints/2/_METADATA", "deep", DEEP),
            ("checkpoints/2/_METADATA", "list", b"[]"),
            ("checkpoints/2/SHA256SUMS", "not UTF-8", b"\xff\xfe\n"),
            ("checkpoints/2/manifest.ocdbt", "zeros", b"\0" * 100),
        )
    ),
    *(
        Case(
            f"{file} at a resumption: {name}",
            "train --config=config.py --workdir=run --config.train.steps=4",
            {f"run/{file}": damage},
        )
        for file, name, damage in (
            ("data.json", "list", b"[]"),
            ("data.json", "deep", DEEP),
            ("metrics.jsonl", "not UTF-8", b"\xff\n"),
            ("config.json", "deep", DEEP),
        )
    ),
    # ---- Models of transformers
    *of_json(
        "model/config.json",
        FROM_HF,
        architectures=edited(architectures="BertModel"),
        architecture=edited(architectures=[{}]),
        texts=edited(n_embd="wide"),
        negative=edited(n_layer=-1),
        zero=edited(n_head=0),
        infinite=lambda legal: legal.replace(b'"n_embd": 8', b'"n_embd": Infinity'),
        listed=edited(n_positions=[8]),
        null=edited(vocab_size=None),
    ),
    *(
        Case(f"safetensors: {name}", FROM_HF, {TENSORS: damage})
        for name, damage in {
            "empty": b"",
            "a header of 2^63": header(b"{}", says=2**63),
            "a header of a terabyte": header(b"{}", says=2**40),
            "a header that is no JSON": header(b"\xff\xfe"),
            "a deep header": header(DEEP),
            "a list": header(b"[]"),
            "an offset before the file": header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}'),
            "an offset behind it": header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 999999999999]}}'),
            "offsets that are texts": header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
            "a shape of 2^62": header(
                b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}'
            ),
            "no dtype": header(b'{"a": {"shape": [1], "data_offsets": [0, 4]}}'),
            "another dtype": header(b'{"a": {"dtype": "F4_E2M1", "shape": [1], "data_offsets": [0, 4]}}'),
            "a tensor that is a number": header(b'{"a": 7}'),
            "a long number": header(b'{"a": ' + LONG_NUMBER + b"}"),
        }.items()
    ),
    *of_json(
        "model/model.safetensors.index.json",
        FROM_HF,
        more={TENSORS: None},
        weight_map=b'{"weight_map": {"a": "../../etc/passwd"}}',
        listed=b'{"weight_map": []}',
        numbers=b'{"weight_map": {"a": 7}}',
    ),
    *of_json("model/tokenizer.json", FROM_HF, must_be_file=False),
    *of_json(
        "again/hf/safetensors.json",
        "convert --from=again --to=hf:new",
        headers=edited(headers={"a": 1}),
        listed=edited(headers=[]),
        text=edited(headers={"model.safetensors": "x"}),
        names=edited(left_out=1),
    ),
    Case("again/hf/index", "convert --from=again --to=hf:new", {"again/hf/model.safetensors.index.json": b"\xff"}),
    *of_json("again/hf/config.json", "convert --from=again --to=hf:new"),
    Case("export of a run: negative", TO_HF, {"run/config.json": edited(**{"model/hidden": -8})}),
    Case("export: a dtype", f"{TO_HF} --dtype=float8"),
    Case("export: a step", f"{TO_HF} --step=-1"),
]


def call(line: str) -> int | None:
    """Exit status of a command line in this process."""
    command, *arguments = shlex.split(line)
    module = importlib.import_module(f"jaxpipe.{command}{'.__main__' if command in PACKAGES else ''}")
    try:
        return module.main(arguments)
    except SystemExit as ended:
        return ended.code or 0


def put(path: Path, contents: Contents) -> None:
    """Puts a file of `contents` in the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    legal = path.read_bytes() if callable(contents) else b""
    path.unlink(missing_ok=True)
    if contents is FIFO:
        os.mkfifo(path)
    elif isinstance(contents, Path):
        path.symlink_to(contents)
    elif isinstance(contents, int):
        with path.open("wb") as file:
            file.truncate(contents)
    elif contents is not None:
        path.write_bytes(contents(legal) if callable(contents) else contents)


def what_became(case: Case, world: Path, folder: Path) -> str:
    """What is wrong with a command's answer to `case`; empty if it is a short error in five parts."""
    shutil.copytree(world, folder, dirs_exist_ok=True)
    for name, contents in case.files.items():
        put(folder / name, contents)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = call(case.line)
        except BaseException:
            return traceback.format_exc(limit=-4)
    text = errors.getvalue()
    if status not in case.status:
        return f"exit status {status}: {(output.getvalue() + text)[-600:]}"
    if status == 2:
        lacking = [part for part in ("  rule ", "  repair: ") if part not in text]
        if lacking or "Traceback" in text or text.count("\n") > 45:
            return f"lacks {lacking}: {text[-1000:]}"
    return ""


class TooLate(BaseException):  # no OSError, as TimeoutError is, which commands expect of files
    pass


def _late(*_: object) -> None:
    raise TooLate(f"more than {MOST_SECONDS} s")


def main(first: int, last: int) -> None:
    """Runs CASES[first:last] under the limits; prints a line of JSON for each: its name and what is wrong."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _late)
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder) / "world"
        world.mkdir()
        make_world(world)
        for number, case in enumerate(CASES[first:last], first):
            print(json.dumps({"begins": number}), flush=True)
            signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
            wrong = what_became(case, world, Path(folder) / str(number))
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps({"name": case.name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    main(int(sys.argv[1]), int(sys.argv[2]))
