"""Speech: n-gram models and lexicons of books, a converter of Whisper, and parts of the programs that measure."""
