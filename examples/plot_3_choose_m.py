"""
Choose M, the window, and the selected keys
===========================================

``num_features`` (M) is how many random features, or landmarks, stand for all keys.
``window`` makes attention exact among near tokens. ``selected_keys`` (K) makes it exact for the keys that matter.
More of each is closer to softmax, and slower. Here is how much.

Queries, keys and values are those of one layer of a pretrained BERT, on 2,048 tokens of Python's documentation.
The model has 512 positions, so they are repeated.
"""

from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import favor
from favor.eval.common.pretrained import minilm_path
from favor.integrations.adapt.observe import observe

LENGTH, LAYERS = 2048, (1, 4)
path = minilm_path()
model = AutoModel.from_pretrained(path).eval()
text = "\n\n".join(topics[name] for name in sorted(topics))
ids = AutoTokenizer.from_pretrained(path)(text, truncation=True, max_length=LENGTH, return_tensors="pt").input_ids
places = torch.arange(LENGTH)[None] % model.config.max_position_embeddings

layers = {}
with torch.no_grad(), observe(model, lambda seen: layers.update({seen.layer: seen})):
    model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=places)
chosen = [seen for number, seen in enumerate(layers.values()) if number in LAYERS]


@torch.no_grad()
def errors(features, **options):
    """Relative errors of the 24 heads of the two layers."""
    found = []
    for seen in chosen:
        out = favor.favor_attention(seen.query, seen.key, seen.value, features=features, scale=seen.scale, **options)
        found.append((out - seen.output).norm(dim=(-2, -1)) / seen.output.norm(dim=(-2, -1)))
    return torch.cat(found).flatten()


# %%
# First M alone. The shaded part holds the middle 80 % of the heads.

sizes = (16, 32, 64, 128, 256, 512)
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True)
LABELS = {"landmark": "landmark, groups alone", "wderf": "favor#", "pos": "favor+"}
for color, (features, label) in enumerate(LABELS.items()):
    rows = torch.stack([errors(features, num_features=size) for size in sizes])
    axes[0].plot(sizes, rows.mean(1), marker="o", color=f"C{color}", label=label)
    axes[0].fill_between(sizes, rows.quantile(0.1, 1), rows.quantile(0.9, 1), color=f"C{color}", alpha=0.15)
axes[0].set(xscale="log", xlabel="M", ylabel="relative error (less is better)", ylim=(0, 1.2), title="M")
axes[0].set_xticks(sizes, sizes)

# %%
# Then a window for M = 64, and selected keys for M = 64.

windows = (0, 16, 32, 64, 128, 256)
for color, (features, label) in enumerate(LABELS.items()):
    means = [errors(features, num_features=64, window=window).mean() for window in windows]
    axes[1].plot(range(len(windows)), means, marker="o", color=f"C{color}", label=label)
axes[1].set(xlabel="window, M = 64", title="window")
axes[1].set_xticks(range(len(windows)), windows)
axes[1].legend()

keys = (0, 64, 128, 256, 512)
rows = torch.stack([errors("landmark", num_features=64, selected_keys=count) for count in keys])
axes[2].plot(range(len(keys)), rows.mean(1), marker="o", color="C0")
axes[2].fill_between(range(len(keys)), rows.quantile(0.1, 1), rows.quantile(0.9, 1), color="C0", alpha=0.15)
axes[2].set(xlabel="selected keys, landmark with M = 64", title="selected keys")
axes[2].set_xticks(range(len(keys)), keys)
for axis in axes:
    axis.grid(alpha=0.3)
figure.tight_layout()
plt.show()

# %%
# Selected keys help the worst heads most: those with one key that matters, far away.

for count, row in zip(keys, rows, strict=True):
    print(f"K = {count:3}: mean error {row.mean():.3f}, worst head {row.max():.3f}")
