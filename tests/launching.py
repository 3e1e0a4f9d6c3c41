"""Programs in processes of their own: with `accelerate launch` as users start them, or forked from a warm process.

`fork` starts each program from a server that has imported torch, transformers and datasets once, which takes longer
than most programs of the tests; `run` starts a new Python, for tests of the launch itself.
"""

import faulthandler
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no")
LAUNCH += ("--dynamo_backend", "no", "--num_cpu_threads_per_process", "1")
# The flag starts two processes; the environment of the tests puts them on the CPU, where they talk through gloo.
TWO = ("--multi_gpu", "--num_processes", 2, "--main_process_port", 0)
SECONDS = 300
PRELOADED = ["favor.models", "favor.train.glue", "favor.train.mlm", "favor.train.distill", "favor.train.nst"]
# A process has only one fork server of the standard library, so `favor.eval.common.isolated` uses this one too.
PRELOADED += ["favor.eval.speech.long_form_cell", "favor.eval.speed.methods"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def forget_accelerator() -> None:
    """Resets accelerate's settings, which last as long as the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def options(given: Mapping[str, object]) -> list[str]:
    """Writes options as words: a text is cut at its spaces into several values, a path is not; None leaves one out."""
    words: list[str] = []
    for name, value in given.items():
        if value is not None:
            words += [f"--{name}", *(value.split() if isinstance(value, str) else [str(value)])]
    return words


def caller(main: Callable, folder: Path, settings: dict[str, object]) -> Callable:
    """Gives a function that calls a program in this process, with these settings and those of each call by name."""

    def call(output: str = "run", flags: tuple[str, ...] = (), **values: object) -> dict:
        given = options({**settings, "output_dir": folder / output, **values})
        return main([*given, *(f"--{flag}" for flag in flags)])

    return call


def run(*command: object) -> str:
    """Runs a command to its end and returns its output; the exit code must be 0."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def fork(module: str, *words: object, processes: int = 1) -> str:
    """Runs `python -m module words` in forked processes, which must end with code 0; returns their output."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.txt" for rank in range(processes)]
        started = start(module, words, logs)
        wait(started)
        printed = "".join(log.read_text(errors="replace") for log in logs)
        assert all(process.exitcode == 0 for process in started), printed[-3000:]
    return printed


def start(module: str, words: Sequence[object], logs: Sequence[Path]) -> list[multiprocessing.Process]:
    """Starts one forked process per log; several get the environment that `accelerate launch` gives to processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for rank, log in enumerate(logs):
        environment = {}
        if len(logs) > 1:
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(logs), "LOCAL_WORLD_SIZE": len(logs)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        arguments = (module, [str(word) for word in words], log, environment)
        started.append(_context.Process(target=_program, args=arguments))
        started[-1].start()
    return started


def _program(module: str, words: list[str], log: Path, environment: dict[str, object]) -> None:
    """Runs in a forked process: makes a session, streams and arguments of its own, then runs the program."""
    os.setsid()
    os.environ.update({name: str(value) for name, value in environment.items()})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), line_buffering=True) for number in (1, 2))
    sys.argv = [module, *words]
    # A program that hangs says where, in its log, and ends.
    faulthandler.dump_traceback_later(SECONDS - 30, file=sys.stderr, exit=True)
    with warnings.catch_warnings():
        # The server has already imported the module, on purpose.
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait(processes: Sequence[multiprocessing.Process]) -> None:
    """Waits for processes that need each other: when one fails, or none ends in time, all others are killed."""
    left = list(processes)
    while left:
        ready = connection.wait([process.sentinel for process in left], timeout=SECONDS)
        failed = not ready or any(process.exitcode for process in left)
        left = [process for process in left if process.exitcode is None]
        if failed:
            for process in left:
                process.kill()
                process.join()
            return


def isolated_here(limit: float | None, threads: int, task: Callable, *arguments: object) -> object:
    """A replacement of `isolated` that calls the task in this process, with copies of all that would go to another."""
    task, arguments = pickle.loads(pickle.dumps((task, arguments)))
    return pickle.loads(pickle.dumps(task(*arguments)))


class Forked:
    """A replacement of `subprocess` in `favor.eval.common.launch`, which forks trainings instead of launching them."""

    STDOUT = subprocess.STDOUT

    @staticmethod
    def run(command: Sequence[str], stdout: io.TextIOBase, **_: object) -> subprocess.CompletedProcess:
        """Runs the module that a command of `accelerate launch` names."""
        module = next(place for place, word in enumerate(command) if word.startswith("favor.train."))
        log = Path(stdout.name)
        (process,) = start(command[module], command[module + 1 :], [log])
        wait([process])
        return subprocess.CompletedProcess(command, process.exitcode)


def kill_after(step: int, folder: Path, module: str, *words: object, processes: int = 1) -> None:
    """Starts a program and kills its last process with SIGKILL when it has written the checkpoint of a step.

    Its other processes must end by themselves, with an error.
    """
    with tempfile.TemporaryDirectory() as logs:
        *others, killed = start(module, words, [Path(logs) / f"{rank}.txt" for rank in range(processes)])
        deadline = time.monotonic() + 120
        while max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0) < step:
            assert killed.exitcode is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.join()
        for process in others:
            process.join(60)
            code = process.exitcode
            process.kill()
            assert code, f"a process whose neighbour was killed ended with {code} after at most a minute"
    assert not (folder / "all_results.json").exists()
