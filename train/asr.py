r"""Train a Conformer to recognise speech, by CTC, Transducer or both, or a Whisper, with exact or FAVOR attention.

    accelerate launch -m favor.train.asr --data_dir LibriSpeech --train_split train-clean-100 --eval_splits dev-clean \
        --preset small --architecture ctc --attn_implementation favor# --num_features 128 --output_dir out/asr

With `--model_name_or_path` and the folder of a Whisper, that model is fine-tuned; a FAVOR backend then replaces the
attention of its encoder alone. With `--architecture ctc` its encoder gets a new CTC head instead. Without `--data_dir`
the corpus comes from the hub (`openslr/librispeech_asr`). The output folder gets the model (the average of the weights,
with `--ema_decay`), its processor and `all_results.json`. `accelerate launch` decides whether the program runs on a
CPU, one GPU or several.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from transformers import WhisperForConditionalGeneration

from favor.models.conformer.modeling_conformer import ConformerPreTrainedModel
from favor.models.speech import Pronunciations
from favor.models.whisper_ctc import WhisperForCTC
from favor.train.common import checkpoint, loop
from favor.train.common.arguments import DEFAULT_SEED
from favor.train.common.lock import releases_locks
from favor.train.common.pieces import Pieces, check_attention
from favor.train.common.pretrained import adamw_groups
from favor.train.common.program import describe, load_line, of_program, of_training, program
from favor.train.speech.arguments import HUB, Arguments, SpeechTrainArguments
from favor.train.speech.augment import Acoustics
from favor.train.speech.batches import fitting
from favor.train.speech.data import Skipped, Utterance, check_lengths, join, long_enough
from favor.train.speech.loaders import make_acoustics, make_loaders
from favor.train.speech.model import LARGEST_RATE, as_phonemes, make_model, make_processor, run_lexicon
from favor.train.speech.objective import Objective
from favor.train.speech.sources import load_speech
from favor.train.speech.transcribe import normalizer, transcribe
from favor.train.speech.word_errors import character_errors, word_errors
from favor_command.saved import check_model


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-asr")


class Speech(NamedTuple):
    """The utterances to train on, those of each evaluation split, and a report on what each part left out."""

    train: list[Utterance]
    evaluation: dict[str, list[Utterance]]
    reports: dict[str, Skipped]


def _load_data(arguments: Arguments, lexicon: Pronunciations | None) -> Speech:
    """Loads all utterances; with a lexicon the transcripts to train on are phonemes."""
    data, prepared = arguments.data, Path(arguments.train.output_dir) / "prepared"
    source, reports = data.data_dir or HUB, {}

    def load(place: str, split: str | None, name: str, limit: int | None) -> list[Utterance]:
        found, reports[name] = load_speech(place, split, prepared=prepared / name, max_bad=data.limit)
        return (join(found, data.join_seconds) if data.join_seconds else found)[:limit]

    train = load(source, data.train_split, data.train_split, data.max_train_samples)
    for number, manifest in enumerate(data.extra_manifests):
        train += load(manifest, None, f"extra_{number}", None)
    evaluation = {split: load(source, split, split, data.max_eval_samples) for split in data.eval_splits}
    if lexicon is not None:
        train = as_phonemes(train, lexicon, reports[data.train_split])
    return Speech(train, evaluation, reports)


def errors(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Computes word and character error rate in percent of (reference, hypothesis) pairs; less is better."""
    references, hypotheses = (list(side) for side in zip(*texts, strict=True))
    return {
        "wer": 100 * word_errors(references, hypotheses).rate,
        "cer": 100 * character_errors(references, hypotheses).rate,
    }


def _evaluate(
    model: Any, loaders: dict[str, Any], evaluation: dict[str, list[Utterance]], tokenizer: Any, lexicon: Any
) -> dict[str, float]:
    """Measures the error rates of a model with greedy search on each split."""
    model.eval()
    # Each process has its own statistics of batch normalisation; those of the first are saved.
    for buffer in model.buffers():
        buffer.copy_(broadcast(buffer))
    scores: dict[str, float] = {}
    for split, loader in loaders.items():
        found: list[tuple[int, str]] = []
        for batch in loader:
            indices = batch.pop("index").tolist()
            found += zip(indices, transcribe(model, batch, tokenizer, lexicon=lexicon), strict=True)
        hypotheses = dict(gather_object(found))  # several processes may have seen the same utterance
        pairs = [(evaluation[split][index].text, text) for index, text in sorted(hypotheses.items())]
        if isinstance(model, WhisperForConditionalGeneration):
            plain = normalizer(model, tokenizer)
            pairs = [(plain(said), plain(heard)) for said, heard in pairs]
        scores.update({f"{split}_{name}": value for name, value in errors(pairs).items()})
    return scores


def _usable(arguments: Arguments, speech: Speech, model: Any, processor: Any) -> Speech:
    """Selects the utterances that the model can be trained on, and those of each split that it can transcribe."""
    utterances, evaluation, reports = speech
    speeds, skipped = arguments.data.speeds, reports[arguments.data.train_split]
    if isinstance(model, WhisperForConditionalGeneration):
        most = model.config.max_target_positions
        kept = fitting(utterances, processor, skipped, slowest=min(speeds), most=most)
        others = {s: fitting(part, processor, reports[s], slowest=1.0, most=None) for s, part in evaluation.items()}
        return Speech(kept, others, reports)
    ctc, outputs = getattr(model, "ctc_head", None) is not None, model.subsampled_lengths
    kept = check_lengths(utterances, processor, skipped, ctc=ctc, fastest=max(speeds), outputs=outputs)
    others = {split: long_enough(part, processor, reports[split], outputs) for split, part in evaluation.items()}
    return Speech(kept, others, reports)


def _parameter_groups(model: Any, train: SpeechTrainArguments) -> list[dict[str, Any]]:
    """Makes the parameter groups of the optimizer; the encoder may have a learning rate of its own."""
    rate = train.learning_rate if train.encoder_learning_rate is None else train.encoder_learning_rate
    if isinstance(model, WhisperForCTC) and rate > LARGEST_RATE:
        raise ValueError(
            f"a learning rate of {rate:g} destroys the pretrained encoder: add --encoder_learning_rate 2e-4"
        )
    if train.encoder_learning_rate is None:
        return adamw_groups(model.parameters(), train.weight_decay)
    if isinstance(model, WhisperForConditionalGeneration):
        raise ValueError("encoder_learning_rate is for CTC and Transducer: leave it out for a Whisper")
    parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts[name.startswith("encoder.")].append(parameter)
    if train.encoder_learning_rate == 0:
        model.encoder.requires_grad_(False)
        return adamw_groups(parts[False], train.weight_decay)
    groups = [{**own, "lr": train.encoder_learning_rate} for own in adamw_groups(parts[True], train.weight_decay)]
    return groups + adamw_groups(parts[False], train.weight_decay)


def make_pieces(accelerator: Accelerator, model: Any, size: int) -> Pieces:
    """Makes the groups of processes that cut recordings; raises ValueError for a model that takes no pieces."""
    if size > 1 and not isinstance(model, ConformerPreTrainedModel):
        raise ValueError(f"sequence_parallel {size} is for Conformers; a Whisper hears half a minute: leave it out")
    check_attention(model, size)
    return Pieces(accelerator, size)


def _train_model(
    arguments: Arguments, speech: Speech, acoustics: Acoustics | None, lexicon: Pronunciations | None
) -> dict[str, Any]:
    """Runs the whole training and saves the model and the processor; returns the entries of the results."""
    train, folder = arguments.train, Path(arguments.train.output_dir)
    seed = DEFAULT_SEED if train.seed is None else train.seed
    accelerator = loop.make_accelerator(train)
    processor = make_processor(arguments, speech.train, lexicon)
    model = make_model(arguments, processor, seed)
    pieces = make_pieces(accelerator, model, train.sequence_parallel)
    objective = Objective(accelerator, train, model, processor)
    utterances, evaluation, reports = _usable(arguments, speech, model, processor)
    for name, skipped in reports.items():
        if skipped.reasons:
            accelerator.print(f"{name}: {skipped.describe()}")
    train_loader, eval_loaders = make_loaders(
        arguments, utterances, evaluation, processor, seed, acoustics, objective.extractor
    )
    groups = _parameter_groups(model, train)
    if objective.teacher is not None:
        groups += adamw_groups(objective.module.projection.parameters(), train.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.98), fused=True)
    prepared = (*accelerator.prepare(objective.module, optimizer), pieces.prepare(train_loader))
    eval_loaders = {split: pieces.prepare(loader) for split, loader in eval_loaders.items()}
    clipped = list(accelerator.unwrap_model(prepared[0]).parameters())
    run = loop.start(accelerator, prepared, train, seed, folder, clipped, train.ema_decay, pieces)
    run.loss, progress, final = objective, run.progress, objective.model_in(run.trained)
    with loop.stoppable(run):
        for epoch in loop.epochs(run):
            with pieces.attention():
                metrics = _evaluate(final, eval_loaders, evaluation, processor.tokenizer, lexicon)
            entry = {"epoch": epoch, "step": progress.step, "metrics": metrics}
            progress.history.append(entry | {"train_loss": statistics.fmean(progress.losses)})
            accelerator.print(f"\nepoch {epoch}, step {progress.step}: {describe(metrics)}")
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, final, processor)
        if lexicon is not None:
            lexicon.save(folder)
        accelerator.print(load_line(final, folder))
    parts = {"train": utterances, **evaluation}
    return of_training(run, final) | {
        "seed": seed,
        "metrics": progress.history[-1]["metrics"],
        "parameters": final.num_parameters(),
        "device": str(accelerator.device.type),
        "hours": {name: round(sum(u.seconds or 0 for u in part) / 3600, 4) for name, part in parts.items()},
        "utterances": {name: len(part) for name, part in parts.items()},
        "skipped": {name: skipped.reasons for name, skipped in reports.items()},
    }


@releases_locks
def main(argv: list[str] | None = None, processor: str | None = None) -> dict[str, Any]:
    """Trains and returns what `all_results.json` holds.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.
        processor: folder whose tokenizer and features a new model takes. Default None: new ones.

    Raises:
        ValueError: for arguments, files or transcripts that cannot be used; the message says which and why.
        FloatingPointError: if the loss is not finite.
    """
    arguments = parse_arguments(argv)
    arguments.processor = processor
    train, folder = arguments.train, Path(arguments.train.output_dir)
    accelerator = Accelerator(mixed_precision=train.mixed_precision)
    if not accelerator.is_local_main_process:
        transformers.utils.logging.set_verbosity_error()
    settings = arguments.settings(accelerator.num_processes)
    checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir)
    check_model(arguments.model.model_name_or_path)
    acoustics, lexicon = make_acoustics(arguments.data), run_lexicon(arguments)
    with accelerator.main_process_first():
        speech = _load_data(arguments, lexicon)
    hours = sum(utterance.seconds or 0 for utterance in speech.train) / 3600
    accelerator.print(f"{len(speech.train)} utterances to train on, {hours:.2f} hours")
    checkpoint.start_run(folder, settings, train.overwrite_output_dir)
    results = _train_model(arguments, speech, acoustics, lexicon)
    results |= of_program("favor.train.asr", argv, arguments.to_dict())
    if accelerator.is_main_process:
        checkpoint.write_json(folder / checkpoint.RESULTS, results)
    accelerator.wait_for_everyone()  # the next program in these processes may read the folder
    accelerator.print(f"{describe(results['metrics'])}; {folder / checkpoint.RESULTS}")
    return results


def start() -> None:
    """Runs the program and ends its processes."""
    main()
    # Not in `main`: several trainings may follow one another in the processes of one launch.
    Accelerator().end_training()


cli = program("favor-asr", start, several=True)

if __name__ == "__main__":
    cli()
