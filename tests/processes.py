"""Two processes that talk to each other, without two times the import of torch and transformers."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing


def run_two(function: Callable[..., None], *args: Any) -> None:
    """Calls `function(rank, *args)` in two fresh processes and waits for both; what one raises is raised here.

    They are copies of a server that has imported the package and run nothing.
    """
    multiprocessing.set_forkserver_preload(["favor.optim", "favor.models.conformer"])
    torch.multiprocessing.start_processes(function, args, nprocs=2, start_method="forkserver")
