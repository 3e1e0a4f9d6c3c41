"""Recognition of audio that comes piece by piece: logits and tokens, or text in utterances; one stream or many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from favor.models.conformer.chunks import Chunks
from favor.models.conformer.encoder_state import EncoderState, check_stream, encode
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech.audio import check_open, one_waveform
from favor.models.speech.spans import Emission, EndpointRules, Span, Utterance, in_seconds, join_words
from favor.models.speech.tokenizer import ConformerProcessor
from favor.models.speech.transducer import DIVERGED, begin, transducer_emissions, transducer_greedy

if TYPE_CHECKING:
    from favor.models.conformer.modeling_conformer import ConformerForCTC, ConformerModel
    from favor.models.conformer.modeling_transducer import ConformerForTransducer

BLOCK_FRAMES = 250  # encoded at once
Said = list[list[tuple[int, float]]]  # tokens of each frame, with their probabilities


class ConformerStream:
    """Runs a Conformer piece by piece; its outputs are those of the whole recording with the same chunks.

    Args:
        model: a `ConformerModel`, `ConformerForCTC` or `ConformerForTransducer` in evaluation mode.
        feature_extractor: for `feed`, with fixed normalisation. Without an extractor only `feed_features` works.
        batch_size: recordings that run side by side. Default 1.
        chunks: in which a model runs that is not causal. Default None: the model is causal.

    Attributes:
        frames: encoder frames so far.
        tokens: what greedy search has found so far, a list for each recording.

    Raises:
        ValueError: if the model is in training mode, is not causal and has no chunks or cannot run in them, or if
            features depend on the whole utterance.
        TypeError: for a processor; `model.transcribe_stream` takes it and gives text.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForCTC, ConformerStream
        >>> config = ConformerConfig.preset("tiny", causal=True, attn_implementation="favor+", favor={"exact_below": 0})
        >>> stream = ConformerStream(ConformerForCTC(config).eval())
        >>> stream.feed_features(torch.randn(1, 60, 80)).shape[1], stream.feed_features(torch.randn(1, 40, 80)).shape[1]
        (12, 10)
    """

    def __init__(
        self,
        model: ConformerModel | ConformerForCTC | ConformerForTransducer,
        feature_extractor: ConformerFeatureExtractor | None = None,
        batch_size: int = 1,
        chunks: Chunks | None = None,
    ) -> None:
        if isinstance(feature_extractor, ConformerProcessor):
            raise TypeError("stream takes a feature extractor; for text call model.transcribe_stream(processor).")
        check_stream(model, feature_extractor, chunks)
        self.chunks = chunks
        self.model, self.encoder = model, getattr(model, "encoder", model)
        self.feature_extractor, self.batch_size = feature_extractor, batch_size
        self._is_transducer = hasattr(model, "predict")
        self._head: Any = None if self._is_transducer else getattr(model, "ctc_head", None)
        self.reset()

    def reset(self) -> None:
        """Forgets all audio, tokens and states: the next piece begins a new recording."""
        self.frames = 0
        self.tokens: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._context: list[Tensor] = []
        self._state = EncoderState.empty(self.encoder, self.batch_size, self.chunks)

    @property
    def latency(self) -> float:
        """Seconds of audio from the beginning of a frame, the first of its chunk, until its computation can begin."""
        config = self.encoder.config
        width, stride = config.subsampling_conv_kernel_size, config.subsampling_conv_stride
        hops = (width - 1) * (1 + stride) + (0 if self.chunks is None else (self.chunks.size - 1) * stride**2)
        extractor = self.feature_extractor
        rate, window = (16000, 400) if extractor is None else (extractor.sampling_rate, extractor.win_length)
        return (hops * config.feature_hop_length + window) / rate

    @property
    def state_bytes(self) -> int:
        """Bytes kept between pieces."""
        return self._state.nbytes + sum(part.nbytes for part in self._context)

    def feed(self, audio: Any) -> Tensor:
        """Takes the next samples of one recording: floats in [-1, 1], `[n]` at the extractor's rate.

        Returns:
            What `feed_features` returns for the features that are complete.

        Raises:
            TypeError: for integers.
            ValueError: without an extractor, for several channels, samples that are not finite, or after `finish`.
        """
        extractor = self.feature_extractor
        if extractor is None or self.batch_size != 1:
            raise ValueError("feed needs a feature_extractor and batch_size 1; use feed_features for features.")
        check_open(self._state.has_ended)
        self._state.hear(one_waveform(audio), extractor, self.encoder)
        return self._next()

    def feed_features(self, features: Tensor) -> Tensor:
        """Takes the next features `[B, T, num_mel_bins]`, and appends to `tokens` what they add.

        Returns:
            Logits `[B, m, V]` of a CTC model, else encoder frames `[B, m, C]`: those whose features are complete; m may
            be 0.

        Raises:
            ValueError: after `finish`.
        """
        check_open(self._state.has_ended)
        self._state.add(features, self.encoder)
        return self._next()

    def finish(self) -> Tensor:
        """Ends the recording: gives what `feed` gives, for the frames of the last chunk, which may be shorter.

        The tokens stay until `reset`, before which no more audio is taken.

        Raises:
            ValueError: if the recording has ended before.
        """
        check_open(self._state.has_ended)
        self._state.has_ended = True
        return self._next()

    @torch.no_grad()
    def _next(self) -> Tensor:
        """Computes and decodes the frames that are complete; what greedy search finds in them goes to `tokens`."""
        count, encoder = self._state.ready(self.encoder), self.encoder
        if count == 0:
            width = encoder.config.hidden_size if self._head is None else self._head.out_features
            return torch.empty(self.batch_size, 0, width, dtype=encoder.dtype, device=encoder.device)
        hidden_states = encode(encoder, [self._state], [count])[0]
        self._state.advance(count, encoder)
        self.frames += count
        if self._is_transducer:
            found = transducer_greedy(self.model, hidden_states, [count] * self.batch_size, context=self._context)
            for tokens, new in zip(self.tokens, found, strict=True):
                tokens += new
        if self._head is None:
            return hidden_states
        logits: Tensor = self._head(hidden_states)
        best, blank = logits.argmax(-1), self.model.config.pad_token_id
        # A token that continues from the piece before is not a new one.
        last = self._context[0] if self._context else torch.full_like(best[:, :1], blank)
        starts = (best != blank) & (best != torch.cat((last, best[:, :-1]), dim=1))
        for tokens, row, start in zip(self.tokens, best, starts, strict=True):
            tokens += row[start].tolist()
        self._context = [best[:, -1:].clone()]
        return logits


class TranscriptStream:
    """Transcribes one recording piece by piece, by greedy search; `model.transcribe_stream` makes it.

    Without end points, text and times are those of `model.transcribe` for the whole recording. At an end point the
    utterance becomes final and decoding begins anew.

    By default the encoder goes on at an end point. Its outputs then stay those of the whole recording, the first words
    after a pause have a context, and with linear attention the state does not grow. `reset_encoder` makes the encoder
    forget earlier audio. Set it if attention is exact, whose state grows, or if the model was trained on short
    utterances alone and gets worse in long recordings.

    Args:
        model: a `ConformerForCTC` or `ConformerForTransducer` in evaluation mode.
        processor: features and tokens of the model, with fixed normalisation.
        rules: when an utterance ends. Default None: `EndpointRules()`.
        reset_encoder: whether the encoder forgets all audio at an end point. Default False.
        chunks: in which a model runs that is not causal. Default None: the model is causal.

    Raises:
        ValueError: if the model is in training mode, recognises nothing, is not causal and has no chunks or cannot run
            in them, or if features depend on the whole utterance.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
        >>> from favor.models.conformer import TranscriptStream
        >>> from favor.models.speech import ConformerProcessor, train_tokenizer
        >>> extractor, tokenizer = ConformerFeatureExtractor(normalize="none"), train_tokenizer(["YES"], "char")
        >>> processor = ConformerProcessor(extractor, tokenizer)
        >>> config = ConformerConfig.preset("tiny", causal=True, attn_implementation="favor+", favor={"exact_below": 0})
        >>> stream = TranscriptStream(ConformerForCTC(config).eval(), processor)
        >>> len(stream.feed(torch.zeros(8000))), type(stream.partial)
        (0, <class 'str'>)
    """

    def __init__(
        self,
        model: Any,
        processor: ConformerProcessor,
        rules: EndpointRules | None = None,
        reset_encoder: bool = False,
        chunks: Chunks | None = None,
    ) -> None:
        check_stream(model, processor.feature_extractor, chunks)
        if not hasattr(model, "emissions"):
            raise ValueError(f"model must recognise speech, with CTC or as a Transducer; got {type(model).__name__}.")
        self.model, self.processor, self.reset_encoder, self.chunks = model, processor, reset_encoder, chunks
        self.rules = EndpointRules() if rules is None else rules
        self._merges = not hasattr(model, "predict")  # CTC repeats a token as long as it lasts
        self._frame = model.config.samples_per_frame / processor.feature_extractor.sampling_rate
        self.reset()

    def reset(self) -> None:
        """Forgets all audio and text: the next piece begins a new recording, at 0 seconds."""
        self._state = EncoderState.empty(self.model.encoder, chunks=self.chunks)
        self._context: list[Tensor] = []
        self._emissions: list[Emission] = []
        self._frames = self._begun = self._heard = 0
        self._last: int | None = None

    @property
    def partial(self) -> str:
        """Text so far of the utterance that is not final yet."""
        return str(self.processor.tokenizer.decode([one.token for one in self._emissions], group_tokens=False))

    @property
    def partial_words(self) -> list[Span]:
        """Words of `partial` with times in seconds and confidences."""
        return join_words(in_seconds(self.processor.tokenizer.spans(self._emissions), self._frame))

    @property
    def seconds(self) -> float:
        """Time up to which the audio is decoded; later frames are not complete yet."""
        return self._frames * self._frame

    @property
    def state_bytes(self) -> int:
        """Bytes of tensors kept between pieces."""
        return self._state.nbytes + sum(part.nbytes for part in self._context)

    def feed(self, audio: Any) -> list[Utterance]:
        """Takes the next samples, and gives the utterances that end in them.

        Args:
            audio: floats in [-1, 1], `[n]`, any number of them, at the sampling rate of the processor.

        Returns:
            Utterances with text, in their order; mostly none. The stream does not keep them.

        Raises:
            TypeError: for integers.
            ValueError: for samples of several channels or not finite, after `finish`, or if the model gives NaN.
        """
        return feed_streams([self], [audio])[0]

    def finish(self) -> list[Utterance]:
        """Ends the recording: gives the utterance that was not final yet, if it has text.

        No more audio is taken until `reset`.

        If the end of the last word may need later frames, as with a Transducer, feed half a second of zeros first.

        Returns:
            A list of one utterance, or an empty one; in chunks some more may end in the last chunk.

        Raises:
            ValueError: if the recording has ended before.
        """
        check_open(self._state.has_ended)
        self._state.has_ended = True
        ended = _hear([self])[0] + self._close()
        self._state = EncoderState([], has_ended=True)  # the rest of the state is free
        return ended

    def _close(self) -> list[Utterance]:
        """Gives the utterance so far, in a list that is empty if there is none, and begins decoding anew."""
        text, words = self.partial, self.partial_words
        self._emissions, self._begun, self._heard = [], self._frames, self._frames
        self._context.clear()
        return [Utterance(text, words[0].start, words[-1].end, words)] if words else []

    def _read(self, said: Said) -> tuple[int, bool]:
        """Takes in tokens of frames up to an end point; returns the number of frames, and whether it was reached."""
        for count, tokens in enumerate(said, 1):
            for token, confidence in tokens:
                if not self._merges or token != self._last:
                    self._emissions.append(Emission(token, self._frames, self._frames + 1, confidence))
                elif self._emissions:  # else an end point has cut the token, which stays in the utterance before
                    old = self._emissions.pop()
                    length = old.end - old.start
                    mean = (old.confidence * length + confidence) / (length + 1)
                    self._emissions.append(Emission(token, old.start, old.end + 1, mean))
            self._last = tokens[-1][0] if tokens else None
            self._frames += 1
            self._heard = self._frames if tokens else self._heard
            silence, length = (self._frame * (self._frames - since) for since in (self._heard, self._begun))
            if self.rules.hold(silence, length, bool(self._emissions)):
                return count, True
        return len(said), False


def feed_streams(streams: Sequence[TranscriptStream], pieces: Sequence[Any]) -> list[list[Utterance]]:
    """Takes the next samples of several recordings in one pass of the model.

    Each stream gets what it would get alone, up to rounding. Streams may have heard different amounts of audio, pieces
    may have different lengths, and streams may be new or reset between two calls. With exact attention, windows or
    landmarks, and for the first piece of streams that are all new, attention runs once per stream.

    Args:
        streams: of one model, each at most once.
        pieces: the next samples `[n]` of each, as in `TranscriptStream.feed`; may be empty.

    Returns:
        The utterances that end in these samples, a list for each stream.

    Raises:
        TypeError: for integers.
        ValueError: for another number of pieces, streams of different models, a stream that comes twice, samples of
            several channels or not finite, a stream after `finish`, or if the model gives NaN; after NaN the streams
            must be reset.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
        >>> from favor.models.conformer import feed_streams
        >>> from favor.models.speech import ConformerProcessor, train_tokenizer
        >>> extractor, tokenizer = ConformerFeatureExtractor(normalize="none"), train_tokenizer(["YES"], "char")
        >>> processor = ConformerProcessor(extractor, tokenizer)
        >>> config = ConformerConfig.preset("tiny", causal=True, attn_implementation="favor+", favor={"exact_below": 0})
        >>> model = ConformerForCTC(config).eval()
        >>> streams = [model.transcribe_stream(processor) for _ in range(2)]
        >>> finals = feed_streams(streams, [torch.zeros(8000), torch.zeros(3000)])
        >>> [round(stream.seconds, 2) for stream in streams]
        [0.36, 0.08]
    """
    if len(streams) != len(pieces) or len({id(stream) for stream in streams}) < len(streams):
        raise ValueError(
            f"streams must be different ones with a piece each, got {len(streams)} streams and {len(pieces)} pieces."
        )
    if len({(id(stream.model), stream.chunks) for stream in streams}) > 1:
        raise ValueError("streams must be of one model, with the same chunks; call feed_streams once for each.")
    checked = [one_waveform(piece) for piece in pieces]
    for stream in streams:
        check_open(stream._state.has_ended)
    for stream, samples in zip(streams, checked, strict=True):
        stream._state.hear(samples, stream.processor.feature_extractor, stream.model.encoder)
    return _hear(streams)


@torch.no_grad()
def _hear(streams: Sequence[TranscriptStream]) -> list[list[Utterance]]:
    """Encodes and decodes all frames of streams that can be computed; gives the utterances that end in them."""
    ended: dict[int, list[Utterance]] = {id(stream): [] for stream in streams}
    while ready := [stream for stream in streams if stream._state.ready(stream.model.encoder)]:
        _run(ready, ended)
    return [ended[id(stream)] for stream in streams]


def _run(streams: Sequence[TranscriptStream], ended: dict[int, list[Utterance]]) -> None:
    """Encodes and decodes the next frames of streams that have some; adds to the utterances that ended."""
    model = streams[0].model
    states = [stream._state for stream in streams]
    counts = [state.ready(model.encoder, BLOCK_FRAMES) for state in states]
    frames = encode(model.encoder, states, counts)
    rest = {row: piece[0] for row, piece in enumerate(frames)}  # not decoded yet
    while rest:
        found = _search(model, list(rest.values()), [streams[row]._context for row in rest])
        for row, said in zip(list(rest), found, strict=True):
            stream = streams[row]
            read, is_over = stream._read(said)
            rest[row] = rest[row][read:]
            if is_over:
                ended[id(stream)] += stream._close()
            restarts = is_over and stream.reset_encoder
            if restarts or not len(rest[row]):
                # Frames that the encoder made of what it has to forget are made again.
                states[row].advance(counts[row] - len(rest.pop(row)), model.encoder)
            if restarts:
                states[row].restart(model.encoder)


def _search(model: Any, frames: Sequence[Tensor], contexts: Sequence[list[Tensor]]) -> list[Said]:
    """Finds the tokens of each frame of several recordings in one pass, without blanks."""
    lengths = [len(piece) for piece in frames]
    hidden = pad_sequence(list(frames), True)
    if hasattr(model, "predict"):
        return _transducer(model, hidden, lengths, contexts)
    logits = model.ctc_head(hidden)
    labels = logits.argmax(-1)
    sure = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    sure = sure.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    blank = model.config.pad_token_id
    found: list[Said] = []
    for row, probabilities, length in zip(labels.tolist(), sure.tolist(), lengths, strict=True):
        if any(map(math.isnan, probabilities[:length])):
            raise ValueError(DIVERGED)
        pairs = zip(row[:length], probabilities[:length], strict=True)
        found.append([[] if label == blank else [(label, probability)] for label, probability in pairs])
    return found


def _transducer(model: Any, hidden: Tensor, lengths: Sequence[int], contexts: Sequence[list[Tensor]]) -> list[Said]:
    """Runs `_search` for a Transducer, all recordings together."""
    own = [context or begin(model, hidden[:1]) for context in contexts]
    joined = [torch.cat(parts) for parts in zip(*own, strict=True)]
    rows = transducer_emissions(model, hidden, lengths, context=joined)
    found: list[Said] = []
    for row, (emissions, length) in enumerate(zip(rows, lengths, strict=True)):
        contexts[row][:] = [part[row : row + 1].clone() for part in joined]
        found.append([[] for _ in range(length)])
        for one in emissions:
            found[-1][one.start].append((one.token, one.confidence))
    return found
