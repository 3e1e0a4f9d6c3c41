"""Times of what is said: tokens with frames, words and segments made of them, utterances of a stream and their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

_ROUNDING = 1e-6  # times of a stream are whole numbers of frames, up to the rounding of floats


@dataclass(frozen=True)
class Emission:
    """One token that a search found, with its frames.

    Attributes:
        token: its id.
        start: its first frame.
        end: the frame after its last one.
        confidence: probability of the token, the mean over its frames.
        word: that begins with this token, if the search knows words by their pronunciation; else empty.
    """

    token: int
    start: int
    end: int
    confidence: float
    word: str = ""


@dataclass(frozen=True)
class Span:
    """A piece of text with its time.

    Attributes:
        text: what is said.
        start: where it begins: a frame, or seconds in a `Transcript`.
        end: where it ends, in the same unit.
        confidence: between 0 and 1; see `join_words` and `join_segments` for words and segments.
    """

    text: str
    start: float
    end: float
    confidence: float


def in_seconds(spans: Sequence[Span], frame: float) -> list[Span]:
    """Gives spans whose times are frames with times in seconds; a frame lasts `frame` seconds."""
    return [replace(one, start=one.start * frame, end=one.end * frame) for one in spans]


def join_words(pieces: Sequence[Span]) -> list[Span]:
    """Makes words of pieces of text, where a space in front of a piece begins a new word.

    Args:
        pieces: in their order, such as `ConformerTokenizer.spans` returns them.

    Returns:
        Words from the start of their first piece to the end of their last one. A word is as sure as its least sure
        piece; spaces do not count.

    Example:
        >>> from favor.models.speech import Span, join_words
        >>> [word.text for word in join_words([Span("GO", 0, 1, 0.9), Span("OD", 1, 2, 0.8), Span(" DAY", 4, 6, 0.9)])]
        ['GOOD', 'DAY']
    """
    words: list[list[Span]] = [[]]
    for piece in pieces:
        if piece.text.startswith(" "):
            words.append([])
        if piece.text.strip():
            words[-1].append(piece)
    return [_joined(word, "", min(piece.confidence for piece in word)) for word in words if word]


def join_segments(words: Sequence[Span], pause: float) -> list[Span]:
    """Makes segments of words: a longer pause than `pause` begins a new one.

    Args:
        words: in their order.
        pause: between the end of a word and the start of the next, in the unit of their times; at least 0.

    Returns:
        Segments with single spaces between their words. Their confidence is the mean of that of the words.

    Raises:
        ValueError: for a pause that is no number of at least 0.

    Example:
        >>> from favor.models.speech import Span, join_segments
        >>> words = [Span("GOOD", 0.0, 0.3, 0.9), Span("DAY", 0.4, 0.6, 0.7), Span("YES", 2.0, 2.2, 0.5)]
        >>> [segment.text for segment in join_segments(words, pause=0.5)]
        ['GOOD DAY', 'YES']
    """
    if math.isnan(pause) or pause < 0:
        raise ValueError(f"pause must be a number of at least 0, got {pause}.")
    segments: list[list[Span]] = []
    for word in words:
        if not segments or word.start - segments[-1][-1].end > pause:
            segments.append([])
        segments[-1].append(word)
    return [_joined(part, " ", sum(word.confidence for word in part) / len(part)) for part in segments]


def _joined(parts: Sequence[Span], between: str, confidence: float) -> Span:
    text = between.join(part.text.strip() for part in parts)
    return Span(text, parts[0].start, parts[-1].end, confidence)


@dataclass(frozen=True)
class Utterance:
    """A stretch of speech between two end points.

    Attributes:
        text: what is said.
        start: where its first word begins, in seconds since the stream began.
        end: where its last word ends.
        words: with times and confidences, as `model.transcribe(..., return_timestamps="word")` gives them.
    """

    text: str
    start: float
    end: float
    words: list[Span]


@dataclass(frozen=True)
class EndpointRules:
    """Rules that end an utterance: it is over at the first frame at which one of them holds.

    Silence is the run of frames at the end in which greedy search finds the blank. The names and defaults are those
    that are usual in online recognition (Kaldi, sherpa). None turns a rule off.

    Args:
        rule1_min_trailing_silence: seconds of silence that end an utterance without any token. It then has no text;
            decoding begins anew. Default 2.4.
        rule2_min_trailing_silence: seconds of silence that end an utterance with tokens. Default 1.2.
        rule3_min_utterance_length: seconds, silence in front included, after which an utterance ends even within a
            word. Default 20.

    Raises:
        ValueError: for times that are no numbers above 0.

    Example:
        >>> from favor.models.speech import EndpointRules
        >>> EndpointRules(rule2_min_trailing_silence=0.8).hold(silence=0.8, length=3.0, has_tokens=True)
        True
    """

    rule1_min_trailing_silence: float | None = 2.4
    rule2_min_trailing_silence: float | None = 1.2
    rule3_min_utterance_length: float | None = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} must be a number of seconds above 0, or None for no rule; got {value}.")

    def hold(self, silence: float, length: float, has_tokens: bool) -> bool:
        """Tells whether a rule holds, given the seconds since the last token and since the utterance began."""
        least = self.rule2_min_trailing_silence if has_tokens else self.rule1_min_trailing_silence
        pairs = ((silence, least), (length, self.rule3_min_utterance_length))
        return any(limit is not None and seconds >= limit - _ROUNDING for seconds, limit in pairs)
