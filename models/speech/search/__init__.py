"""From logits of CTC to tokens.

- `ctc`: greedy search and prefix beam search; `alignment`: frames of tokens, forced alignment
- `ngram`, `scores`: language models and hotwords
- `word_beam`, `lexicon_beam`, on `pieces`: beam search with words, of any words or of known ones
- `choice`: the search that a scorer needs
"""
