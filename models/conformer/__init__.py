"""Performer Conformer: speech recognition by CTC or Transducer, with linear attention, streaming, and its front end."""

from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer

from favor.models.conformer.arpa import write_arpa
from favor.models.conformer.chunks import Chunks
from favor.models.conformer.configuration_conformer import ConformerConfig
from favor.models.conformer.ctc_alignment import ctc_align, ctc_emissions
from favor.models.conformer.ctc_decoding import Hypothesis, ctc_greedy, ctc_prefix_beam
from favor.models.conformer.endpoints import EndpointRules
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.conformer.lexicon_beam import WordLexicon, ctc_lexicon_beam
from favor.models.conformer.modeling_conformer import ConformerForCTC, ConformerModel
from favor.models.conformer.modeling_transducer import ConformerForTransducer
from favor.models.conformer.ngram import NgramModel
from favor.models.conformer.processing_conformer import ConformerProcessor
from favor.models.conformer.pronunciations import Pronunciations
from favor.models.conformer.spans import Emission, Span, join_segments, join_words
from favor.models.conformer.streaming import ConformerStream
from favor.models.conformer.tokenization_conformer import ConformerTokenizer, normalize_transcript, train_tokenizer
from favor.models.conformer.transcript_stream import TranscriptStream, Utterance, feed_streams
from favor.models.conformer.transcription import Transcript
from favor.models.conformer.transducer_decoding import transducer_beam, transducer_emissions, transducer_greedy
from favor.models.conformer.transducer_loss import joint_transducer_loss, transducer_loss
from favor.models.conformer.word_beam import ctc_word_beam
from favor.models.conformer.word_scores import WordScorer

__all__ = [
    "Chunks",
    "ConformerConfig",
    "ConformerFeatureExtractor",
    "ConformerForCTC",
    "ConformerForTransducer",
    "ConformerModel",
    "ConformerProcessor",
    "ConformerStream",
    "ConformerTokenizer",
    "Emission",
    "EndpointRules",
    "Hypothesis",
    "NgramModel",
    "Pronunciations",
    "Span",
    "Transcript",
    "TranscriptStream",
    "Utterance",
    "WordLexicon",
    "WordScorer",
    "ctc_align",
    "ctc_emissions",
    "ctc_greedy",
    "ctc_lexicon_beam",
    "ctc_prefix_beam",
    "ctc_word_beam",
    "feed_streams",
    "join_segments",
    "join_words",
    "joint_transducer_loss",
    "normalize_transcript",
    "train_tokenizer",
    "transducer_beam",
    "transducer_emissions",
    "transducer_greedy",
    "transducer_loss",
    "write_arpa",
]

AutoFeatureExtractor.register(ConformerConfig, ConformerFeatureExtractor, exist_ok=True)
AutoTokenizer.register(ConformerConfig, fast_tokenizer_class=ConformerTokenizer, exist_ok=True)
AutoProcessor.register(ConformerConfig, ConformerProcessor, exist_ok=True)
