"""Options that were renamed: what programs say of the old names, and how saved settings with them are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Old names, each with its new ones; the one that the program has is meant.
RENAMED: dict[str, tuple[str, ...]] = {
    "allow_pickle_weights": ("trust_remote_code",),
    "arms": ("backends",),
    "backend": ("attn_implementation",),
    "batch_seconds": ("per_device_eval_batch_seconds", "per_device_train_batch_seconds"),
    "batch_size": ("per_device_train_batch_size", "per_device_eval_batch_size"),
    "cache": ("runs_file",),
    "contexts": ("lengths",),
    "converted": ("adapted",),
    "data_dir": ("glue_dir",),
    "epochs": ("num_train_epochs",),
    "eval_file": ("validation_file",),
    "features": ("families",),
    "heads": ("num_attention_heads", "head_optimizers"),
    "key_heads": ("num_key_value_heads",),
    "layers": ("num_hidden_layers",),
    "length": ("lengths", "max_length", "vectors"),
    "max_batch_seconds": ("per_device_train_batch_seconds",),
    "max_quadratic_minutes": ("max_exact_minutes",),
    "max_samples": ("max_eval_samples",),
    "max_seconds": ("max_duration_in_seconds",),
    "memory_limit": ("max_gigabytes",),
    "model": ("model_types", "model_name_or_path"),
    "models": ("model_types", "model_name_or_path"),
    "num_workers": ("dataloader_num_workers",),
    "out": ("output_dir",),
    "output": ("output_file",),
    "passes": ("max_passes",),
    "positions": ("max_position_embeddings",),
    "results": ("results_dir", "output_dir"),
    "samples": ("calibration_samples",),
    "seconds": ("seconds_per_cell", "time_limit", "piece_seconds"),
    "seeds": ("num_seeds", "seed"),
    "splits": ("eval_splits", "shuffles"),
    "text_file": ("text",),
    "text": ("texts",),
    "texts": ("rescored_texts",),
    "train_samples": ("max_train_samples",),
    "tune": ("choose_on",),
    "tune_beam_size": ("choose_beam_size",),
    "tune_utterances": ("choose_samples",),
    "variants": ("backends",),
}

# Options that are gone: what programs do now is what they did with these values.
CONSTANTS: dict[str, tuple[Any, ...]] = {
    "attention_learning_rate": (3e-3,),
    "calibration_samples": (8,),
    "dataset_config_name": (None,),
    "chunk_seconds": (None,),
    "directions_learning_rate": (5e-2,),
    "dither": (1e-5,),
    "eval_epochs": (1,),
    "exact_below": ("0",),
    "factorization": (None,),
    "fit_split": (None,),
    "frequency_masks": (2,),
    "frequency_width": (27,),
    "gain": (None,),
    "head_curvature": (None,),
    "head_damping": (None,),
    "held_out_samples": (8,),
    "join_seconds": (28.0,),
    "left_chunks": (None,),
    "lr_scheduler_type": ("cosine",),
    "max_grad_norm": (1.0,),
    "max_train_samples": (None,),
    "mlm_probability": (0.15,),
    "model_directions_learning_rate": (5e-3,),
    "noise_probability": (None, 0.5),
    "noise_snr": (None, [5.0, 20.0]),
    "num_mel_bins": (80,),
    "num_warmup_steps": (None,),
    "pad_to_max_length": (False,),
    "prediction_network": ("lstm",),
    "redraw_interval": (None,),
    "resample": (False, True),
    "reverb_probability": (None, 0.5),
    "reverb_rt60": (None,),
    "skip_bad_rows": (False,),
    "start_length": (None,),
    "statistics": (None,),
    "task_weight": (1.0,),
    "temperature": (1.0,),
    "threshold": (None,),
    "time_masks": (10,),
    "time_part": (0.05,),
    "train_repeats": (1,),
    "warmup_ratio": (0.1,),
    "weight_decay": (0.01,),
}


def renamed(name: str, known: Collection[str]) -> str | None:
    """Gives the new name of an option; None for a name that is still known, or was never one.

    Args:
        name: the option, without hyphens.
        known: the options of the program, without hyphens.
    """
    return None if name in known else next((new for new in RENAMED.get(name, ()) if new in known), None)


def with_new_names(saved: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Gives saved settings of a program by the names that its options have now, without those that are constants now.

    A setting with another value than the constant stays, so that a comparison names it.

    Args:
        saved: settings of an earlier run.
        known: the names of the settings now.
    """
    by_name = {renamed(name, known) or name: value for name, value in saved.items()} | {
        name: value for name, value in saved.items() if name in known
    }
    return {name: value for name, value in by_name.items() if name in known or value not in CONSTANTS.get(name, ())}


def in_new_words(saved: Sequence[str], words: Sequence[str]) -> list[str]:
    """Gives a saved command line with the names of the options in another one, if they were renamed since."""
    known = [word[2:] for word in words if word.startswith("--")]
    return [f"--{renamed(word[2:], known) or word[2:]}" if word.startswith("--") else word for word in saved]
