"""The folder that `evaluate.load` takes as the metric `glue`."""
