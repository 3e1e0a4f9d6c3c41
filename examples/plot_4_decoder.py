"""
A decoder that writes with a state of fixed size
================================================

Exact attention keeps the keys and values of all tokens. With random features and ``favor.FavorCache`` a decoder
keeps a state whose size does not grow, so the thousandth token costs what the first one did.

A very small decoder is trained on Python's documentation, byte by byte. Then it writes with exact attention, with
``favor#``, and with ``landmark``, which keeps all keys and reads few of them.
"""

import time
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import favor

text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
data = torch.tensor(list(text.encode()))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=3,
    max_position_embeddings=16384,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(150):
    starts = torch.randint(len(data) - 128, (8,))
    batch = data[starts[:, None] + torch.arange(128)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print(f"loss after 150 steps: {loss.item():.2f} nats per byte (without training: {torch.tensor(256).log():.2f})")

# %%
# The attention is switched after training, so the weights are the same. ``favor#`` needs parameters first: a causal
# layer may not take them from its own text, so ``favor.calibrate`` fixes them. A window makes near tokens exact.
# With each attention the model reads the same text and writes 80 bytes. It was trained on pieces of 128 bytes and
# reads longer ones here, so any of them may have the lowest loss.


def try_it(cache):
    """Loss on the last 2,048 bytes, and 80 bytes that the model writes after the first 512."""
    with torch.no_grad():
        loss = model(input_ids=data[None, -2048:], labels=data[None, -2048:]).loss.item()
    prompt = data[None, :512]
    torch.manual_seed(0)
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80, do_sample=True, past_key_values=cache
    )
    return f"{loss:.3f} {bytes(ids[0, 512:].tolist()).decode(errors='replace')!r}"


print("exact:   ", try_it(DynamicCache(config=model.config)))
favor.configure(model, "landmark", exact_below=0)
print("landmark:", try_it(favor.FavorCache(model.config)))
favor.calibrate(model, [data[:8192].view(8, 1024)], num_features=64, window=64, exact_below=0)
print("favor#:  ", try_it(favor.FavorCache(model.config)))

# %%
# The model is too small to write text that makes sense. The next plot shows the cost of a token after a long context.


def cost(backend, cache, length):
    """MB of the cache after ``length`` tokens, and milliseconds for one more token."""
    model.set_attn_implementation(backend)
    with torch.no_grad():
        model(input_ids=data[None, :length], past_key_values=cache, use_cache=True)
        for count in range(9):
            if count == 1:
                start = time.perf_counter()
            model(input_ids=data[None, length + count : length + count + 1], past_key_values=cache, use_cache=True)
    held = getattr(cache, "nbytes", None)
    if held is None:
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return held / 1e6, 1000 * (time.perf_counter() - start) / 8


lengths = (1024, 2048, 4096, 8192, 16000)
rows = {
    "exact": [cost("sdpa", DynamicCache(config=model.config), length) for length in lengths],
    "favor#, state": [cost("favor#", favor.FavorCache(model.config), length) for length in lengths],
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
for name, row in rows.items():
    for length, (held, milliseconds) in zip(lengths, row, strict=True):
        print(f"{name:16} after {length:6,} tokens: {held:6.2f} MB, {milliseconds:5.1f} ms per token")
    axes[0].plot(lengths, [held for held, _ in row], marker="o", label=name)
    axes[1].plot(lengths, [ms for _, ms in row], marker="o", label=name)
axes[0].set(xlabel="tokens before", ylabel="MB of the cache", title="memory")
axes[1].set(xlabel="tokens before", ylabel="milliseconds per token", title="time", ylim=(0, None))
axes[0].legend()
figure.tight_layout()
plt.show()
