"""Training programs, one readable file a job; `accelerate launch -m favor.train.glue` starts the first."""
