"""Parts of `favor.eval.papers.wer_by_features` and `favor.eval.long_form`."""
