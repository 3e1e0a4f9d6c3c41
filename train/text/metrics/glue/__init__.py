"""The folder that `evaluate.load` loads as the metric `glue`."""
