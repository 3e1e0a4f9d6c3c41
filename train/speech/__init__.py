"""Parts of the programs that train on speech."""

from favor._parts import needs

needs("speech", "jiwer", "soundfile", "sentencepiece")
