"""Processes that talk to each other, without an import of torch and transformers in each."""

import multiprocessing
import time

import torch.multiprocessing
from launching import PRELOADED

SECONDS = 300


def run_several(function, *args, number=2):
    """Calls `function(rank, *args)` in fresh copies of a server and waits; what one raises is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)  # the server is also that of `launching`, whoever starts it
    options = {"nprocs": number, "start_method": "forkserver", "join": False}
    both = torch.multiprocessing.start_processes(function, args, **options)
    deadline = time.monotonic() + SECONDS
    while not both.join(timeout=5):
        if time.monotonic() > deadline:
            for process in both.processes:
                process.kill()
            raise TimeoutError(f"they have not ended after {SECONDS} seconds")
