"""Training programs, one readable file per job. Start one of them with `accelerate launch -m favor.train.glue`."""

from favor._parts import check_root, needs

check_root(__name__, __file__)
needs("train", "accelerate", "datasets", "sklearn", "scipy")
