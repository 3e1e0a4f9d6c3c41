"""How often a call makes a GPU start something: Triton kernels and operators of PyTorch, and never a wait.

Tensors are those of another device (tests/elsewhere.py), whose Triton kernels run in the interpreter.
"""

import torch
from elsewhere import triton_there

import favor

# Launches at most: forward, backward.
BUDGETS = {}


def launches(length, *, dtype=torch.bfloat16, heads=(2, 2), is_padded=False, **options):
    """Names of what a second call starts, forward and backward, and how often it waits."""
    generator = torch.Generator().manual_seed(0)
    with triton_there() as there:
        shapes = [(2, number, length, 16) for number in (heads[0], heads[1], heads[1])]
        tokens = [torch.randn(shape, generator=generator).to("meta", dtype).requires_grad_() for shape in shapes]
        if is_padded:
            options["key_padding_mask"] = (torch.arange(length) < torch.tensor([[length], [length - 7]])).to("meta")
        favor.favor_attention(*tokens, num_features=32, **options)
        there.launches.clear()
        there.reads = 0
        out = favor.favor_attention(*tokens, num_features=32, **options)
        forward = list(there.launches)
        torch.autograd.grad(out, tokens, torch.ones_like(out))
        backward = there.launches[len(forward) + 1 :]  # the first one made the gradient
    return forward, backward, there.reads


if __name__ == "__main__":
    import sys

    for case in sys.argv[1:]:
        forward, backward, reads = launches(**eval(case))
        print(case, len(forward), len(backward), reads, "\n", forward, "\n", backward)
