"""A language model that is trained in a moment."""

from __future__ import annotations

from typing import Any

import torch

#: Tokens that it knows.
VOCABULARY = 23


def tiny_llama() -> Any:
    """A Llama in fp32 with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train_language_model() -> tuple[Any, torch.Tensor]:
    """A Llama in fp32 that predicts something, and the text, whose rule it has seen, int64 [640]."""
    model = tiny_llama()
    # A token is the sum of the two before it.
    tokens = [1, 2]
    while len(tokens) < 640:
        tokens.append((tokens[-1] + tokens[-2] + len(tokens) // 64) % VOCABULARY)
    text = torch.tensor(tokens)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they only get in the way of a model so small
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        loss = model(text.view(20, 32), labels=text.view(20, 32)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return model.eval(), text
