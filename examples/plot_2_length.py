"""
Time and memory against length
==============================

Exact attention compares every query with every key, so twice the length is four times the work.
Linear attention does twice the work for twice the length. This page shows from which length on that pays.

It measures one layer with 8 heads of width 64, forward, in float32, on the machine that built this page.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertConfig, BertModel

import favor

LENGTHS = (512, 1024, 2048, 4096, 8192)
M = 256
METHODS = {
    "exact (PyTorch)": lambda q, k, v: scaled_dot_product_attention(q, k, v),
    "landmark": lambda q, k, v: favor.favor_attention(q, k, v, features="landmark", num_features=M),
    "landmark, means alone": lambda q, k, v: favor.favor_attention(
        q, k, v, features="landmark", num_features=M, selected_keys=0
    ),
    "favor+": lambda q, k, v: favor.favor_attention(q, k, v, features="pos", num_features=M),
}


def seconds(call, *tensors):
    """Best of two calls."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        call(*tensors)
        times.append(time.perf_counter() - start)
    return min(times)


torch.manual_seed(0)
times = {name: [] for name in METHODS}
with torch.no_grad():
    for length in LENGTHS:
        tensors = torch.randn(3, 1, 8, length, 64)
        for name, call in METHODS.items():
            times[name].append(seconds(call, *tensors))

for name, row in times.items():
    print(f"{name:28}", "  ".join(f"{1000 * t:8.1f} ms" for t in row))

# %%
# ``favor.describe`` estimates the memory of attention without running anything. It counts the numbers that a layer
# holds, as a fraction of the L x L weights of exact attention. Less is better.

model = BertModel(BertConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=1))
favor.configure(model, "landmark", num_features=M, exact_below=0)
memory = [favor.describe(model, length=length).layers[0].memory for length in LENGTHS]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4))
for name, row in times.items():
    left.plot(LENGTHS, [1000 * t for t in row], marker="o", label=name)
left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds (less is better)")
left.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
left.minorticks_off()
left.legend(fontsize=8)
right.plot(LENGTHS, memory, marker="o", color="C1")
right.axhline(1, color="black", linewidth=1)
right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="memory, all weights of exact attention = 1")
right.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
right.minorticks_off()
figure.tight_layout()
plt.show()

# %%
# Where linear attention is slower, the default of every backend is exact attention, on purpose. The results in
# ``eval/results`` were measured more carefully than the times on this page, whose machine may do other work.
