r"""Loss of the Transducer (RNN-T): minus the log probability of the targets, summed over all alignments.

A lattice node (t, u) has seen t frames and emitted u labels. The blank leads from it to (t + 1, u), the next label to
(t, u + 1). With P(k | t, u) = softmax(logits[t, u])_k,

.. math:: L = -\log \sum_{\text{alignments}} \prod P, \qquad
    \frac{\partial L}{\partial \text{logits}[t, u, k]} = (g_\varnothing + g_y) P(k | t, u)
    - g_\varnothing [k = \varnothing] - g_y [k = y_{u + 1}]

where g are the probabilities, given the target, that an alignment takes the blank or the label at (t, u). The sums are
eq. 16 to 18 of Graves 2012, "Sequence Transduction with Recurrent Neural Networks" (arXiv:1211.3711); the gradient
merges those of the loss and of the softmax ("function merging" of Li et al. 2019, "Improving RNN Transducer Modeling
for End-to-End Speech Recognition", arXiv:1909.12415), so that no log probabilities for all k are kept.

Two nodes of autograd's graph do this: `Steps`, from logits to the log probabilities of blank and label at each node of
the lattice, and `Alignments`, from these to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

REDUCTIONS = ("none", "mean", "sum")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INF = float("inf")
# Numbers of the logits whose softmax exists at once.
PIECE = {"cpu": 1 << 18}
LARGE_PIECE = 1 << 23
Joint = Callable[[Tensor, Tensor], Tensor]


def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    reduction: str = "mean",
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
            ("mean_batch" of NeMo and transformers).

    Returns:
        `[B]` or (), in the type of the logits, but float32 for float16 and bfloat16.

    Raises:
        TypeError: for tensors of a wrong type.
        ValueError: for shapes, lengths, ids or options that do not fit.

    Example:
        >>> import torch
        >>> from favor.models.speech import transducer_loss
        >>> logits = torch.zeros(1, 2, 2, 4)  # two alignments of three steps, each of probability 4^-3
        >>> transducer_loss(logits, torch.tensor([[3]]), torch.tensor([2]), torch.tensor([1]))
        tensor(3.4657)
    """
    _check_floating("logits", logits, "[B, T, U + 1, V]")
    frames, labels, ids, most = _checked(targets, logit_lengths, target_lengths, logits.shape[:3], blank, reduction)
    _check_vocabulary(logits, most)
    empty = _no_steps(logits.shape[:3], logits)
    steps = Steps.apply(logits, empty, ids.to(logits.device), frames, labels, blank)
    return _reduced(Alignments.apply(steps, frames, labels), reduction)


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
    max_cells: int = 1 << 14,
) -> Tensor:
    """Computes `transducer_loss` of logits that a joint network makes, which never exist all at once.

    The joint network is called on pieces of at most `max_cells` nodes of a sequence's lattice, without its padding:
    once for the loss, and once more in the backward pass (`torch.utils.checkpoint`). So peak memory grows with
    `max_cells` V, not with B T U V, for one more forward pass of the joint network. Its second calls see the same
    autocast and random numbers as the first, so dropout in it is allowed; layers that keep statistics would count
    everything twice.

    Args:
        hidden: encoder output `[B, T, H]`.
        prediction: output of the prediction network `[B, U + 1, P]`, the first after no label.
        joint: turns `[t, 1, H]` and `[1, u, P]` into logits `[t, u, V]`, for any t and u, each node on its own.
        targets: as in `transducer_loss`, like all further arguments.
        logit_lengths: `[B]`.
        target_lengths: `[B]`.
        blank: default 0.
        reduction: default "mean".
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
    _check_floating("hidden", hidden, "[B, T, H]")
    _check_floating("prediction", prediction, "[B, U + 1, P]")
    if len(hidden) != len(prediction) or hidden.device != prediction.device:
        raise ValueError(
            "hidden and prediction must have the same batch and device, got "
            f"{[*hidden.shape]} on {hidden.device} and {[*prediction.shape]} on {prediction.device}."
        )
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}.")
    shape = (*hidden.shape[:2], prediction.shape[1])
    frames, labels, ids, most = _checked(targets, logit_lengths, target_lengths, shape, blank, reduction)

    def steps_of(frame: Tensor, text: Tensor, own: Tensor) -> Tensor:
        # Made first: what stays, between what goes, would split the memory that the next piece needs.
        steps = _no_steps((1, len(frame), len(text)), frame)
        logits = _join(joint, frame, text)[None]
        _check_vocabulary(logits, most)
        return Steps.apply(logits, steps, own[None], [len(frame)], [len(text) - 1], blank)[:, 0]

    kind, rows = hidden.device.type, []
    given = zip(hidden.unbind(), prediction.unbind(), ids.to(hidden.device).unbind(), frames, labels, strict=True)
    # In autocast's cache a weight would be one cast for all pieces, and sum up their gradients in half precision.
    with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False):
        for sequence, text, own, stop, last in given:
            width = min(last + 1, max_cells)
            height = max(1, max_cells // width)
            texts = [*zip(text[: last + 1].split(width), own[: last + 1].split(width), strict=True)]
            strips = [
                torch.cat([checkpoint(steps_of, piece, *columns, use_reentrant=False) for columns in texts], -1)
                for piece in sequence[:stop].split(height)
            ]
            rows.append(pad(torch.cat(strips, 1), (0, shape[2] - last - 1, 0, shape[1] - stop)))
    return _reduced(Alignments.apply(torch.stack(rows, 1), frames, labels), reduction)


class Steps(torch.autograd.Function):
    """Log probabilities of the blank and of the next label at each node, `[2, B, T, U + 1]`; keeps the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, steps: Tensor, ids: Tensor, frames: list[int], labels: list[int], blank: int
    ) -> Tensor:
        """Reads the nodes that are not padding, a piece at a time."""
        most = max(1, PIECE.get(logits.device.type, LARGE_PIECE) // logits.shape[-1])
        ctx.pieces, ctx.blank = [*_pieces(frames, labels, most)], blank
        ctx.save_for_backward(logits, ids)
        ctx.mark_dirty(steps)
        for piece in ctx.pieces:
            log_p = torch.log_softmax(logits[piece], -1, dtype=steps.dtype)
            steps[0][piece] = log_p[..., blank]
            steps[1][piece] = log_p.gather(-1, _everywhere(ids, piece, len(log_p))).squeeze(-1)
        return steps

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Any, ...]:
        """Computes the gradient with respect to the logits."""
        logits, ids = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for piece in ctx.pieces:
            blank, label = slopes[0][piece], slopes[1][piece]
            slope = torch.softmax(logits[piece], -1, dtype=slopes.dtype)
            slope *= -(blank + label).unsqueeze(-1)
            slope[..., ctx.blank] += blank
            slope.scatter_add_(-1, _everywhere(ids, piece, len(slope)), label.unsqueeze(-1))
            gradient[piece] = slope
        return gradient, None, None, None, None, None


def _no_steps(shape: Sequence[int], like: Tensor) -> Tensor:
    """Makes the zeros `[2, B, T, U + 1]` that `Steps` fills, in float32 or float64."""
    return torch.zeros(2, *shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _everywhere(ids: Tensor, piece: tuple[int, slice, slice], height: int) -> Tensor:
    """Gives the ids of a piece at each of its nodes, `[t, u, 1]`."""
    row, _, columns = piece
    return ids[row, columns].expand(height, -1).unsqueeze(-1)


def _pieces(frames: list[int], labels: list[int], cells: int) -> Iterator[tuple[int, slice, slice]]:
    """Yields sequence, frames and labels of pieces of at most `cells` nodes; they leave out padding only."""
    for row, (stop, last) in enumerate(zip(frames, labels, strict=True)):
        width = min(last + 1, cells)
        height = max(1, cells // width)
        for t in range(0, stop, height):
            for u in range(0, last + 1, width):
                yield row, slice(t, min(t + height, stop)), slice(u, min(u + width, last + 1))


class Alignments(torch.autograd.Function):
    """Losses `[B]` of the log probabilities of steps `[2, B, T, U + 1]`, in float64 by diagonals of the lattice.

    All nodes with the same t + u follow from those one step before: T + U steps on vectors. Log probabilities are kept
    sheared, `[T + U, B, U + 1]`, a diagonal in one piece, and that of a label at the node it leads to. Shorter
    sequences continue from their own end (T_b, U_b) to the common end (T, U) on the only way left open, at no cost.
    Sums reach thousands of nats, and differences of them are taken: hence float64.
    """

    @staticmethod
    def forward(ctx: Any, steps: Tensor, frames: list[int], labels: list[int]) -> Tensor:
        """Sums over the ways to each node and, for a backward pass, over those from it."""
        _, batch, T, width = steps.shape
        blanks = steps.new_full((T + width - 1, batch, width), -INF, dtype=torch.float64)
        moves = torch.full_like(blanks, -INF)
        strides = (width, batch * width, batch * width + 1)
        blank = blanks.as_strided((batch, T, width), strides)
        label = moves.as_strided((batch, T + 1, width - 1), strides, 1)
        for row, (stop, last) in enumerate(zip(frames, labels, strict=True)):
            blank[row, :stop, : last + 1] = steps[0, row, :stop, : last + 1]
            label[row, :stop, :last] = steps[1, row, :stop, :last]
            blank[row, stop:, -1] = 0
            label[row, stop, last:] = 0
        ways = _ways_to(blanks, moves)
        total = ways[-1, :, -1].clone()
        if ctx.needs_input_grad[0]:
            _add_ways_from(blanks, moves)
            blanks += ways[:-1, :, 1:]
            moves += ways[:-1, :, :-1]
            for diagonals in (blanks, moves):
                diagonals -= total[:, None]
                diagonals.exp_()
            taken = torch.zeros_like(steps)
            taken[0] = blank
            taken[1, ..., :-1] = label[:, :-1]
            ctx.save_for_backward(taken)
        return -total.to(steps.dtype)

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Any, ...]:
        """Weights the probabilities that an alignment takes each step; weight 0 leaves an infinite loss out."""
        if torch.is_grad_enabled():  # the saved probabilities would count as constants
            raise RuntimeError("the transducer loss can be differentiated once: leave create_graph=True out.")
        scale = weights[:, None, None]
        return torch.where(scale == 0, 0, -scale * ctx.saved_tensors[0]), None, None


def _ways_to(blank: Tensor, label: Tensor) -> Tensor:
    """Sums all ways from the first node to each, alpha of eq. 16: `[N + 1, B, W + 1]` for two times `[N, B, W]`."""
    steps, batch, width = blank.shape
    ways = blank.new_full((steps + 1, batch, width + 1), -INF)
    ways[0, :, 1] = 0
    here = ways[0]
    for stay, move, following in zip(blank.unbind(), label.unbind(), ways[1:].unbind(), strict=True):
        torch.logaddexp(here[:, 1:] + stay, here[:, :-1] + move, out=following[:, 1:])
        here = following
    return ways


def _add_ways_from(blank: Tensor, label: Tensor) -> None:
    """Adds to each transition the sum over all ways from where it leads to the last node, beta of eq. 18, in place."""
    _, batch, width = blank.shape
    ways = blank.new_full((batch, width), -INF)
    ways[:, -1] = 0
    for stay, move in zip(reversed(blank.unbind()), reversed(label.unbind()), strict=True):
        stay += ways
        move += ways
        ways = stay.clone()
        torch.logaddexp(stay[:, :-1], move[:, 1:], out=ways[:, :-1])


def _join(joint: Joint, hidden: Tensor, prediction: Tensor) -> Tensor:
    """Computes logits `[t, u, V]` of frames `[t, H]` and predictions `[u, P]`; raises ValueError for another shape."""
    logits = joint(hidden[:, None], prediction[None])
    expected = (len(hidden), len(prediction))
    if logits.ndim != 3 or tuple(logits.shape[:2]) != expected or not logits.is_floating_point():
        raise ValueError(
            f"joint must turn {[*hidden[:, None].shape]} and {[*prediction[None].shape]} into floating-point logits "
            f"[{expected[0]}, {expected[1]}, V], leading dimensions broadcast; got {logits.dtype} {[*logits.shape]}."
        )
    return logits


def _check_vocabulary(logits: Tensor, most: int) -> None:
    if most >= logits.shape[-1]:
        raise ValueError(f"targets and blank must be ids from 0 to {logits.shape[-1] - 1}, got {most}.")


def _check_floating(name: str, tensor: Tensor, layout: str) -> None:
    """Raises unless `tensor` is of floating point, has the dimensions of `layout`, and none of them is 0."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor {layout}, got {_kind(tensor)}.")
    if tensor.ndim != layout.count(",") + 1 or 0 in tensor.shape:
        raise ValueError(f"{name} must be {layout} with no dimension of size 0, got {[*tensor.shape]}.")


def _kind(given: Any) -> Any:
    return given.dtype if isinstance(given, Tensor) else type(given).__name__


def _checked(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, shape: Sequence[int], blank: int, reduction: str
) -> tuple[list[int], list[int], Tensor, int]:
    """Gives frames and labels per sequence, targets `[B, U + 1]`, 0 for padding, and the largest id."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}; got {reduction!r}.")
    batch, frames, width = shape
    lengths = {"logit_lengths": (logit_lengths, 1, frames), "target_lengths": (target_lengths, 0, width - 1)}
    for name, tensor in {"targets": targets, "logit_lengths": logit_lengths, "target_lengths": target_lengths}.items():
        expected = [batch] if name in lengths else [batch, width - 1]
        if not isinstance(tensor, Tensor) or tensor.dtype not in INTEGERS:
            raise TypeError(f"{name} must be a tensor of integers, got {_kind(tensor)}.")
        if [*tensor.shape] != expected:
            raise ValueError(f"{name} must be {expected} for B, T, U + 1 = {[*shape]}, got {[*tensor.shape]}.")
    for name, (found, least, most) in lengths.items():
        if found.min() < least or found.max() > most:
            raise ValueError(f"{name} must be from {least} to {most}, got {found.min()} to {found.max()}.")
    known = torch.arange(width - 1, device=targets.device) < target_lengths.to(targets.device)[:, None]
    wrong = targets[known & ((targets < 0) | (targets == blank))]
    if blank < 0 or len(wrong):
        raise ValueError(
            f"targets must be ids of at least 0 other than the blank, {blank}, up to target_lengths, and the blank at "
            f"least 0; got targets {wrong[:1].tolist()}."
        )
    ids = pad(targets.long().masked_fill(~known, 0), (0, 1))
    return logit_lengths.tolist(), target_lengths.tolist(), ids, max(blank, int(ids.max()))


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
