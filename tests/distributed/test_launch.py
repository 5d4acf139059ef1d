"""The local launcher, with small programs that know nothing of JAX."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tiers import tiers

from jaxpipe.distributed import shared_device
from jaxpipe.launch import main

ROOT = Path(__file__).parents[2]
LONG_S = 60.0  # what ends at once may take so long on a busy machine

# Every program knows its number as `me`, and says "ready" when a signal finds it prepared.
PROLOGUE = """
import os, signal, subprocess, sys, time
me = int(sys.argv[-1].removeprefix("--process_id="))
def wait():
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(0.01)
"""
# Counts SIGTERM and SIGINT for a moment and stops, as one that saves a checkpoint.
STOPS = """
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", os.getpid(), flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.3)
print("got", *got)
sys.exit(75)
"""


def hear_signals():
    """A shell has what it starts in the background ignore SIGINT, nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    """Starts the launcher for a program in a process group of its own; what is left of it is killed."""
    started = []

    def start(program, *flags, arguments=(), **options):
        (tmp_path / "toy.py").write_text(PROLOGUE + textwrap.dedent(program))
        command = [sys.executable, "-m", "jaxpipe.launch", "--module=toy", *flags, "--", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        launcher = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
            text=True,
            preexec_fn=hear_signals,
            **pipes,
        )
        started.append(launcher)
        return launcher

    yield start
    for launcher in started:
        if launcher.poll() is None:
            launcher.kill()


@pytest.fixture
def launch(start):
    """Runs the launcher for a program to its end: exit code, lines of stdout, lines of stderr."""

    def launch(program, *flags, **options):
        launcher = start(program, *flags, **options)
        out, err = launcher.communicate(timeout=LONG_S)
        return launcher.returncode, out.splitlines(), (err or "").splitlines()

    return launch


def ready(launcher, count):
    """The process ids of all programs, once they are ready for signals."""
    lines = [launcher.stdout.readline() for _ in range(count)]
    assert all(re.fullmatch(r"\[\d\] ready \d+\n", line) for line in lines), lines
    return [int(line.split()[-1]) for line in lines]


def is_running(pid):
    """Whether there is such a process; a dead one that nobody has asked for its exit code runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids):
    """Whether none of the processes runs any more, after some time."""
    until = time.monotonic() + LONG_S
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(is_running, pids))


# ---- Lines


def test_lines_are_whole_and_have_a_prefix(launch):
    """In pieces, empty, with a carriage return, and the last one without an end."""
    program = (
        "[(os.write(1, piece), time.sleep(0.1)) for piece in (b'o', b'ne' + bytes([10, 10]), b'two' + bytes([13]))]"
    )
    code, out, _ = launch(program, "--num_processes=1")
    assert code == 0
    assert out == ["[0] one", "[0] ", "[0] two"]


def test_lines_of_many_processes_are_never_torn(launch):
    program = """
        for i in range(200):
            for half in (f"{me} {i} " + "x" * 3000, "y" * 3000 + chr(10)):
                sys.stdout.write(half)
                sys.stdout.flush()
    """
    code, out, _ = launch(program, "--num_processes=3")
    assert code == 0
    expected = [f"[{me}] {me} {i} {'x' * 3000}{'y' * 3000}" for me in range(3) for i in range(200)]
    assert sorted(out) == sorted(expected)


# ---- What each process gets


def test_each_process_gets_arguments_number_and_device(launch):
    program = 'print(*sys.argv[1:], os.environ["JAX_LOCAL_DEVICE_IDS"]); print("error", me, file=sys.stderr)'
    code, out, err = launch(program, "--num_processes=2", arguments=["--config=a b", "--", "--x"])
    assert code == 0
    pattern = (
        r"\[(\d)\] --config=a b -- --x --coordinator_address=(localhost:\d+) --num_processes=2 --process_id=(\d) (\d)"
    )
    found = sorted(re.fullmatch(pattern, line).groups() for line in out)
    assert [(prefix, me, device) for prefix, _, me, device in found] == [("0", "0", "0"), ("1", "1", "1")]
    assert len({address for _, address, _, _ in found}) == 1
    assert sorted(err) == ["[0] error 0", "[1] error 1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--num_processes is missing"]),
        (["--num_processes=0"], ["num_processes=0", "[1, 1024]"]),
        (["--num_process=2"], ["Did you mean '--num_processes'?"]),
        (["--num_processes=2", "--config=x.py"], ["config", "put -- before it"]),
        (["--num_processes=2", "x"], ["'x' belongs to no flag"]),
        (["--num_processes=2", "--module=jaxpipe.trian"], ["no module 'jaxpipe.trian'"]),
        (["--num_processes=2", "--module=no.such"], ["no module 'no.such'"]),
        (["--num_processes=2", "--", "--process_id=1"], ["'--process_id=1'", "the launcher itself"]),
        (["--num_processes=5", "--processes_per_device=2"], ["5 = 2 x 2 + 1", "--num_processes=6"]),
        (["--num_processes=2", "--processes_per_device=4"], ["2 = 0 x 4 + 2", "--num_processes=4"]),
        (["--num_processes=17", "--processes_per_device=17"], ["processes_per_device=17", "[1, 16]"]),
    ],
)
def test_errors_of_the_command_line(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    assert "repair: " in error
    assert all(word in error for word in words), error


# ---- Several processes on one device. What NCCL needs is typed in from its user guide.

SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}
FEW_BLOCKS = {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture
def install_nccl(tmp_path, monkeypatch):
    """Puts an NCCL that says its version where pip puts it, in the folder of the launcher."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, for a library that says its version")

    def install(code):
        for name in os.environ:
            if re.match("NCCL_|XLA_|JAX_LOCAL", name):
                monkeypatch.delenv(name)
        folder = tmp_path / "nvidia" / "nccl" / "lib"
        folder.mkdir(parents=True)
        (tmp_path / "nvidia" / "__init__.py").touch()
        source = f"int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "libnccl.so.2"]
        subprocess.run(command, input=source, text=True, check=True)

    return install


@pytest.mark.parametrize(
    ("code", "version", "nccl"),
    [
        (22809, "2.28.9", lambda me: SOCKETS | {"NCCL_HOSTID": str(me)}),
        (23007, "2.30.7", lambda me: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    ],
)
def test_processes_on_one_device_get_a_share_of_it_and_what_their_nccl_needs(install_nccl, launch, code, version, nccl):
    install_nccl(code)
    program = "print(*(f'{k}={v}' for k, v in os.environ.items() if k.startswith(('NCCL_', 'XLA_', 'JAX_LOCAL'))))"
    status, out, err = launch(program, "--num_processes=4", "--processes_per_device=2")
    assert status == 0
    for line in out:
        me = int(line[1])
        device = {"JAX_LOCAL_DEVICE_IDS": "0011"[me], "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.46"}
        assert dict(pair.split("=") for pair in line.split()[1:]) == device | nccl(me) | FEW_BLOCKS
    assert len(out) == 4
    assert err[0] == f"jaxpipe.launch: 2 processes on each device; NCCL {version}"
    assert err[1] == "jaxpipe.launch: JAX_LOCAL_DEVICE_IDS=0 0 1 1"
    assert err[-1] == "jaxpipe.launch: NCCL_NVLS_ENABLE=0"
    assert len(err) == 1 + 2 + len(nccl(0)) + 2


def test_a_variable_that_is_set_stays(install_nccl, launch, monkeypatch):
    install_nccl(22809)
    given = {"NCCL_MAX_CTAS": "1", "NCCL_NET": "", "XLA_CLIENT_MEM_FRACTION": "0.3", "JAX_LOCAL_DEVICE_IDS": "5"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    program = f"print({{name: os.environ.get(name) for name in {[*given, 'XLA_PYTHON_CLIENT_MEM_FRACTION']}}})"
    _, out, err = launch(program, "--num_processes=2", "--processes_per_device=2")
    assert sorted(out) == [f"[{me}] {given | {'XLA_PYTHON_CLIENT_MEM_FRACTION': None}}" for me in range(2)]
    assert "jaxpipe.launch: XLA_PYTHON_CLIENT_MEM_FRACTION stays 0.3" in err
    assert "jaxpipe.launch: NCCL_MAX_CTAS stays 1" in err
    assert "jaxpipe.launch: NCCL_HOSTID=0 1" in err


@pytest.mark.parametrize(
    ("nccl", "plugin", "words"),
    [
        (
            (2, 27, 5),
            {"jax-cuda13-plugin": "2.27.7"},
            ["NCCL 2.27.5 is too old", "jax-cuda13-plugin needs NCCL 2.27.7"],
        ),
        ((2, 16, 5), {"jax-cuda12-plugin": "2.9"}, ["NCCL 2.16.5 is too old", "needs NCCL 2.17"]),
        ((2, 16, 5), {}, ["a share of a GPU needs NCCL 2.17"]),
        ((2, 27, 5), {"jax-cuda12-plugin": "2.18.1"}, []),
        (None, {"jax-cuda13-plugin": "2.27.7"}, []),
    ],
)
def test_an_nccl_that_is_too_old_is_named(nccl, plugin, words, monkeypatch, capsys):
    def requires(name):
        if name not in plugin:
            raise PackageNotFoundError
        cuda = name.removeprefix("jax-cuda").removesuffix("-plugin")
        return ["numpy>=3", f'nvidia-nccl-cu{cuda}>={plugin[name]}; sys_platform == "linux" and extra == "with-cuda"']

    monkeypatch.setattr(shared_device, "installed_nccl", lambda: nccl)
    monkeypatch.setattr(shared_device, "requires", requires)
    status = main(["--num_processes=2", "--processes_per_device=2", "--module=this"])
    error = capsys.readouterr().err
    assert (status == 2) == bool(words)
    assert all(word in error for word in [*words, "repair: pip install"] if words), error
    assert nccl is not None or "no NCCL found: sockets" in error


@pytest.mark.parametrize(("code", "version"), [(2708, (2, 7, 8)), (22707, (2, 27, 7)), (23203, (2, 32, 3))])
def test_the_library_that_jax_loads_says_its_version(install_nccl, tmp_path, monkeypatch, code, version):
    install_nccl(code)
    program = "from jaxpipe.distributed.shared_device import installed_nccl; print(installed_nccl())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{version}\n"


# ---- Ends


def test_one_that_fails_ends_the_others_and_gives_its_code(launch):
    program = """
        if me == 1:
            while not (os.path.exists("ready0") and os.path.exists("ready2")):
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(print("got SIGTERM") or 76))
        open(f"ready{me}", "w")
        while True:
            time.sleep(0.01)
    """
    code, out, err = launch(program, "--num_processes=3")
    assert code == 3
    assert sorted(out) == ["[0] got SIGTERM", "[2] got SIGTERM"]
    assert err == ["jaxpipe.launch: process 1 failed with exit code 3; processes 0, 2 to end within 10 s"]


def test_what_does_not_end_is_killed(launch):
    program = """
        if me == 0:
            while not os.path.exists("ready1"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready1", "w")
        time.sleep(1000)
    """
    code, _, err = launch(program, "--num_processes=2", "--grace_s=1")
    assert code == 128 + 9
    assert err == [
        "jaxpipe.launch: process 0 was ended by SIGKILL; process 1 to end within 1 s",
        "jaxpipe.launch: killed process 1, which still ran 1 s later",
    ]


@pytest.mark.parametrize(
    "case",
    tiers([([0, 75], 75), ([75, 4], 4)], slow=[([0, 0], 0), ([75, 75], 75), ([75, 0], 75), ([2, 2], 2)]),
    ids=str,
)
def test_to_stop_on_request_is_no_failure(launch, case):
    codes, code = case
    program = f"time.sleep(0.3 * me); print('ends'); sys.exit({codes}[me])"
    found, out, err = launch(program, "--num_processes=2")
    assert found == code
    assert out[0] == "[0] ends"
    assert (out[1:] == ["[1] ends"]) or codes[0] == 2
    assert bool(err) == (code not in (0, 75))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_process_once(start, number):
    launcher = start(STOPS, "--num_processes=3")
    ready(launcher, 3)
    os.killpg(launcher.pid, number)  # as a terminal has it: to all that are in the launcher's group
    out, err = launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 75
    name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    assert sorted(out.splitlines()) == [f"[{process}] got {name}" for process in range(3)]
    assert err == f"jaxpipe.launch: handed {name} on to all processes\n"


def test_one_that_fails_while_all_stop_does_not_disturb_the_others(start):
    program = STOPS.replace("time.sleep(0.3)", "time.sleep(0.6) if me else sys.exit(5)")
    launcher = start(program, "--num_processes=2")
    ready(launcher, 2)
    launcher.terminate()
    out, _ = launcher.communicate(timeout=LONG_S)
    assert out == "[1] got SIGTERM\n"
    assert launcher.returncode == 5


def test_a_second_interrupt_kills(start):
    program = "signal.signal(signal.SIGINT, lambda *_: print('got', flush=True)); wait()"
    launcher = start(program, "--num_processes=2")
    pids = ready(launcher, 2)
    launcher.send_signal(signal.SIGINT)
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] got\n", "[1] got\n"]
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 128 + 9
    assert all_end(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can end a process with its parent")
def test_processes_do_not_outlive_the_launcher(start):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); wait()"
    launcher = start(program, "--num_processes=3")
    pids = ready(launcher, 3)
    assert all(map(is_running, pids))
    launcher.kill()
    launcher.wait()
    assert all_end(pids)


def test_what_the_processes_have_started_does_not_outlive_them(start):
    program = "print('ready', subprocess.Popen(['sleep', '1000']).pid, flush=True); sys.exit(0)"
    launcher = start(program, "--num_processes=2")
    pids = ready(launcher, 2)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode == 0
    assert all_end(pids)


def test_the_run_goes_on_where_nobody_reads(start, tmp_path):
    program = """
        print("first", flush=True)
        while not os.path.exists("closed"):
            time.sleep(0.01)
        print("x" * 100000, flush=True)
        open(f"done{me}", "w")
    """
    launcher = start(program, "--num_processes=2")
    launcher.stdout.readline()
    launcher.stdout.close()
    (tmp_path / "closed").touch()
    assert launcher.wait(timeout=LONG_S) == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
