"""Parts of `favor.eval.head_optimizer` and `favor.eval.majorization`."""
