"""
Choose M, the window, and the selected keys
===========================================

``num_features`` (M) is the number of random features, or of means of landmarks, that replace all keys.
``window`` makes attention by random features exact among near tokens. ``selected_keys`` (K) makes landmarks exact for
the keys that matter. A larger value of each is closer to softmax, and slower. This page shows how much closer.

Queries, keys and values are from two layers of a pretrained BERT, on 2,048 tokens of Python's documentation.
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
    """Relative errors of the 24 heads of the two layers; landmarks are means alone, if nothing else is said."""
    found = []
    if features == "landmark":
        options = {"selected_keys": 0, **options}
    for seen in chosen:
        out = favor.favor_attention(seen.query, seen.key, seen.value, features=features, scale=seen.scale, **options)
        found.append((out - seen.output).norm(dim=(-2, -1)) / seen.output.norm(dim=(-2, -1)))
    return torch.cat(found).flatten()


# %%
# First M alone. The shaded area contains the middle 80 % of the heads.

LABELS = {"landmark": "landmark, means alone", "wderf": "favor#", "pos": "favor+"}


def draw(axis, values, rows, label, color):
    """Draws a line through the means of the rows, and shades the middle 80 % of the heads."""
    axis.plot(range(len(values)), rows.mean(1), marker="o", color=color, label=label)
    axis.fill_between(range(len(values)), rows.quantile(0.1, 1), rows.quantile(0.9, 1), color=color, alpha=0.15)
    axis.set_xticks(range(len(values)), values)
    axis.set(ylim=(0, 1.2), ylabel="relative error (less is better)")
    axis.grid(alpha=0.3)


sizes = (16, 32, 64, 128, 256, 512)
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
for color, (features, label) in enumerate(LABELS.items()):
    rows = torch.stack([errors(features, num_features=size) for size in sizes])
    draw(axis, sizes, rows, label, f"C{color}")
axis.set_xlabel("M")
axis.legend()
plt.show()

# %%
# Next a window, for random features with M = 64. A window as long as the text would be exact attention.

windows = (0, 16, 32, 64, 128, 256)
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
for features, color in (("wderf", "C1"), ("pos", "C2")):
    rows = torch.stack([errors(features, num_features=64, window=window) for window in windows])
    draw(axis, windows, rows, LABELS[features], color)
axis.set_xlabel("window")
axis.legend()
plt.show()

# %%
# Last, selected keys, for ``landmark`` with M = 256. 768 are its default.
# They help the worst heads most, in which few keys matter.

keys = (0, 64, 128, 256, 512, 768, 1024)
rows = torch.stack([errors("landmark", num_features=256, selected_keys=count) for count in keys])
for count, row in zip(keys, rows, strict=True):
    print(f"K = {count:4}: mean error {row.mean():.3f}, worst head {row.max():.3f}")
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
draw(axis, keys, rows, "landmark", "C0")
axis.set_xlabel("selected keys")
plt.show()
