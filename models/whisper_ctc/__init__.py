"""CTC on Whisper's encoder."""

from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer

from favor.models.speech.tokenizer import ConformerProcessor, ConformerTokenizer
from favor.models.whisper_ctc.configuration_whisper_ctc import WhisperCTCConfig
from favor.models.whisper_ctc.feature_extraction_whisper_ctc import WhisperCTCFeatureExtractor
from favor.models.whisper_ctc.modeling_whisper_ctc import WhisperForCTC
from favor.models.whisper_ctc.streaming_whisper_ctc import WhisperCTCStream

__all__ = ["WhisperCTCConfig", "WhisperCTCFeatureExtractor", "WhisperCTCStream", "WhisperForCTC"]

AutoFeatureExtractor.register(WhisperCTCConfig, WhisperCTCFeatureExtractor, exist_ok=True)
AutoTokenizer.register(WhisperCTCConfig, fast_tokenizer_class=ConformerTokenizer, exist_ok=True)
AutoProcessor.register(WhisperCTCConfig, ConformerProcessor, exist_ok=True)
