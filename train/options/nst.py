r"""Noisy student training: a teacher transcribes unlabelled speech, and a student learns from all transcripts.

    accelerate launch -m favor.train.nst --teacher out/asr --generations 3 --keep .7 \
        --unlabelled_split train-clean-360 --data_dir LibriSpeech --train_split train-clean-100 \
        --eval_splits dev-clean --preset small --output_dir out/nst

Every other argument is one of `favor.train.asr`, for every student. A new student takes the tokenizer and the
features of its teacher. Generation 0 is the given teacher, or a model that is trained on the transcribed speech
alone. Generation g is trained on the transcribed speech and on pseudo-labels of generation g - 1 for the
untranscribed speech: hypotheses of a beam search without augmentation, those with the best score of confidence. Only
the student has noise: SpecAugment, changes of speed, dropout. After Park et al. 2020, arXiv:2005.09629, without its
balancing and gradual schedules. With `--language_model` the search of a CTC teacher scores words, and if its tokens
are phonemes it finds words by their pronunciations. With `--model_name_or_path` every student begins as that model:
so a model adapts to the voices of recordings that nobody has transcribed. If the untranscribed split has transcripts,
they are only used to report the error rate of the pseudo-labels.

In the output folder `nst.json` holds the results, and `gen_1` and so on hold the models. `--resume` continues a run
that was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from favor.train.common.arguments import check_positive, option
from favor.train.common.program import DataclassParser
from favor.train.speech import arguments as asr_arguments

NAME = "favor-nst"


@dataclass(kw_only=True)
class NstArguments:
    """Teacher, generations, untranscribed speech, and choice of the labels."""

    output_dir: str = field(metadata={"help": "Folder of all results."})
    teacher: str | None = option(
        None, "Folder of a model of favor.train.asr to be generation 0. Default: it is trained first."
    )
    generations: int = option(3, "Number of students, trained one after another.")
    unlabelled_dir: str | None = option(
        None, "Untranscribed speech: a corpus, a folder of audio, a manifest. Default: data_dir."
    )
    unlabelled_split: str | None = option(
        None, "Split of unlabelled_dir. Default: all of the folder, or its only manifest."
    )
    keep: float = option(1.0, "Fraction of the pseudo-labels to train on, those with the best scores.")
    threshold: float | None = option(
        None, "Train only on pseudo-labels with a score above this. Default: no threshold."
    )
    fit_split: str | None = option(
        None, "Transcribed split whose hypotheses the score is fitted on, as in the paper. Default: the pseudo-labels."
    )
    beam_size: int | None = option(
        None,
        "Hypotheses that the teacher's beam search keeps. Default: 8, but 50 with a language model, and 200 if the "
        "tokens are phonemes.",
    )
    language_model: str | None = option(
        None, "ARPA file or binary file of KenLM for the search of a CTC teacher; phonemes need one. Default: none."
    )
    lm_weight: float | None = option(None, "Weight of its log probability. Default: 0.5.")
    word_score: float | None = option(None, "Added for each word, with a language model. Default: 1.5.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        check_positive(self, "generations", "beam_size", "keep")
        if self.keep > 1:
            raise ValueError(f"keep must be a fraction of the pseudo-labels, at most 1, got {self.keep}")
        if self.language_model is None and (self.lm_weight, self.word_score) != (None, None):
            raise ValueError("lm_weight and word_score have no effect without language_model: add it or leave them out")
        if self.language_model is not None and not Path(self.language_model).is_file():
            raise ValueError(f"language_model must be a file, got {self.language_model}")


def parse_arguments(argv: list[str] | None) -> tuple[NstArguments, asr_arguments.Arguments, list[str]]:
    """Parses the arguments; returns those of this program, those of the trainings, and the latter as words.

    Raises:
        ValueError: for arguments that neither program knows or that cannot be used, before anything runs.
    """
    parser, of_students = DataclassParser(NAME, __doc__, [NstArguments]), asr_arguments.Arguments.parser(program=NAME)
    (nst,), rest = parser.parse_some(argv)
    groups, unknown = of_students.parse_some([*rest, "--output_dir", nst.output_dir])
    of_students.refuse(unknown, parser.options())
    student = asr_arguments.Arguments(*groups)
    source = nst.unlabelled_dir or student.data.data_dir
    if source is None or not Path(source).exists():
        raise ValueError(
            f"unlabelled_dir must be a folder or a manifest, got {source}: labels refer to files of audio, so "
            "write the audio of a dataset of the hub to files first"
        )
    if nst.unlabelled_dir is None and nst.unlabelled_split is None:
        raise ValueError("unlabelled_split must say which split of data_dir to label, or give unlabelled_dir")
    used = (nst.teacher, student.model.model_name_or_path, student.model.processor_name_or_path)
    inside = [path for path in used if path and Path(nst.output_dir).resolve() in Path(path).resolve().parents]
    if student.train.overwrite_output_dir and inside:
        raise ValueError(f"overwrite_output_dir would delete {inside[0]}: choose another output_dir")
    return nst, student, rest
