"""Options of the evaluation programs, a module each: without torch or transformers, so that help comes at once."""
