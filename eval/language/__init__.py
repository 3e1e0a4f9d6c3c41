"""Long contexts of causal language models: `favor.eval.language.perplexity` and `favor.eval.language.needle`."""
