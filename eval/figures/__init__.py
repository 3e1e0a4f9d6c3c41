"""Parts of `favor.eval.kernel_classification`."""
