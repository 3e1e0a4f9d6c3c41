"""What every stream of audio does after `finish`, until it is reset."""

import pytest
import torch
from tiny_speech import build

from favor.models.conformer import (
    Chunks,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
    feed_streams,
)
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC

OF_WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
KINDS = ((ConformerForCTC, True), (ConformerForCTC, False), (ConformerForTransducer, True))
TOKENIZER = train_tokenizer(["GO DAD"], "char")
EXTRACTOR = ConformerFeatureExtractor(feature_size=10, normalize="none")


def conformer(kind, causal):
    return build(kind, "favor+", causal=causal, num_hidden_layers=1, vocab_size=len(TOKENIZER))


def logits_stream(kind, causal):
    return conformer(kind, causal).stream(EXTRACTOR, chunks=None if causal else Chunks(4))


def text_stream(kind, causal):
    processor, chunks = ConformerProcessor(EXTRACTOR, TOKENIZER), None if causal else Chunks(4)
    return conformer(kind, causal).transcribe_stream(processor, chunks=chunks)


def window_stream(kind, causal):
    model = kind(WhisperCTCConfig(**OF_WHISPER, vocab_size=len(TOKENIZER))).eval()
    processor = ConformerProcessor(WhisperCTCFeatureExtractor(), TOKENIZER)
    return model.stream(processor, step=0.2, look_ahead=0.1, context=0.4)


STREAMS = [(make, kind, causal) for make in (logits_stream, text_stream) for kind, causal in KINDS]


@pytest.mark.parametrize(("make", "kind", "causal"), [*STREAMS, (window_stream, WhisperForCTC, False)])
def test_after_finish_a_stream_takes_nothing_until_it_is_reset(make, kind, causal):
    """It would go on with a state, and in the middle of a window or a chunk, that audio after the end does not fit."""
    stream = make(kind, causal)
    audio = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    stream.feed(audio)
    stream.finish()
    calls = [lambda: stream.feed(audio), stream.finish]
    if make is logits_stream:
        calls.append(lambda: stream.feed_features(torch.zeros(1, 60, 10)))
    if make is text_stream:
        other = stream.model.transcribe_stream(stream.processor, chunks=stream.chunks)
        calls.append(lambda: feed_streams([other, stream], [audio, audio]))
    for call in calls:
        with pytest.raises(ValueError, match="the recording has ended with finish: call reset to begin another one"):
            call()
    if make is text_stream:
        assert other._state.samples is None  # nor does a stream that is fed together with it
    stream.reset()
    stream.feed(audio)
    stream.finish()
