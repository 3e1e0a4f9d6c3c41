r"""Noisy student training: a teacher transcribes speech without transcripts, a student is trained on both.

    accelerate launch -m favor.train.nst --teacher out/asr --generations 3 --keep .7 \
        --unlabelled_split train-clean-360 --data_dir LibriSpeech --train_split train-clean-100 \
        --eval_splits dev-clean --preset small --output_dir out/nst

Arguments that are not listed here are those of `favor.train.asr`, for every student; a new student takes the tokenizer
and the features of its teacher. Generation 0 is the teacher given, or else trained on the transcribed speech alone.
Generation g is trained on that and on what generation g - 1 made of the other: hypotheses of a beam search without
augmentation, the best by a score of confidence. The noise is the student's: SpecAugment, changes of speed, dropout.
After Park et al. 2020, arXiv:2005.09629, without its language model, balancing and gradual schedules. Transcripts that
the untranscribed split happens to have are only used to report the error rate of the pseudo-labels.

`nst.json` in the output folder holds the results, `gen_1` and so on the models. `--resume` goes on after a kill.
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
    """Teacher, generations, untranscribed speech, and which labels are kept."""

    output_dir: str = field(metadata={"help": "Folder of all results."})
    teacher: str | None = option(
        None, "Folder of favor.train.asr's model that is generation 0. Default: it is trained first."
    )
    generations: int = option(3, "Students, trained one after another.")
    unlabelled_dir: str | None = option(
        None, "Untranscribed speech: a corpus, a folder of audio, a manifest. Default: data_dir."
    )
    unlabelled_split: str | None = option(None, "Split of it. Default: all of the folder, or its only manifest.")
    keep: float = option(1.0, "Best part of the pseudo-labels to train on, by score.")
    threshold: float | None = option(None, "Only those with a score above this. Default: no threshold.")
    fit_split: str | None = option(
        None, "Transcribed split whose hypotheses the score is fitted on, as in the paper. Default: the pseudo-labels."
    )
    beam_size: int = option(8, "Hypotheses of the search that labels.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        check_positive(self, "generations", "beam_size", "keep")
        if self.keep > 1:
            raise ValueError(f"keep must be a part of the pseudo-labels, at most 1, got {self.keep}")


def parse_arguments(argv: list[str] | None) -> tuple[NstArguments, asr_arguments.Arguments, list[str]]:
    """The arguments of this program, those of the trainings, and the latter as words.

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
            "write that of a dataset of the hub to files first"
        )
    if nst.unlabelled_dir is None and nst.unlabelled_split is None:
        raise ValueError("unlabelled_split must say which split of data_dir to label, or give unlabelled_dir")
    used = (nst.teacher, student.model.model_name_or_path, student.model.processor_name_or_path)
    inside = [path for path in used if path and Path(nst.output_dir).resolve() in Path(path).resolve().parents]
    if student.train.overwrite_output_dir and inside:
        raise ValueError(f"overwrite_output_dir would delete {inside[0]}: choose another output_dir")
    return nst, student, rest
