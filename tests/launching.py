"""Programs as users start them: in processes of their own, with `accelerate launch`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no")
LAUNCH += ("--dynamo_backend", "no", "--num_cpu_threads_per_process", "1")
# The flag starts two processes; the environment of the tests puts them on the CPU, where they talk through gloo.
TWO = ("--multi_gpu", "--num_processes", 2, "--main_process_port", 0)


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kill_after(step: int, folder: Path, *command: object) -> None:
    """Starts a program and kills it, as no program can prevent, when it has written the checkpoint of a step."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while last_step(folder) < step:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "all_results.json").exists()


def last_step(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)
