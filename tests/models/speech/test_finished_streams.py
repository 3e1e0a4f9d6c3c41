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

TOKENIZER = train_tokenizer(["GO DAD"], "char")
EXTRACTOR = ConformerFeatureExtractor(feature_size=10, normalize="none")


def conformer_stream(kind, causal):
    """Of logits of an encoder with a CTC head, or of text."""
    options, chunks = (
        {"causal": causal, "num_hidden_layers": 1, "vocab_size": len(TOKENIZER)},
        None if causal else Chunks(4),
    )
    model, text = build(KINDS[kind.removesuffix(" text")], "favor+", **options), kind.endswith("text")
    given = ConformerProcessor(EXTRACTOR, TOKENIZER) if text else EXTRACTOR
    return (model.transcribe_stream if text else model.stream)(given, chunks=chunks)


def window_stream():
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    model = WhisperForCTC(WhisperCTCConfig(**sizes, vocab_size=len(TOKENIZER))).eval()
    processor = ConformerProcessor(WhisperCTCFeatureExtractor(), TOKENIZER)
    return model.stream(processor, step=0.2, look_ahead=0.1, context=0.4)


KINDS = {"ctc": ConformerForCTC, "transducer": ConformerForTransducer}
CASES = [(name + text, True) for name in KINDS for text in ("", " text")]


@pytest.mark.parametrize(("kind", "causal"), [*CASES, ("ctc", False), ("ctc text", False), ("whisper", None)])
def test_after_finish_a_stream_takes_nothing_until_it_is_reset(kind, causal):
    """It would go on with a state, and in the middle of a window or a chunk, that audio after the end does not fit."""
    stream = window_stream() if causal is None else conformer_stream(kind, causal)
    audio = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    stream.feed(audio)
    stream.finish()
    calls = [lambda: stream.feed(audio), stream.finish]
    if kind in KINDS:
        calls.append(lambda: stream.feed_features(torch.zeros(1, 60, 10)))
    if "text" in kind:
        other = stream.model.transcribe_stream(stream.processor, chunks=stream.chunks)
        calls.append(lambda: feed_streams([other, stream], [audio, audio]))
    for call in calls:
        with pytest.raises(ValueError, match="the recording has ended with finish: call reset to begin another one"):
            call()
    if "text" in kind:
        assert other._state.samples is None  # nor does a stream that is fed together with it
    stream.reset()
    stream.feed(audio)
    stream.finish()
