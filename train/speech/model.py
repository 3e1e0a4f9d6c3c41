"""The model, the processor and the lexicon at the start of a speech training: new ones, or those of a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedConfig, WhisperForConditionalGeneration, WhisperProcessor

import favor
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC, ConformerForTransducer
from favor.models.speech import ConformerProcessor, ConformerTokenizer, Pronunciations, train_tokenizer
from favor.models.speech.pronunciations import lacking, lexicon_of
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train.speech.arguments import Arguments, SpeechDataArguments, SpeechModelArguments
from favor.train.speech.data import Skipped, Utterance, read_audio
from favor_command.saved import check_known, load_model, load_processor

MODELS: dict[str, Any] = {"ctc": ConformerForCTC, "transducer": ConformerForTransducer}
CLASSES: dict[str, dict[str, Any]] = {
    ConformerConfig.model_type: MODELS,
    WhisperCTCConfig.model_type: {"ctc": WhisperForCTC},
}
WHISPER = "whisper"
ENCODER = "model.encoder"  # of a Whisper
LARGEST_RATE = 5e-4
MEASURED = 200
_OF_CONFORMERS = ("preset", "causal")


def make_processor(
    arguments: Arguments, utterances: Sequence[Utterance], lexicon: Pronunciations | None = None
) -> ConformerProcessor | WhisperProcessor:
    """Loads the processor of a folder, or makes a new one with a tokenizer of the transcripts.

    With `normalize` "none" the constants are mean and standard deviation over the first 200 utterances. CTC on the
    encoder of a Whisper gets the features of the Whisper and a new tokenizer. With a lexicon the tokens of a new
    tokenizer are its phonemes.

    Raises:
        ValueError: for options of a new model together with a checkpoint, a vocabulary that the transcripts do not
            allow, or a saved tokenizer that does not know them.
    """
    given, data = arguments.model, arguments.data
    path = given.model_name_or_path
    new_head = _has_new_head(given)
    if path is not None:
        _refuse(given, _OF_CONFORMERS if new_head else (*_OF_CONFORMERS, "dropout"))
        _refuse(data, () if new_head else ("tokenizer_type", "vocab_size"))
        if architecture_of(given) == WHISPER:
            return load_processor(path, WhisperProcessor)
    if new_head:
        features = load_processor(str(path), WhisperCTCFeatureExtractor)
        return ConformerProcessor(features, _new_tokenizer(data, utterances, lexicon))
    if (path := path or arguments.processor) is not None:
        processor = load_processor(path, ConformerProcessor)
        if lexicon is not None:
            lexicon.check(processor.tokenizer)
        tokens = (processor.tokenizer(utterance.text)["input_ids"] for utterance in utterances[:MEASURED])
        check_known(tokens, processor.tokenizer, "the transcripts")
        if given.causal and getattr(processor.feature_extractor, "normalize", "none") != "none":
            raise ValueError(
                f"a causal model cannot wait for the whole utterance, as the features of {path} do: give a teacher "
                "that is causal too"
            )
        return processor
    bins = ConformerConfig.preset(given.preset).num_mel_bins
    if arguments.normalize == "none":
        waveforms = (read_audio(utterance) for utterance in utterances[:MEASURED])
        extractor = ConformerFeatureExtractor.measured(waveforms, feature_size=bins)
    else:
        extractor = ConformerFeatureExtractor(feature_size=bins, normalize=arguments.normalize)
    return ConformerProcessor(extractor, _new_tokenizer(data, utterances, lexicon))


def _new_tokenizer(
    data: SpeechDataArguments, utterances: Sequence[Utterance], lexicon: Pronunciations | None
) -> ConformerTokenizer:
    if lexicon is not None:
        return lexicon.tokenizer()
    return train_tokenizer((u.text for u in utterances), data.tokenizer_type, data.vocab_size)


def saved_architecture(config: PreTrainedConfig) -> str | None:
    """Reads from a configuration whether a saved model is "ctc" or "transducer"; None if it is neither."""
    kinds = CLASSES.get(config.model_type, {})
    return next((name for name, kind in kinds.items() if kind.__name__ in (config.architectures or ())), None)


def _checkpoint_type(arguments: SpeechModelArguments) -> str | None:
    """Reads the model type of the checkpoint, such as "conformer" or "whisper"; None without a checkpoint."""
    path = arguments.model_name_or_path
    found = None if path is None else PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    return None if found is None else str(found)


def _has_new_head(arguments: SpeechModelArguments) -> bool:
    return _checkpoint_type(arguments) == WHISPER and architecture_of(arguments) == "ctc"


def architecture_of(arguments: SpeechModelArguments) -> str:
    """Chooses between "ctc", "transducer" and "whisper": as the arguments say, else the checkpoint, else "ctc".

    Raises ValueError if the checkpoint cannot be one of them, or only another one.
    """
    path, found = arguments.model_name_or_path, _checkpoint_type(arguments)
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

    The seed draws new weights and the random features.
    """
    given, options = arguments.model, arguments.model.favor_options()
    architecture = architecture_of(given)
    set_seed(seed)
    if architecture == WHISPER:
        return _make_whisper(arguments, seed)
    if _has_new_head(given):
        model = _new_whisper_ctc(given, len(processor.tokenizer))
    elif given.model_name_or_path is not None:
        changes: dict[str, Any] = {"ctc_weight": given.ctc_weight} if given.ctc_weight else {}
        if given.attn_implementation is not None:
            changes["attn_implementation"] = given.attn_implementation
        kind: Any = WhisperForCTC
        if _checkpoint_type(given) != WhisperCTCConfig.model_type:
            kind = MODELS[architecture]
            changes["architectures"] = [kind.__name__]  # so that CTC can take the encoder of a Transducer
        model = load_model(kind, given.model_name_or_path, dtype=torch.float32, **changes)
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
        model = MODELS[architecture](config)
    if model.config._attn_implementation in favor.BACKENDS:
        return favor.configure(model, **options, seed=seed)
    if options:
        raise ValueError(
            f"{', '.join(options)}: options of FAVOR attention, not of {model.config._attn_implementation}: leave them "
            "out or add --attn_implementation favor#"
        )
    return model


def _make_whisper(arguments: Arguments, seed: int) -> WhisperForConditionalGeneration:
    """Loads a Whisper; a FAVOR backend replaces the attention of its encoder alone."""
    given, options, rate = arguments.model, arguments.model.favor_options(), arguments.train.learning_rate
    path, backend = str(given.model_name_or_path), given.attn_implementation
    if rate > LARGEST_RATE:
        raise ValueError(f"a learning rate of {rate:g} destroys a pretrained Whisper: add --learning_rate 1e-5")
    exact: dict[str, Any] = {"attn_implementation": backend if backend and backend not in favor.BACKENDS else "sdpa"}
    # Without a backend the saved one stays, with its options and its seed.
    model = load_model(WhisperForConditionalGeneration, path, dtype=torch.float32, **(exact if backend else {}))
    if backend in favor.BACKENDS:
        return favor.configure(model, backend, only=ENCODER, **options, seed=seed)
    if options and model.config._attn_implementation not in favor.BACKENDS:
        raise ValueError(
            f"{', '.join(options)}: options of FAVOR attention, not of {model.config._attn_implementation}: leave them "
            "out or add --attn_implementation landmark"
        )
    return favor.configure(model, only=ENCODER, **options) if options else model


def _new_whisper_ctc(given: SpeechModelArguments, vocab_size: int) -> WhisperForCTC:
    """Puts a new CTC head on the encoder of a Whisper."""
    exact = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    whisper = load_model(WhisperForConditionalGeneration, str(given.model_name_or_path), **exact)
    # The head alone: Whisper was trained without dropout, and its outputs change a lot with it.
    options = {"attn_implementation": given.attn_implementation, "head_dropout": given.dropout}
    return WhisperForCTC.from_whisper(whisper, vocab_size, **options)


def _refuse(part: Any, names: Sequence[str]) -> None:
    for entry in dataclasses.fields(part):
        if entry.name in names and getattr(part, entry.name) != entry.default:
            raise ValueError(
                f"{entry.name} has no effect, because --model_name_or_path already decides it: leave it out"
            )


def run_lexicon(arguments: Arguments) -> Pronunciations | None:
    """Gives the lexicon of a run: the file that the arguments name, else that of the checkpoint, if it has one.

    Raises ValueError for a file that cannot be used, or a model that is not trained by CTC alone.
    """
    found = lexicon_of(arguments.data.lexicon, arguments.model.model_name_or_path or arguments.processor)
    if found is not None and architecture_of(arguments.model) != "ctc":
        raise ValueError("lexicon is for --architecture ctc: the other models are not searched by pronunciations")
    return found


def as_phonemes(utterances: Sequence[Utterance], lexicon: Pronunciations, skipped: Skipped) -> list[Utterance]:
    """Writes the transcripts of utterances as phonemes, by the first pronunciation of each word.

    Utterances with words that the lexicon lacks go to `skipped`, if it takes any.

    Raises:
        ValueError: if it takes none and words are lacking, or for too many of them; the message names words.
    """
    missing = [word for one in utterances for word in lexicon.missing(one.text)]
    if missing and not skipped.max_bad:
        raise ValueError(f"{lacking(missing)} Or leave their utterances out with --max_bad")
    found = []
    for one in utterances:
        if words := lexicon.missing(one.text):
            skipped.add(one.id, f"has words that the lexicon lacks: {', '.join(words)}")
        else:
            found.append(dataclasses.replace(one, text=lexicon.write(one.text)))
    skipped.check(len(utterances))
    return found
