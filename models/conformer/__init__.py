"""Performer Conformer: speech recognition by CTC or Transducer, with linear attention, streaming, and its front end."""

from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer

from favor.models.conformer.chunks import Chunks
from favor.models.conformer.configuration_conformer import ConformerConfig
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.conformer.modeling_conformer import ConformerForCTC, ConformerModel
from favor.models.conformer.modeling_transducer import ConformerForTransducer
from favor.models.conformer.streaming import ConformerStream, TranscriptStream, feed_streams
from favor.models.speech import *  # noqa: F403  they stood here, and code asks for them here
from favor.models.speech import ConformerProcessor, ConformerTokenizer

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
    "TranscriptStream",
    "feed_streams",
]

AutoFeatureExtractor.register(ConformerConfig, ConformerFeatureExtractor, exist_ok=True)
AutoTokenizer.register(ConformerConfig, fast_tokenizer_class=ConformerTokenizer, exist_ok=True)
AutoProcessor.register(ConformerConfig, ConformerProcessor, exist_ok=True)
