"""Command-line arguments of what a speech training minimises: the loss in chunks, and what a teacher adds."""

from __future__ import annotations

from dataclasses import dataclass

from favor.train.common.arguments import RunArguments, option


@dataclass(kw_only=True)
class ObjectiveArguments(RunArguments):
    """Chunks of a Conformer, and a Whisper that teaches it."""

    dynamic_chunk: float = option(
        0.0,
        "Fraction of the batches that a Conformer sees in chunks, so that it can stream too. Needs normalize none. "
        "Default 0: none.",
    )
    whisper_teacher: str | None = option(
        None,
        "Folder of a Whisper, or of CTC on its encoder, whose hidden states a Conformer also learns to predict.",
    )
    hidden_weight: float = option(1.0, "Weight of the error of these predictions in the loss, with a teacher.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        super().__post_init__()
        if not 0 <= self.dynamic_chunk <= 1:
            raise ValueError(f"dynamic_chunk must be from 0 to 1, got {self.dynamic_chunk}")
        if self.hidden_weight <= 0:
            raise ValueError(f"hidden_weight must be greater than 0, got {self.hidden_weight}")
        if self.whisper_teacher is None and self.hidden_weight != 1:
            raise ValueError("hidden_weight needs a teacher: add --whisper_teacher DIR")
