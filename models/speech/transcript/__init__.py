"""Tokens and text: `tokenizer` and `processor`, `pronunciations`, `spans` with times, `utterances` of a stream."""
