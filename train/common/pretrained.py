"""Pretrained models, of the classes that their checkpoints name, and the optimizers that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedModel

import favor
from favor.models.stored_backend import zoo_configuration, zoo_model
from favor.optim import CombinedOptimizer, SoftmaxBound
from favor.train.common.arguments import SOFTMAX_BOUND, HeadArguments, ModelArguments, RunArguments
from favor_command.saved import load_model, load_processor, location, model_class, read_config


def load_exact(path: str, *, performer: bool = False) -> PreTrainedModel:
    """Loads a model of the class that its checkpoint names, in float32 and with exact attention.

    Args:
        path: folder or hub name, of a model of transformers or of the zoo.
        performer: load a model of transformers as its counterpart in the zoo if there is one, such as Performer BERT.
            The saved folder of the counterpart remembers its backend.

    Raises:
        ValueError: if there is no such class, the zoo has the model but not with the head of the checkpoint, or a file
            is damaged.
    """
    config = read_config(path)
    kind = model_class(config)
    if performer and zoo_configuration(type(config)):
        own = zoo_model(kind)
        if own is None:
            raise ValueError(f"{path} holds a {kind.__name__}, and there is no class of favor to load it with")
        kind = own
    return load_model(kind, path, attn_implementation="sdpa", dtype=torch.float32)


def load_switched(
    arguments: ModelArguments, auto_class: Any, seed: int, adapt: Callable[[Any], None]
) -> PreTrainedModel:
    """Loads a pretrained model to train, in float32 and with the chosen attention.

    With a FAVOR backend a model of transformers becomes its counterpart in the zoo if there is one, such as Performer
    BERT, so that the saved folder remembers the backend.

    Args:
        arguments, auto_class: the model, and the Auto class of transformers with the wanted head.
        seed: draws weights that the checkpoint lacks, and the random features.
        adapt: changes the configuration before the model is made.

    Raises:
        ValueError: if there are no safetensors weights, or options of FAVOR attention and no backend.
    """
    path, backend, options = arguments.model_name_or_path, arguments.attn_implementation, arguments.favor_options()
    remote = {"trust_remote_code": arguments.trust_remote_code}
    config = read_config(path, **remote)
    own = zoo_configuration(type(config)) if backend in favor.BACKENDS else None
    if own is not None and own in auto_class._model_mapping:
        config = own.from_pretrained(location(path))
    adapt(config)
    if arguments.dropout is not None:
        for name, value in config.to_dict().items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, name, arguments.dropout)
    set_seed(seed)
    try:
        model: PreTrainedModel = load_model(
            auto_class,
            path,
            config=config,
            attn_implementation=backend or config._attn_implementation,
            dtype=torch.float32,
            use_safetensors=None if arguments.trust_remote_code else True,
            ignore_mismatched_sizes=arguments.ignore_mismatched_sizes,
            **remote,
        )
    except ValueError as error:
        if isinstance(error.__cause__, OSError) and not arguments.trust_remote_code:
            raise ValueError(
                f"{error}\nIf the weights are in a pickle file that you trust, add --trust_remote_code."
            ) from error
        raise
    if model.config._attn_implementation in favor.BACKENDS:
        return favor.configure(model, **options, seed=seed)
    if options and backend is None:
        raise ValueError(f"{', '.join(options)}: options of FAVOR attention, so add --attn_implementation favor#")
    return model


def load_tokenizer(arguments: ModelArguments) -> Any:
    """Loads the checkpoint's tokenizer; if it has no padding token, it pads with its end-of-text token."""
    tokenizer = load_processor(arguments.model_name_or_path, trust_remote_code=arguments.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raises ValueError if the model has fewer positions than `max_length`."""
    _, positions = positions_of(model)
    if positions is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the model has {positions} positions")


def positions_of(model: PreTrainedModel) -> tuple[int, int | None]:
    """Gives the first position of a model and the number of its positions, None if there is no limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if positions is not None and name.endswith("position_embeddings") and padding is not None:
            return padding + 1, positions - padding - 1  # RoBERTa's first position follows the padding index
    return 0, positions


def make_optimizer(
    model: nn.Module, arguments: RunArguments, head_arguments: HeadArguments, num_labels: int
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Makes the optimizer; returns it and the parameters whose gradients are to be clipped.

    AdamW decays matrices alone: biases and normalisations are vectors. The softmax bound has a step length of its own,
    so its gradient is not clipped. Raises ValueError if it is asked for and there is one label: that is a regression.
    """
    rate, decay = head_arguments.head_learning_rate, arguments.weight_decay
    bound = head_arguments.head_optimizer == SOFTMAX_BOUND
    if bound and num_labels < 2:
        raise ValueError(f"head_optimizer {SOFTMAX_BOUND} is for a softmax, and this task is a regression: use adamw")
    everything = list(model.parameters())
    if not bound and rate is None:
        return torch.optim.AdamW(adamw_groups(everything, decay), lr=arguments.learning_rate, fused=True), everything
    heads = [own for own in model.modules() if isinstance(own, nn.Linear) and own.out_features == num_labels]
    if not heads:
        raise ValueError(f"{type(model).__name__} has no linear layer with {num_labels} outputs for head_optimizer")
    head = heads[-1]
    of_head = {id(p) for p in head.parameters()}
    body = [p for p in everything if id(p) not in of_head]
    groups = adamw_groups(body, decay)
    if not bound:
        groups += [{**group, "lr": rate} for group in adamw_groups(head.parameters(), decay)]
        return torch.optim.AdamW(groups, lr=arguments.learning_rate, fused=True), everything
    bounded = SoftmaxBound(head) if rate is None else SoftmaxBound(head, lr=rate)
    return CombinedOptimizer(torch.optim.AdamW(groups, lr=arguments.learning_rate, fused=True), bounded), body


def adamw_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Makes parameter groups with weight decay on matrices alone."""
    parameters = list(parameters)
    decayed, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
