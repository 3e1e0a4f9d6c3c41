"""Options of the training programs, a module each: without torch or transformers, so that help comes at once."""
