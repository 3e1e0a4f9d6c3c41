"""Parts of every model of speech: audio, tokens and text, searches, the Transducer loss.

- `audio`: files as waveforms at any sampling rate; checks of waveforms
- `transcript`: tokens, pronunciations, times of words, utterances
- `search`: from logits of CTC to tokens: greedy, beams, language models, forced alignment
- `transducer`: the loss of the Transducer and its searches
- `encoder`, `transcription`: padding and CTC loss of encoders; `model.transcribe`
"""

from favor.models.speech.audio.files import read_file, resample
from favor.models.speech.search.alignment import ctc_align, ctc_emissions
from favor.models.speech.search.common import Hypothesis
from favor.models.speech.search.ctc import ctc_greedy, ctc_prefix_beam
from favor.models.speech.search.lexicon_beam import WordLexicon, ctc_lexicon_beam
from favor.models.speech.search.ngram import NgramModel, write_arpa
from favor.models.speech.search.scores import WordScorer
from favor.models.speech.search.word_beam import ctc_word_beam
from favor.models.speech.transcript.processor import ConformerProcessor
from favor.models.speech.transcript.pronunciations import Pronunciations
from favor.models.speech.transcript.spans import Emission, Span, join_segments, join_words
from favor.models.speech.transcript.tokenizer import ConformerTokenizer, normalize_transcript, train_tokenizer
from favor.models.speech.transcript.utterances import EndpointRules, Utterance
from favor.models.speech.transcription import Transcript
from favor.models.speech.transducer.decoding import transducer_beam, transducer_emissions, transducer_greedy
from favor.models.speech.transducer.loss import joint_transducer_loss, transducer_loss

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
