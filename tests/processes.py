"""Two processes that talk to each other, without two times the import of torch and transformers."""

import multiprocessing
import time

import torch.multiprocessing

SECONDS = 300


def run_two(function, *args):
    """Calls `function(rank, *args)` in two fresh copies of a server and waits; what one raises is raised here."""
    multiprocessing.set_forkserver_preload(["favor.optim", "favor.models.conformer"])
    options = {"nprocs": 2, "start_method": "forkserver", "join": False}
    both = torch.multiprocessing.start_processes(function, args, **options)
    deadline = time.monotonic() + SECONDS
    while not both.join(timeout=5):
        if time.monotonic() > deadline:
            for process in both.processes:
                process.kill()
            raise TimeoutError(f"two processes have not ended after {SECONDS} seconds")
