"""The model and the processor at the start of a speech training: new ones, or those of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, WhisperProcessor

import favor
from favor.models.conformer import (
    ConformerConfig,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
    ConformerProcessor,
    train_tokenizer,
)
from favor.train.speech.arguments import Arguments, SpeechModelArguments
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.whisper import make_whisper

MODELS = {"ctc": ConformerForCTC, "transducer": ConformerForTransducer}
MEASURED = 200
_OF_NEW_MODELS = ("preset", "processor_name_or_path", "prediction_network", "causal", "dropout")
OF_NEW_PROCESSORS = ("tokenizer_type", "vocab_size", "num_mel_bins", "normalize")


def make_processor(arguments: Arguments, utterances: Sequence[Utterance]) -> ConformerProcessor | WhisperProcessor:
    """Loads the processor of a folder, or makes a new one with a tokenizer of the transcripts and features as given.

    With `normalize` "none" the constants are mean and standard deviation over the first 200 utterances.

    Raises:
        ValueError: for options of a new model together with a checkpoint, or a vocabulary that the transcripts do not
            allow.
    """
    path, data = _check_new(arguments), arguments.data
    if path is not None and architecture_of(arguments.model) == "whisper":
        return WhisperProcessor.from_pretrained(path)
    if path is not None:
        processor = ConformerProcessor.from_pretrained(path)
        _check_causal(arguments.model, processor.feature_extractor.normalize)
        return processor
    _check_causal(arguments.model, data.normalize)
    if data.normalize == "none":
        waveforms = (read_audio(utterance, resample=data.resample) for utterance in utterances[:MEASURED])
        extractor = ConformerFeatureExtractor.measured(waveforms, feature_size=data.num_mel_bins)
    else:
        extractor = ConformerFeatureExtractor(feature_size=data.num_mel_bins, normalize=data.normalize)
    tokenizer = train_tokenizer((u.text for u in utterances), data.tokenizer_type, data.vocab_size)
    return ConformerProcessor(extractor, tokenizer)


def saved_architecture(config: ConformerConfig) -> str | None:
    """Reads from a configuration whether a saved model is "ctc" or "transducer"; None if it is neither."""
    return next((name for name, kind in MODELS.items() if kind.__name__ in (config.architectures or ())), None)


def architecture_of(arguments: SpeechModelArguments) -> str:
    """Chooses between "ctc", "transducer" and "whisper": as the arguments say, else the checkpoint, else "ctc".

    Raises:
        ValueError: if the checkpoint cannot be one of them, or only another one.
    """
    path = arguments.model_name_or_path
    if path is not None:
        is_whisper = PreTrainedConfig.get_config_dict(path)[0].get("model_type") == "whisper"
        if is_whisper and arguments.architecture in (None, "whisper"):
            return "whisper"
        if is_whisper or arguments.architecture == "whisper":
            kind = "a Whisper" if is_whisper else "no Whisper"
            raise ValueError(f"--architecture {arguments.architecture} does not fit: {path} holds {kind}")
    if arguments.architecture is not None or arguments.model_name_or_path is None:
        return arguments.architecture or "ctc"
    config = ConformerConfig.from_pretrained(arguments.model_name_or_path)
    found = saved_architecture(config)
    if found is None:
        raise ValueError(
            f"{arguments.model_name_or_path} has the architecture {' '.join(config.architectures or ['none'])}: say "
            f"what to train on its encoder, --architecture {' or '.join(MODELS)}"
        )
    return found


def make_model(arguments: Arguments, processor: Any, seed: int) -> Any:
    """Makes a new model of the preset, or loads the checkpoint's, with the chosen attention.

    Args:
        arguments: all arguments of the program.
        processor: that of the model.
        seed: draws new weights and the random features.
    """
    given, options = arguments.model, arguments.model.favor_options()
    architecture = architecture_of(given)
    set_seed(seed)
    if architecture == "whisper":
        return make_whisper(arguments, seed)
    model_class = MODELS[architecture]
    if given.model_name_or_path is not None:
        backend = {} if given.attn_implementation is None else {"attn_implementation": given.attn_implementation}
        changes: dict[str, Any] = {
            "architectures": [model_class.__name__]
        }  # so that CTC can take the encoder of a Transducer
        changes |= {"ctc_weight": given.ctc_weight} if given.ctc_weight else {}
        model = model_class.from_pretrained(given.model_name_or_path, dtype=torch.float32, **backend, **changes)
    else:
        dropouts = ("dropout", "activation_dropout", "attention_dropout", "prediction_dropout")
        config = ConformerConfig.preset(
            given.preset,
            vocab_size=len(processor.tokenizer),
            num_mel_bins=processor.feature_extractor.feature_size,
            feature_hop_length=processor.feature_extractor.hop_length,
            causal=given.causal,
            prediction_network=given.prediction_network,
            ctc_weight=given.ctc_weight,
            attn_implementation=given.attn_implementation,
            **dict.fromkeys(dropouts, given.dropout),
        )
        model = model_class(config)
    if model.config._attn_implementation in favor.BACKENDS:
        return favor.configure(model, **options, seed=seed)
    if options:
        raise ValueError(
            f"{', '.join(options)}: options of FAVOR attention, not of {model.config._attn_implementation}: leave them "
            "out or add --attn_implementation favor#"
        )
    return model


def _check_new(arguments: Arguments) -> str | None:
    """Gives the folder of the processor, if any; raises ValueError for options that have no effect with it."""
    model, data = arguments.model, arguments.data
    if model.model_name_or_path is not None:
        _refuse(model, "--model_name_or_path", _OF_NEW_MODELS)
        _refuse(data, "--model_name_or_path", OF_NEW_PROCESSORS)
        return model.model_name_or_path
    if model.processor_name_or_path is not None:
        _refuse(data, "--processor_name_or_path", OF_NEW_PROCESSORS)
        return model.processor_name_or_path
    return None


def _check_causal(model: SpeechModelArguments, normalize: str) -> None:
    if model.causal and normalize != "none":
        raise ValueError(
            f"a causal model cannot wait for the whole utterance, as normalize {normalize!r} of its features does: add "
            "--normalize none, or name a processor with it"
        )


def _refuse(part: Any, given: str, names: Sequence[str]) -> None:
    for entry in fields(part):
        if entry.name in names and getattr(part, entry.name) != entry.default:
            raise ValueError(f"{entry.name} has no effect, because {given} already decides it: leave it out")
