"""Training programs, one readable file a job; `accelerate launch -m favor.train.glue` starts the first."""

from favor._parts import check_root, needs

check_root(__name__, __file__)
needs("train", "accelerate", "datasets", "evaluate", "sklearn", "scipy")
