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

import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from transformers import WhisperForConditionalGeneration

from favor.models.speech import Pronunciations
from favor.models.whisper_ctc import WhisperForCTC
from favor.train.common import checkpoint, loop, report
from favor.train.common.arguments import DEFAULT_SEED
from favor.train.common.average import weight_average
from favor.train.common.lock import releases_locks
from favor.train.common.optimizers import adamw_groups
from favor.train.common.pretrained import check_model
from favor.train.common.program import program
from favor.train.speech.acoustics import Acoustics
from favor.train.speech.arguments import HUB, Arguments, SpeechTrainArguments
from favor.train.speech.data import Skipped, Utterance, check_lengths, join, long_enough
from favor.train.speech.lexicon import as_phonemes, run_lexicon
from favor.train.speech.loaders import make_acoustics, make_loaders
from favor.train.speech.model import make_model, make_processor
from favor.train.speech.objective import Objective
from favor.train.speech.sources import load_speech
from favor.train.speech.transcribe import transcribe
from favor.train.speech.whisper import LARGEST_RATE, fitting, normalizer
from favor.train.speech.word_errors import character_errors, word_errors


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-asr")


def load_data(
    arguments: Arguments, lexicon: Pronunciations | None = None
) -> tuple[list[Utterance], dict[str, list[Utterance]], dict[str, Skipped]]:
    """Loads the utterances to train on, those of each evaluation split, and a report on what each of them left out.

    With a lexicon the transcripts to train on are phonemes.
    """
    data, prepared = arguments.data, Path(arguments.train.output_dir) / "prepared"
    source, reports = data.data_dir or HUB, {}

    def load(place: str, split: str | None, name: str, limit: int | None) -> list[Utterance]:
        options = {"config": data.dataset_config_name, "max_bad": data.limit, "resample": data.resample}
        found, reports[name] = load_speech(place, split, prepared=prepared / name, **options)
        return (join(found, data.join_seconds) if data.join_seconds else found)[:limit]

    train = data.train_repeats * load(source, data.train_split, data.train_split, data.max_train_samples)
    for number, manifest in enumerate(data.extra_manifests):
        train += load(manifest, None, f"extra_{number}", None)
    evaluation = {split: load(source, split, split, data.max_eval_samples) for split in data.eval_splits}
    if lexicon is not None:
        train = as_phonemes(train, lexicon, reports[data.train_split])
    return train, evaluation, reports


def errors(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Computes word and character error rate in percent of (reference, hypothesis) pairs; less is better."""
    references, hypotheses = (list(side) for side in zip(*texts, strict=True))
    return {
        "wer": 100 * word_errors(references, hypotheses).rate,
        "cer": 100 * character_errors(references, hypotheses).rate,
    }


def evaluate(
    run: loop.Run,
    model: Any,
    loaders: dict[str, Any],
    evaluation: dict[str, list[Utterance]],
    tokenizer: Any,
    lexicon: Pronunciations | None = None,
) -> dict[str, Any]:
    """Measures the error rates of `model` with greedy search on each split.

    Args:
        run: the training, for its place in the history.
        model: whose weights are evaluated.
        loaders: batches of each split.
        evaluation: utterances of each split.
        tokenizer: that of the model.
        lexicon: makes words of phonemes. Default None: the tokens are not phonemes.
    """
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
        # Several processes may have seen the same utterance.
        hypotheses = dict(gather_object(found))
        pairs = [(evaluation[split][index].text, text) for index, text in sorted(hypotheses.items())]
        if isinstance(model, WhisperForConditionalGeneration):
            plain = normalizer(model, tokenizer)
            pairs = [(plain(said), plain(heard)) for said, heard in pairs]
        scores.update({f"{split}_{name}": value for name, value in errors(pairs).items()})
    return {"epoch": len(run.progress.history) + 1, "step": run.progress.step, "metrics": scores}


def usable(
    arguments: Arguments,
    data: tuple[list[Utterance], dict[str, list[Utterance]], dict[str, Skipped]],
    model: Any,
    processor: Any,
) -> tuple[list[Utterance], dict[str, list[Utterance]]]:
    """Selects the utterances that the model can be trained on, and those of each split that it can transcribe.

    Args:
        arguments: of the program.
        data: what `load_data` gave; its reports get the others.
        model: to be trained.
        processor: that of the model.
    """
    utterances, evaluation, reports = data
    speeds, skipped = arguments.data.speeds, reports[arguments.data.train_split]
    if isinstance(model, WhisperForConditionalGeneration):
        most = model.config.max_target_positions
        kept = fitting(utterances, processor, skipped, slowest=min(speeds), most=most)
        others = {s: fitting(part, processor, reports[s], slowest=1.0, most=None) for s, part in evaluation.items()}
        return kept, others
    ctc, outputs = getattr(model, "ctc_head", None) is not None, model.subsampled_lengths
    kept = check_lengths(utterances, processor, skipped, ctc=ctc, fastest=max(speeds), outputs=outputs)
    return kept, {split: long_enough(part, processor, reports[split], outputs) for split, part in evaluation.items()}


def parameter_groups(model: Any, train: SpeechTrainArguments) -> list[dict[str, Any]]:
    """Makes the parameter groups of the optimizer; the encoder may have a learning rate of its own.

    Raises:
        ValueError: for a rate of the encoder of a model that is trained as a whole, or one that destroys the encoder
            of a Whisper.
    """
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


def train_model(
    arguments: Arguments,
    data: tuple[list[Utterance], dict[str, list[Utterance]], dict[str, Skipped]],
    folder: Path,
    acoustics: Acoustics | None = None,
    lexicon: Pronunciations | None = None,
) -> dict[str, Any]:
    """Runs the whole training and saves the model and the processor in `folder`; returns the entries of the results.

    Args:
        arguments: of the program.
        data: what `load_data` gave.
        folder: where the run is.
        acoustics: what `make_acoustics` gave. Default None: no noise, no reverberation, no change of volume.
        lexicon: what `run_lexicon` gave. Default None: the tokens are not phonemes.
    """
    train, seed = arguments.train, DEFAULT_SEED if arguments.train.seed is None else arguments.train.seed
    accelerator = loop.make_accelerator(train, folder)
    utterances, _, reports = data
    processor = make_processor(arguments, utterances, lexicon)
    model = make_model(arguments, processor, seed)
    objective = Objective(accelerator, train, model, processor)
    utterances, evaluation = usable(arguments, data, model, processor)
    for name, skipped in reports.items():
        if skipped.reasons:
            accelerator.print(f"{name}: {skipped.describe()}")
    train_loader, eval_loaders = make_loaders(
        arguments, utterances, evaluation, processor, seed, acoustics, objective.extractor
    )
    groups = parameter_groups(model, train)
    if own := objective.own_parameters():
        groups += adamw_groups(own, train.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.98), fused=True)
    prepared = accelerator.prepare(objective.module, optimizer, train_loader)
    eval_loaders = {split: accelerator.prepare(loader) for split, loader in eval_loaders.items()}
    whole = accelerator.unwrap_model(prepared[0])
    average = weight_average(whole, train.ema_decay) if train.ema_decay else None
    clipped, others = list(whole.parameters()), {} if average is None else {"average": average}
    run = loop.start(accelerator, prepared, train, seed, folder, clipped, **others)
    run.loss = objective
    if average is not None:
        run.after_step = lambda: average.update_parameters(whole)
    bare, final = map(objective.model_in, (whole, whole if average is None else average.module))
    with loop.stoppable(run):
        last = train_and_evaluate(run, train, final, eval_loaders, evaluation, (processor.tokenizer, lexicon))
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, final, processor)
        if lexicon is not None:
            lexicon.save(folder)
        accelerator.print(report.load_line(final, folder))
    for tracker in accelerator.trackers:
        tracker.finish()
    seconds = {"train": sum(u.seconds or 0 for u in utterances)}
    seconds |= {split: sum(u.seconds or 0 for u in part) for split, part in evaluation.items()}
    return {
        "seed": seed,
        "metrics": last["metrics"],
        "train_loss": run.progress.loss_sum / run.progress.step,
        "steps": run.progress.step,
        "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
        "peak_memory_bytes": report.peak_memory(accelerator.device),
        "history": run.progress.history,
        "attn_implementation": bare.config._attn_implementation,
        "favor": getattr(bare.config, "favor_parts", None) or getattr(bare.config, "favor", None),
        "parameters": bare.num_parameters(),
        "mixed_precision": accelerator.mixed_precision,
        "device": str(accelerator.device.type),
        "hours": {name: round(value / 3600, 4) for name, value in seconds.items()},
        "utterances": {"train": len(utterances), **{split: len(part) for split, part in evaluation.items()}},
        "skipped": {name: skipped.reasons for name, skipped in reports.items()},
    }


def train_and_evaluate(
    run: loop.Run,
    arguments: SpeechTrainArguments,
    model: Any,
    loaders: dict[str, Any],
    evaluation: dict[str, list[Utterance]],
    writing: tuple[Any, Pronunciations | None],
) -> dict[str, Any]:
    """Runs all epochs; returns the last entry of the history.

    Args:
        run: the training.
        arguments: how often to evaluate.
        model: whose weights are evaluated.
        loaders: batches of each split.
        evaluation: utterances of each split.
        writing: tokenizer of the model, and the lexicon if its tokens are phonemes.
    """
    accelerator, progress, last_epoch = run.accelerator, run.progress, -(-run.total_steps // run.steps_per_epoch)
    for epoch in loop.epochs(run, arguments):
        if epoch % arguments.eval_epochs and epoch < last_epoch:
            progress.history.append({"epoch": epoch, "step": progress.step})
            continue
        so_far = {"train_loss": progress.loss_sum / progress.step}
        progress.history.append(evaluate(run, model, loaders, evaluation, *writing) | so_far)
        metrics = progress.history[-1]["metrics"]
        accelerator.log(metrics, step=progress.step)
        accelerator.print(f"\nepoch {epoch}, step {progress.step}: {report.describe(metrics)}")
    return progress.history[-1]


@releases_locks
def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and returns what `all_results.json` holds.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.

    Raises:
        ValueError: for arguments, files or transcripts that cannot be used; the message says which and why.
        FloatingPointError: if the loss is not finite.
    """
    arguments = parse_arguments(argv)
    train, folder = arguments.train, Path(arguments.train.output_dir)
    accelerator = Accelerator(mixed_precision=train.mixed_precision)
    if not accelerator.is_local_main_process:
        transformers.utils.logging.set_verbosity_error()
    settings = arguments.settings(accelerator.num_processes)
    checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir)
    for path in (arguments.model.model_name_or_path, arguments.model.processor_name_or_path):
        check_model(path)
    acoustics, lexicon = make_acoustics(arguments.data), run_lexicon(arguments)
    with accelerator.main_process_first():
        data = load_data(arguments, lexicon)
    hours = sum(utterance.seconds or 0 for utterance in data[0]) / 3600
    accelerator.print(f"{len(data[0])} utterances to train on, {hours:.2f} hours")
    if accelerator.is_main_process:
        checkpoint.start_run(folder, settings, train.overwrite_output_dir)
    accelerator.wait_for_everyone()
    results = train_model(arguments, data, folder, acoustics, lexicon) | {
        "arguments": arguments.to_dict(),
        "command": shlex.join(["python", "-m", "favor.train.asr", *(sys.argv[1:] if argv is None else argv)]),
        "num_processes": accelerator.num_processes,
        "versions": report.versions(),
    }
    if accelerator.is_main_process:
        checkpoint.write_json(folder / checkpoint.RESULTS, results)
    # The next program in these processes may read the folder.
    accelerator.wait_for_everyone()
    accelerator.print(f"{report.describe(results['metrics'])}; {folder / checkpoint.RESULTS}")
    return results


def start() -> None:
    """Runs the program and ends its processes."""
    main()
    # Not in `main`: several trainings may follow one another in the processes of one launch.
    Accelerator().end_training()


cli = program("favor-asr", start)

if __name__ == "__main__":
    cli()
