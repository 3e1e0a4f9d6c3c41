"""The model and the processor at the start of a speech training: new ones, or those of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, WhisperProcessor

import favor
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC, ConformerForTransducer
from favor.models.speech import ConformerProcessor, ConformerTokenizer, Pronunciations, train_tokenizer
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train.speech.arguments import Arguments, SpeechDataArguments, SpeechModelArguments
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.whisper import make_whisper
from favor.train.speech.whisper_ctc import make_whisper_ctc
from favor_command.saved import check_known, load_model, load_processor

MODELS: dict[str, Any] = {"ctc": ConformerForCTC, "transducer": ConformerForTransducer}
CLASSES: dict[str, dict[str, Any]] = {
    ConformerConfig.model_type: MODELS,
    WhisperCTCConfig.model_type: {"ctc": WhisperForCTC},
}
WHISPER = "whisper"
MEASURED = 200
_OF_CONFORMERS = ("preset", "processor_name_or_path", "causal")
_OF_NEW_MODELS = (*_OF_CONFORMERS, "dropout")
_OF_FEATURES = ("num_mel_bins", "normalize")
OF_NEW_PROCESSORS = ("tokenizer_type", "vocab_size", *_OF_FEATURES)


def make_processor(
    arguments: Arguments, utterances: Sequence[Utterance], lexicon: Pronunciations | None = None
) -> ConformerProcessor | WhisperProcessor:
    """Loads the processor of a folder, or makes a new one with a tokenizer of the transcripts and features as given.

    With `normalize` "none" the constants are mean and standard deviation over the first 200 utterances. CTC on the
    encoder of a Whisper gets the features of the Whisper and a new tokenizer. With a lexicon the tokens of a new
    tokenizer are its phonemes.

    Raises:
        ValueError: for options of a new model together with a checkpoint, a vocabulary that the transcripts do not
            allow, or a saved tokenizer that does not know them.
    """
    path, data = _check_new(arguments), arguments.data
    if path is not None and architecture_of(arguments.model) == WHISPER:
        return load_processor(path, WhisperProcessor)
    if has_new_head(arguments.model):
        features = load_processor(path, WhisperCTCFeatureExtractor)
        return ConformerProcessor(features, _new_tokenizer(data, utterances, lexicon))
    if path is not None:
        processor = load_processor(path, ConformerProcessor)
        if lexicon is not None:
            lexicon.check(processor.tokenizer)
        tokens = (processor.tokenizer(utterance.text)["input_ids"] for utterance in utterances[:MEASURED])
        check_known(tokens, processor.tokenizer, "the transcripts")
        if isinstance(processor.feature_extractor, ConformerFeatureExtractor):
            _check_causal(arguments.model, processor.feature_extractor.normalize)
        return processor
    _check_causal(arguments.model, data.normalize)
    if data.normalize == "none":
        waveforms = (read_audio(utterance, resample=data.resample) for utterance in utterances[:MEASURED])
        extractor = ConformerFeatureExtractor.measured(waveforms, feature_size=data.num_mel_bins)
    else:
        extractor = ConformerFeatureExtractor(feature_size=data.num_mel_bins, normalize=data.normalize)
    return ConformerProcessor(extractor, _new_tokenizer(data, utterances, lexicon))


def _new_tokenizer(
    data: SpeechDataArguments, utterances: Sequence[Utterance], lexicon: Pronunciations | None
) -> ConformerTokenizer:
    """Makes a tokenizer of the phonemes of the lexicon, or one of the transcripts."""
    if lexicon is not None:
        return lexicon.tokenizer()
    return train_tokenizer((u.text for u in utterances), data.tokenizer_type, data.vocab_size)


def saved_architecture(config: PreTrainedConfig) -> str | None:
    """Reads from a configuration whether a saved model is "ctc" or "transducer"; None if it is neither."""
    kinds = CLASSES.get(config.model_type, {})
    return next((name for name, kind in kinds.items() if kind.__name__ in (config.architectures or ())), None)


def checkpoint_type(arguments: SpeechModelArguments) -> str | None:
    """Reads the model type of the checkpoint, such as "conformer" or "whisper"; None without a checkpoint."""
    path = arguments.model_name_or_path
    found = None if path is None else PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    return None if found is None else str(found)


def has_new_head(arguments: SpeechModelArguments) -> bool:
    """Tells whether CTC gets the encoder of a Whisper and a new head."""
    return checkpoint_type(arguments) == WHISPER and architecture_of(arguments) == "ctc"


def architecture_of(arguments: SpeechModelArguments) -> str:
    """Chooses between "ctc", "transducer" and "whisper": as the arguments say, else the checkpoint, else "ctc".

    Raises:
        ValueError: if the checkpoint cannot be one of them, or only another one.
    """
    path, found = arguments.model_name_or_path, checkpoint_type(arguments)
    possible = {WHISPER: (WHISPER, "ctc"), WhisperCTCConfig.model_type: ("ctc",)}.get(found or "")
    if possible is not None:
        if arguments.architecture not in (None, *possible):
            kind = "a Whisper" if found == WHISPER else "CTC on the encoder of a Whisper"
            raise ValueError(
                f"--architecture {arguments.architecture} does not fit: {path} holds {kind}, which can be "
                f"{' or '.join(possible)}"
            )
        return arguments.architecture or possible[0]
    if path is not None and arguments.architecture == WHISPER:
        raise ValueError(f"--architecture {WHISPER} does not fit: {path} holds no Whisper")
    if arguments.architecture is not None or path is None:
        return arguments.architecture or "ctc"
    config = ConformerConfig.from_pretrained(path)
    saved = saved_architecture(config)
    if saved is None:
        raise ValueError(
            f"{path} has the architecture {' '.join(config.architectures or ['none'])}: say what to train on its "
            f"encoder, --architecture {' or '.join(MODELS)}"
        )
    return saved


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
    if architecture == WHISPER:
        return make_whisper(arguments, seed)
    model_class = MODELS[architecture]
    if checkpoint_type(given) in (WHISPER, WhisperCTCConfig.model_type):
        model = make_whisper_ctc(arguments, len(processor.tokenizer), has_new_head(given))
    elif given.model_name_or_path is not None:
        backend = {} if given.attn_implementation is None else {"attn_implementation": given.attn_implementation}
        changes: dict[str, Any] = {
            "architectures": [model_class.__name__]
        }  # so that CTC can take the encoder of a Transducer
        changes |= {"ctc_weight": given.ctc_weight} if given.ctc_weight else {}
        model = load_model(model_class, given.model_name_or_path, dtype=torch.float32, **backend, **changes)
    else:
        dropouts = ("dropout", "activation_dropout", "attention_dropout", "prediction_dropout")
        config = ConformerConfig.preset(
            given.preset,
            vocab_size=len(processor.tokenizer),
            num_mel_bins=processor.feature_extractor.feature_size,
            feature_hop_length=processor.feature_extractor.hop_length,
            causal=given.causal,
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
        new_head = has_new_head(model)
        _refuse(model, "--model_name_or_path", _OF_CONFORMERS if new_head else _OF_NEW_MODELS)
        _refuse(data, "--model_name_or_path", _OF_FEATURES if new_head else OF_NEW_PROCESSORS)
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
