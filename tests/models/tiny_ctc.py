"""A tiny Conformer with CTC that says something, for tests of searches."""

import torch

from favor.models.conformer import ConformerConfig, ConformerForCTC

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SIZES |= {"conv_kernel_size": 5, "subsampling_conv_channels": 16, "num_mel_bins": 10}


def says_each_frame(vocab_size: int) -> ConformerForCTC:
    """Makes a model that says one token per frame, and of the special ones the blank alone."""
    torch.manual_seed(0)
    model = ConformerForCTC(ConformerConfig(**SIZES, vocab_size=vocab_size)).eval()
    with torch.no_grad():
        model.ctc_head.weight.mul_(3)
        model.ctc_head.bias[1:3] -= 99
    return model
