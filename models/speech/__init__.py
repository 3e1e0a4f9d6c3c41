"""Parts of every model of speech: audio, tokens and text, searches, the loss of the Transducer, `model.transcribe`."""

from favor.models.speech.alignment import ctc_align, ctc_emissions
from favor.models.speech.audio import read_file, resample
from favor.models.speech.ctc import Hypothesis, ctc_greedy, ctc_prefix_beam
from favor.models.speech.lattice import joint_transducer_loss, transducer_loss
from favor.models.speech.ngram import NgramModel, write_arpa
from favor.models.speech.pronunciations import Pronunciations
from favor.models.speech.spans import Emission, EndpointRules, Span, Utterance, join_segments, join_words
from favor.models.speech.tokenizer import ConformerProcessor, ConformerTokenizer, normalize_transcript, train_tokenizer
from favor.models.speech.transcription import Transcript
from favor.models.speech.transducer import transducer_beam, transducer_emissions, transducer_greedy
from favor.models.speech.word_beam import ctc_word_beam
from favor.models.speech.word_lexicon import WordLexicon
from favor.models.speech.word_scorer import WordScorer

ctc_lexicon_beam = ctc_word_beam

__all__ = [
    "ConformerProcessor",
    "ConformerTokenizer",
    "Emission",
    "EndpointRules",
    "Hypothesis",
    "NgramModel",
    "Pronunciations",
    "Span",
    "Transcript",
    "Utterance",
    "WordLexicon",
    "WordScorer",
    "ctc_align",
    "ctc_emissions",
    "ctc_greedy",
    "ctc_lexicon_beam",
    "ctc_prefix_beam",
    "ctc_word_beam",
    "join_segments",
    "join_words",
    "joint_transducer_loss",
    "normalize_transcript",
    "read_file",
    "resample",
    "train_tokenizer",
    "transducer_beam",
    "transducer_emissions",
    "transducer_greedy",
    "transducer_loss",
    "write_arpa",
]
