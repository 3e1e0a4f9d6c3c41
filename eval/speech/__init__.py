"""Parts of `favor.eval.wer_by_features` and `favor.eval.long_form`."""
