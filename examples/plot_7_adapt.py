"""
Adapt a model to its attention
==============================

``favor.calibrate`` learns the parameters of the features from a few thousand tokens. It does not change the model's
weights. It can fix the parameters of each head, and learn a weight for each feature.
This page shows what each step gains on text that was not used for learning.

To keep the page fast the model is the first two layers of a pretrained BERT.
"""

from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import favor
from favor.eval.common.pretrained import minilm_path

path = minilm_path()
tokenizer = AutoTokenizer.from_pretrained(path)
text = "\n\n".join(topics[name] for name in sorted(topics))
ids = tokenizer(text, truncation=True, max_length=40 * 256, return_tensors="pt").input_ids.view(40, 256)
seen, unseen = ids[:8], ids[32:]


def load():
    """The first two layers."""
    return AutoModel.from_pretrained(path, num_hidden_layers=2).eval()


@torch.no_grad()
def embeddings(model):
    """Mean hidden state of each sample that was not seen."""
    return model(input_ids=unseen).last_hidden_state.mean(1)


exact = embeddings(load())
OPTIONS = {"num_features": 64, "exact_below": 0}


def distance(model):
    """Mean of 1 - cosine to the exact embeddings."""
    return (1 - torch.cosine_similarity(exact, embeddings(model))).mean().item()


# %%
# Six attentions. They differ in how much is learned without changing the model's weights.

results = {
    "favor+": distance(favor.configure(load(), "favor+", **OPTIONS)),
    "favor#, fitted to each text": distance(favor.configure(load(), "favor#", **OPTIONS)),
    "favor#, calibrated": distance(favor.calibrate(load(), [seen], **OPTIONS)),
    "favor#, weights of features": distance(
        favor.calibrate(load(), [seen], feature_weights=True, refine_steps=0, **OPTIONS)
    ),
    "favor#, weights and matrices": distance(
        favor.calibrate(load(), [seen], feature_weights=True, refine_steps=60, **OPTIONS)
    ),
    "landmark, nothing to learn": distance(favor.configure(load(), "landmark", selected_keys=0, **OPTIONS)),
}
for name, value in results.items():
    print(f"{name:30} {value:.4f}")

# %%
# Calibrated parameters are the same for every text. Causal layers can use them, because they show nothing of later
# tokens. An encoder does better with parameters of each text, unless weights of features are learned too.

figure, axis = plt.subplots(figsize=(7, 3))
axis.barh(list(results), list(results.values()), color=["C3", "C1", "C1", "C0", "C0", "C2"])
axis.invert_yaxis()
axis.set(xlabel="1 - cosine to the exact embedding (less is better)")
figure.tight_layout()
plt.show()
