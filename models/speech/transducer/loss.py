r"""Loss of the Transducer (RNN-T): minus the log probability of the targets, summed over all alignments.

With P(k | t, u) = softmax(logits[t, u])_k, and a lattice whose nodes (t, u) have seen t frames and emitted u labels,

.. math:: L = -\log \sum_{\text{alignments}} \prod P, \qquad
    \frac{\partial L}{\partial \text{logits}[t, u, k]} = (g_\varnothing + g_y) P(k | t, u)
    - g_\varnothing [k = \varnothing] - g_y [k = y_{u + 1}]

where g are the probabilities, given the target, that an alignment takes the blank or the label at (t, u). The sums are
eq. 16 to 18 of Graves 2012, "Sequence Transduction with Recurrent Neural Networks" (arXiv:1211.3711); the gradient
merges those of the loss and of the softmax ("function merging" of Li et al. 2019, "Improving RNN Transducer Modeling
for End-to-End Speech Recognition", arXiv:1909.12415), so that no log probabilities for all k are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from favor.models.speech.transducer.autograd import FromLogits, FromNetworks, Joint, Network, Task, probe
from favor.models.speech.transducer.lattice import pick

REDUCTIONS = ("none", "mean", "sum", "mean_volume")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    reduction: str = "mean",
    clamp: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Computes the negative log-likelihood of targets under a Transducer, in nats (Graves 2012, eq. 17).

    It can be differentiated once. The backward pass allocates the gradient and little else; for it the logits, by
    reference, and O(B T U) numbers are kept. Padding is not read, and its gradient is exactly 0. A sequence of
    probability 0 has loss inf and gradient NaN, unless its loss is left out of the result (`loss[loss.isfinite()]`).

    Args:
        logits: `[B, T, U + 1, V]`, not normalised. float16 and bfloat16 are computed in float32, a piece at a time.
        targets: `[B, U]` ids, none of them the blank. What is past `target_lengths` is ignored, -100 for example.
        logit_lengths: frames of each sequence `[B]`, from 1 to T.
        target_lengths: labels of each sequence `[B]`, from 0 to U.
        blank: id of the blank. Default 0, as in CTC; that of torchaudio is the last id.
        reduction: "none" for `[B]`; "sum"; "mean" (default): over the batch, whatever the lengths, as in torchaudio
            ("mean_batch" of NeMo and transformers); "mean_volume", a name of theirs: the sum divided by the number of
            all labels (at least 1).
        clamp: if given, entries of the gradient of each sequence's loss with respect to the logits are limited to
            [-clamp, clamp], before they are multiplied with the gradient of that loss, as torchaudio does.
        kernel: for the sums over alignments, "auto" (default: Triton on CUDA if it is installed and U < 1024, else
            torch), "torch" or "triton".

    Returns:
        `[B]` or (), in the type of the logits, but float32 for float16 and bfloat16.

    Raises:
        TypeError: for tensors of a wrong type.
        ValueError: for shapes, lengths, ids or options that do not fit, or a kernel that cannot run.

    Example:
        >>> import torch
        >>> from favor.models.speech import transducer_loss
        >>> logits = torch.zeros(1, 2, 2, 4)  # two alignments of three steps, each of probability 4^-3
        >>> transducer_loss(logits, torch.tensor([[3]]), torch.tensor([2]), torch.tensor([1]))
        tensor(3.4657)
    """
    _check_floating("logits", logits, "[B, T, U + 1, V]")
    _check_options(reduction, clamp)
    chosen = pick(kernel, logits.device, logits.shape[2])
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    frames, labels, ids = _checked(targets, logit_lengths, target_lengths, logits.shape, blank)
    task = Task(ids.to(logits.device), frames, labels, blank, clamp, chosen, differentiable)
    return _reduced(FromLogits.apply(task, logits), reduction, task)


def joint_transducer_loss(
    hidden: Tensor,
    prediction: Tensor,
    joint: Joint,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    reduction: str = "mean",
    clamp: float | None = None,
    kernel: str = "auto",
    max_cells: int = 1 << 14,
) -> Tensor:
    """Computes `transducer_loss` of logits that a joint network makes, which never exist all at once.

    The joint network is called on pieces of at most `max_cells` nodes of a sequence's lattice, without its padding:
    once without autograd, for the loss, and once more in the backward pass. So peak memory grows with `max_cells` V,
    not with B T U V, for one more forward pass of the joint network. Its second calls see the same autocast and random
    numbers as the first, so dropout in it is allowed; layers that keep statistics would count everything twice.

    Gradients reach `hidden`, `prediction` and the parameters that `joint` uses (however it is made: these are found by
    calling it on one node), each parameter's in one piece. Whatever else needs a gradient must come in by `hidden` or
    `prediction`.

    Args:
        hidden: encoder output `[B, T, H]`.
        prediction: output of the prediction network `[B, U + 1, P]`, the first after no label.
        joint: turns `[t, 1, H]` and `[1, u, P]` into logits `[t, u, V]`, for any t and u, each node on its own.
        targets: as in `transducer_loss`, like all further arguments.
        logit_lengths: `[B]`.
        target_lengths: `[B]`.
        blank: default 0.
        reduction: default "mean".
        clamp: for the gradient with respect to the logits. Default None.
        kernel: "auto" (default), "torch" or "triton".
        max_cells: default 16384, with 1024 tokens 64 MiB of logits in float32, of which a handful exist at a time.

    Returns:
        `[B]` or ().

    Raises:
        TypeError: for tensors of a wrong type.
        ValueError: as `transducer_loss`, or if the joint network returns another shape.

    Example:
        >>> import torch
        >>> from favor.models.speech import joint_transducer_loss
        >>> hidden, prediction = torch.randn(1, 6, 4), torch.randn(1, 3, 4)
        >>> lengths = torch.tensor([6]), torch.tensor([2])
        >>> bool(joint_transducer_loss(hidden, prediction, torch.add, torch.tensor([[1, 2]]), *lengths) > 0)
        True
    """
    for name, tensor in (("hidden", hidden), ("prediction", prediction)):
        _check_floating(name, tensor, "[B, T, H]" if name == "hidden" else "[B, U + 1, P]")
    if len(hidden) != len(prediction) or hidden.device != prediction.device:
        raise ValueError(
            "hidden and prediction must have the same batch and device, got "
            f"{[*hidden.shape]} on {hidden.device} and {[*prediction.shape]} on {prediction.device}."
        )
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}.")
    _check_options(reduction, clamp)
    chosen = pick(kernel, hidden.device, prediction.shape[1])
    vocabulary, parameters = probe(joint, hidden, prediction)
    shape = (*hidden.shape[:2], prediction.shape[1], vocabulary)
    frames, labels, ids = _checked(targets, logit_lengths, target_lengths, shape, blank)
    tensors = (hidden, prediction, *parameters)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    task = Task(ids.to(hidden.device), frames, labels, blank, clamp, chosen, differentiable)
    return _reduced(FromNetworks.apply(task, Network(joint, max_cells, parameters), *tensors), reduction, task)


def _check_floating(name: str, tensor: Tensor, layout: str) -> None:
    """Raises unless `tensor` is of floating point, has the dimensions of `layout`, and none of them is 0."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor {layout}, got {kind}.")
    if tensor.ndim != layout.count(",") + 1 or 0 in tensor.shape:
        raise ValueError(f"{name} must be {layout} with no dimension of size 0, got {[*tensor.shape]}.")


def _check_options(reduction: str, clamp: float | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}; got {reduction!r}.")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp must be positive, or None for no limit; got {clamp}.")


def _checked(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, shape: Sequence[int], blank: int
) -> tuple[list[int], list[int], Tensor]:
    """Gives frames and labels per sequence, and targets `[B, U + 1]`, 0 for padding; `shape` is B, T, U + 1, V."""
    batch, frames, width, vocabulary = shape
    layouts = {"targets": (targets, [batch, width - 1]), "logit_lengths": (logit_lengths, [batch])}
    for name, (tensor, expected) in (layouts | {"target_lengths": (target_lengths, [batch])}).items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of integers, got {kind}.")
        if [*tensor.shape] != expected:
            raise ValueError(f"{name} must be {expected} for B, T, U + 1 = {[*shape[:3]]}, got {[*tensor.shape]}.")
    counts = logit_lengths.tolist(), target_lengths.tolist()
    for name, found, least, most in zip(
        ("logit_lengths", "target_lengths"), counts, (1, 0), (frames, width - 1), strict=True
    ):
        if min(found) < least or max(found) > most:
            raise ValueError(f"{name} must be from {least} to {most}, got {min(found)} to {max(found)}.")
    if not 0 <= blank < vocabulary:
        raise ValueError(f"blank must be an id from 0 to {vocabulary - 1}, got {blank}.")
    known = torch.arange(width - 1, device=targets.device) < target_lengths.to(targets.device)[:, None]
    wrong = known & ((targets < 0) | (targets >= vocabulary) | (targets == blank))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"targets must be ids from 0 to {vocabulary - 1} other than the blank, {blank}, up to target_lengths; got "
            f"{targets[row, column].item()} at [{row}, {column}]."
        )
    return *counts, torch.nn.functional.pad(targets.long().masked_fill(~known, 0), (0, 1))


def _reduced(losses: Tensor, reduction: str, task: Task) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "mean":
        return losses.mean()
    return losses.sum() / (max(1, sum(task.labels)) if reduction == "mean_volume" else 1)
