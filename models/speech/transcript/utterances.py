"""Utterances of a stream, and the rules by which one is over."""

from __future__ import annotations

from dataclasses import dataclass, fields

from favor.models.speech.transcript.spans import Span

# Times are whole numbers of frames, up to the rounding of floats.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Utterance:
    """A stretch of speech between two end points.

    Attributes:
        text: what is said.
        start: where its first word begins, in seconds since the stream began.
        end: where its last word ends.
        words: with times and confidences, as `model.transcribe(..., return_timestamps="word")` gives them.

    Example:
        >>> from favor.models.speech import Span, Utterance
        >>> Utterance(text="YES", start=0.4, end=0.6, words=[Span("YES", 0.4, 0.6, 0.9)]).words[0].confidence
        0.9
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
        """Checks the values."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} must be a number of seconds above 0, or None for no rule; got {value}.")

    def hold(self, silence: float, length: float, has_tokens: bool) -> bool:
        """Tells whether a rule holds.

        Args:
            silence: seconds since the last token.
            length: seconds since the utterance began.
            has_tokens: whether there is a token in it.
        """
        least = self.rule2_min_trailing_silence if has_tokens else self.rule1_min_trailing_silence
        pairs = ((silence, least), (length, self.rule3_min_utterance_length))
        return any(limit is not None and seconds >= limit - _ROUNDING for seconds, limit in pairs)
