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

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from favor.models.speech import ConformerProcessor
from favor.models.speech.pronunciations import lexicon_of
from favor.models.speech.word_beam import searched_words
from favor.train import asr
from favor.train.common import checkpoint
from favor.train.common.arguments import Checked, option, refuse
from favor.train.common.lock import releases_locks
from favor.train.common.program import DataclassParser, of_program, program
from favor.train.speech.arguments import Arguments
from favor.train.speech.data import Utterance
from favor.train.speech.model import CLASSES, architecture_of, saved_architecture
from favor.train.speech.pseudo_labels import (
    PseudoLabel,
    check_files,
    collect,
    fingerprint,
    label,
    remove_labels,
    select,
    write_manifest,
)
from favor.train.speech.sources import load_speech
from favor_command.saved import check_model, load_model, load_processor, read_config

NAME = "favor-nst"
RESULTS, CHOICE, MANIFEST = "nst.json", "pseudo_labels.json", "pseudo_labels.jsonl"
LABELS = "labels"  # folder of a generation


@dataclass(kw_only=True)
class NstArguments(Checked):
    """Teacher, generations, untranscribed speech, and choice of the labels."""

    output_dir: str = option(MISSING, "Folder of all results.")
    teacher: str | None = option(
        None, "Folder of a model of favor.train.asr to be generation 0. Default: it is trained first."
    )
    generations: int = option(3, "Number of students, trained one after another.", above=0)
    unlabelled_dir: str | None = option(
        None, "Untranscribed speech: a corpus, a folder of audio, a manifest. Default: data_dir."
    )
    unlabelled_split: str | None = option(
        None, "Split of unlabelled_dir. Default: all of the folder, or its only manifest."
    )
    keep: float = option(1.0, "Fraction of the pseudo-labels to train on, those with the best scores.", above=0, most=1)
    beam_size: int | None = option(
        None,
        "Hypotheses that the teacher's beam search keeps. Default: 8, but 50 with a language model, and 200 if the "
        "tokens are phonemes.",
        above=0,
    )
    language_model: str | None = option(
        None, "ARPA file or binary file of KenLM for the search of a CTC teacher; phonemes need one. Default: none."
    )
    lm_weight: float | None = option(None, "Weight of its log probability. Default: 0.5.")
    word_score: float | None = option(None, "Added for each word, with a language model. Default: 1.5.")

    def __post_init__(self) -> None:
        super().__post_init__()
        model, weighted = self.language_model, (self.lm_weight, self.word_score) != (None, None)
        refuse(
            (
                model is None and weighted,
                "lm_weight and word_score have no effect without language_model: add it or leave them out",
            ),
            (model is not None and not Path(model).is_file(), f"language_model must be a file, got {model}"),
        )


def parse_arguments(argv: list[str] | None) -> tuple[NstArguments, Arguments, list[str]]:
    """Parses the arguments; returns those of this program, those of the trainings, and the latter as words.

    Raises:
        ValueError: for arguments that neither program knows or that cannot be used, before anything runs.
    """
    parser, of_students = DataclassParser(NAME, __doc__, [NstArguments]), Arguments.parser(program=NAME)
    (nst,), rest = parser.parse_some(argv)
    groups, unknown = of_students.parse_some([*rest, "--output_dir", nst.output_dir])
    of_students.refuse(unknown, parser.options())
    student = Arguments(*groups)
    source = nst.unlabelled_dir or student.data.data_dir
    if source is None or not Path(source).exists():
        raise ValueError(
            f"unlabelled_dir must be a folder or a manifest, got {source}: labels refer to files of audio, so "
            "write the audio of a dataset of the hub to files first"
        )
    if nst.unlabelled_dir is None and nst.unlabelled_split is None:
        raise ValueError("unlabelled_split must say which split of data_dir to label, or give unlabelled_dir")
    used = (nst.teacher, student.model.model_name_or_path)
    inside = [path for path in used if path and Path(nst.output_dir).resolve() in Path(path).resolve().parents]
    if student.train.overwrite_output_dir and inside:
        raise ValueError(f"overwrite_output_dir would delete {inside[0]}: choose another output_dir")
    return nst, student, rest


@dataclass
class _Task:
    """Holds what all generations share.

    `nst` and `student` are the arguments of this program and those of `favor.train.asr`, which `rest` has as words. The
    speech has no transcripts; `references` are those by id, of the utterances that have one, for reports alone.
    """

    nst: NstArguments
    student: Arguments
    rest: list[str]
    accelerator: Accelerator
    folder: Path
    unlabelled: list[Utterance]
    references: dict[str, str]


def _open_folder(nst: NstArguments, student: Arguments, accelerator: Accelerator) -> None:
    """Makes sure that the run may write to its folder, as `checkpoint.open_run`, and records its settings there."""
    folder, free = Path(nst.output_dir), ("output_dir", "generations")
    settings = {name: value for name, value in asdict(nst).items() if name not in free}
    settings |= student.settings(accelerator.num_processes)
    there, train = (folder / checkpoint.SETTINGS).exists(), student.train
    checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir, there=there)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and train.overwrite_output_dir:
        _clear(folder)
    checkpoint.start_run(folder, settings, overwrite=False)


def _clear(folder: Path) -> None:
    """Removes what a run made that a new one would take for its own: results, checkpoints and labels."""
    (folder / RESULTS).unlink(missing_ok=True)
    for old in folder.glob("gen_*"):
        if re.fullmatch(r"gen_\d+", old.name):
            checkpoint.clear(old)
            if (old / checkpoint.SETTINGS).exists():
                (old / checkpoint.RESULTS).unlink(missing_ok=True)
            remove_labels(old / LABELS)


def _load(nst: NstArguments, student: Arguments, rest: list[str], accelerator: Accelerator) -> _Task:
    """Loads the speech to label, and keeps its transcripts apart."""
    data, folder = student.data, Path(nst.output_dir)
    source, prepared = nst.unlabelled_dir or data.data_dir or "", folder / "prepared" / "unlabelled"
    with accelerator.main_process_first():
        found, skipped = load_speech(
            source, nst.unlabelled_split, prepared=prepared, transcripts=False, max_bad=data.limit
        )
    check_files(found)  # before the first teacher is trained
    if skipped.reasons:
        accelerator.print(f"unlabelled: {skipped.describe()}")
    references = {utterance.id: utterance.text for utterance in found if utterance.text}
    unlabelled = [dataclasses.replace(utterance, text="") for utterance in found]
    return _Task(nst, student, rest, accelerator, folder, unlabelled, references)


def _load_teacher(folder: Path, accelerator: Accelerator) -> tuple[Any, ConformerProcessor]:
    """Loads a saved model, in evaluation mode on this process's device, and its processor."""
    config = read_config(str(folder))
    found = saved_architecture(config)
    if found is None:
        kinds = ", ".join(kind.__name__ for kinds in CLASSES.values() for kind in kinds.values())
        name = (config.architectures or ["none"])[0]
        raise ValueError(f"teacher must be one of {kinds}, got {name} in {folder}")
    model: Any = load_model(CLASSES[config.model_type][found], str(folder), use_safetensors=True)
    return model.to(accelerator.device).eval(), load_processor(str(folder), ConformerProcessor)


def _label_all(task: _Task, teacher: Path, folder: Path) -> ConformerProcessor:
    """Labels the speech, all processes together, into folders of a generation; returns the teacher's processor."""
    accelerator, nst, student = task.accelerator, task.nst, task.student
    model, processor = _load_teacher(teacher, accelerator)
    lexicon, identity = lexicon_of(None, teacher), fingerprint(teacher)
    if lexicon is not None and nst.language_model is None:
        raise ValueError(f"the tokens of {teacher} are phonemes: add --language_model, whose words are its labels")
    options = {"language_model": nst.language_model, "lm_weight": nst.lm_weight, "word_score": nst.word_score}
    scorer = searched_words(model, processor.tokenizer, nst.beam_size, lexicon=lexicon, **options)
    if scorer is not None:
        identity += f", {nst.language_model}, {nst.lm_weight}, {nst.word_score}"
    label(
        model,
        processor,
        task.unlabelled,
        folder / LABELS,
        teacher=identity,
        beam_size=nst.beam_size or (8 if scorer is None else scorer.beam_size),
        scorer=scorer,
        max_batch_seconds=student.train.per_device_train_batch_seconds,
        num_workers=student.data.dataloader_num_workers,
        shard=(accelerator.process_index, accelerator.num_processes),
    )
    accelerator.wait_for_everyone()
    return processor


def _choose(task: _Task, teacher: Path, folder: Path) -> None:
    """Labels the speech, filters the labels, and writes a manifest and a report into a generation's folder."""
    processor, own = _label_all(task, teacher, folder), task.student.model.model_name_or_path
    processor = processor if own is None else load_processor(own, ConformerProcessor)
    if task.accelerator.is_main_process:
        labels = collect(task.unlabelled, folder / LABELS)
        model, data, train = task.student.model, task.student.data, task.student.train
        selection = select(
            labels,
            processor,
            keep=task.nst.keep,
            ctc=architecture_of(model) == "ctc" or model.ctc_weight > 0,
            fastest=max(data.speeds),
            max_seconds=train.per_device_train_batch_seconds * min(data.speeds),
            lexicon=lexicon_of(data.lexicon, own or teacher),
        )
        write_manifest(selection.kept, folder / MANIFEST)
        choice = {
            "labelled": len(labels),
            "kept": len(selection.kept),
            "kept_hours": round(sum(one.seconds for one in selection.kept) / 3600, 4),
            "dropped": selection.counts(),
            "fit": asdict(selection.fit),
            "errors": _compare(labels, task.references),
            "kept_errors": _compare(selection.kept, task.references),
        }
        checkpoint.write_json(folder / CHOICE, choice)
    task.accelerator.wait_for_everyone()


def _compare(labels: Sequence[PseudoLabel], references: dict[str, str]) -> dict[str, float] | None:
    """Computes error rates in percent of the labels that have a transcript; None if no label has one."""
    pairs = [(references[one.id], one.text) for one in labels if one.id in references]
    return asr.errors(pairs) if pairs else None


def _train(task: _Task, folder: Path, words: Sequence[str], processor: Path | None = None) -> dict[str, Any]:
    """Trains in a folder, and returns the results; a finished training is only read."""
    done = folder / checkpoint.RESULTS
    found = checkpoint.read_json(done) if done.exists() else None
    task.accelerator.wait_for_everyone()  # nobody writes before all have looked
    if found is None:
        found = asr.main([*words, "--output_dir", str(folder)], processor and str(processor))
        task.accelerator.free_memory()
    return found


def _generation(task: _Task, number: int, teacher: Path) -> dict[str, Any]:
    """Makes one student: labels by the teacher, then training; returns the student's entry of the results."""
    folder = task.folder / f"gen_{number}"
    if not (folder / checkpoint.RESULTS).exists():
        task.accelerator.print(f"\ngeneration {number}: {teacher} labels {len(task.unlabelled)} utterances")
        _choose(task, teacher, folder)
    manifests = [*task.student.data.extra_manifests, str(folder / MANIFEST)]
    # A new student takes the tokenizer and the features of its teacher.
    processor = teacher if task.student.model.model_name_or_path is None else None
    results = _train(task, folder, [*task.rest, "--extra_manifests", *manifests], processor)
    choice = checkpoint.read_json(folder / CHOICE)
    return _entry(number, folder, results) | {"teacher": str(teacher), "pseudo_labels": choice}


def _entry(number: int, folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Gives the values that the results hold of every generation."""
    kept = {name: results.get(name) for name in ("metrics", "utterances", "hours", "steps")}
    return {"generation": number, "folder": str(folder), **kept}


def _first_generation(task: _Task) -> tuple[Path, dict[str, Any]]:
    """Finds the folder of the first teacher, given or trained here, and its entry of the results."""
    if task.nst.teacher is None:
        folder = task.folder / "gen_0"
        return folder, _entry(0, folder, _train(task, folder, task.rest))
    folder = Path(task.nst.teacher)
    results = folder / checkpoint.RESULTS
    return folder, _entry(0, folder, checkpoint.read_json(results) if results.exists() else {})


def _table(generations: Sequence[dict[str, Any]]) -> str:
    """Makes a table with a line per generation: numbers of pseudo-labels and error rates of labels and of the model."""
    names = list(dict.fromkeys(name for one in generations for name in one["metrics"] or ()))
    rows = [["generation", "labelled", "kept", "dropped", "pseudo-label wer", "of those kept", *names]]
    for one in generations:
        choice = one.get("pseudo_labels") or {}
        counts = [choice.get("labelled"), choice.get("kept"), sum(choice["dropped"].values()) if choice else None]
        rates = [(choice.get(key) or {}).get("wer") for key in ("errors", "kept_errors")]
        rates += [(one["metrics"] or {}).get(name) for name in names]
        cells = [str(one["generation"]), *("-" if count is None else str(count) for count in counts)]
        rows.append(cells + ["-" if rate is None else f"{rate:.2f}" for rate in rates])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@releases_locks
def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains all generations; returns what `nst.json` holds.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.

    Raises:
        ValueError: for arguments or speech that cannot be used, or if no label of a teacher is left.
    """
    nst, student, rest = parse_arguments(argv)
    for path in (nst.teacher, student.model.model_name_or_path):
        check_model(path)
    if nst.teacher is not None:
        fingerprint(nst.teacher)
    accelerator = Accelerator(mixed_precision=student.train.mixed_precision)
    _open_folder(nst, student, accelerator)
    task = _load(nst, student, rest, accelerator)
    teacher, first = _first_generation(task)
    generations = [first]
    for number in range(1, nst.generations + 1):
        generations.append(_generation(task, number, teacher))
        teacher = Path(generations[-1]["folder"])
    results = of_program("favor.train.nst", argv, student.to_dict() | asdict(nst)) | {"generations": generations}
    if accelerator.is_main_process:
        checkpoint.write_json(task.folder / RESULTS, results)
    accelerator.print(f"\n{_table(generations)}\n{task.folder / RESULTS}")
    accelerator.end_training()
    return results


cli = program(NAME, main, several=True)

if __name__ == "__main__":
    cli()
