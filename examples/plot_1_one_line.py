"""
One line, and the error of every head
=====================================

One line gives a pretrained BERT linear attention.
Then this page shows how far each head is from exact attention.

The model is a BERT of 6 layers with 12 heads each. It comes in a Python package, so nothing is downloaded.
The text is the documentation of Python itself.
"""

from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import favor
from favor.eval.common.pretrained import minilm_path
from favor.integrations.adapt.observe import observe

path = minilm_path()
model = AutoModel.from_pretrained(path).eval()
text = "\n\n".join(topics[name] for name in sorted(topics))
tokens = AutoTokenizer.from_pretrained(path)(text, truncation=True, max_length=512, return_tensors="pt")

# %%
# The line is ``favor.configure``. ``exact_below=0`` means: use linear attention at every length.
# Without it 512 tokens would run exact attention, because that is faster at this length.

with torch.no_grad():
    exact = model(**tokens).last_hidden_state.mean(1)
    favor.configure(model, "landmark", num_features=128, selected_keys=128, exact_below=0)
    linear = model(**tokens).last_hidden_state.mean(1)

print(favor.describe(model, length=512))
print(f"cosine of the two embeddings of the text: {torch.cosine_similarity(exact, linear).item():.4f}")

# %%
# Next, the error of each head. ``observe`` runs the model with exact attention and passes on the queries,
# keys and values of each layer. The function below computes attention from them with two families and compares.
# The error is the norm of the difference, divided by the norm of the exact output. Less is better.

METHODS = {"landmark": {"selected_keys": 128}, "pos": {}}
errors = {name: [] for name in METHODS}


def measure(seen):
    """Adds the errors of the 12 heads of one layer."""
    for name, options in METHODS.items():
        found = favor.favor_attention(
            seen.query, seen.key, seen.value, features=name, num_features=128, scale=seen.scale, **options
        )
        difference = (found - seen.output).norm(dim=(-2, -1)) / seen.output.norm(dim=(-2, -1))
        errors[name].append(difference[0])


with torch.no_grad(), observe(model, measure):
    model(**tokens)

# %%
# Dark cells have small errors. ``pos`` is the feature of FAVOR+: without training it is far from softmax.
# Landmarks with selected keys are close in nearly all heads.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for axis, (name, rows) in zip(axes, errors.items(), strict=True):
    table = torch.stack(rows)
    image = axis.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set(title=f"{name}: mean error {table.mean():.2f}", xlabel="head")
    print(f"{name}: mean error {table.mean():.3f}, worst head {table.max():.3f}")
axes[0].set_ylabel("layer")
figure.colorbar(image, ax=axes, label="relative error")
plt.show()
