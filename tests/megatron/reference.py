"""A small mini-batch, and what plain transformers make of it, one sequence at a time."""

from __future__ import annotations

import torch

from tests.sequences import masked_batch, plain_rows

TEMPERATURE = 0.8


def make_batch(vocab: int):
    """Seven ragged sequences, among them a one-token response and an interrupted one."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(4, 9), (3, 1), (6, 14), (2, 5), (9, 3), (5, 7), (4, 4)]
    sequences, masks = [], []
    for prompt, response in lengths:
        sequences.append(torch.randint(2, vocab, (prompt + response,), generator=generator))
        mask = torch.zeros(prompt + response - 1, dtype=torch.long)
        mask[prompt - 1 :] = 1
        masks.append(mask)
    masks[2][9:11] = 0  # a turn of the environment inside the response
    batch = masked_batch(sequences, masks)
    weights_N = torch.randn(batch.responses.tokens, generator=generator)
    return batch, weights_N


def reference(model, batch, weights_N, steps: int = 2) -> dict:
    """Log-probs, entropies, gradients and two AdamW steps of plain transformers, one sequence at a
    time."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )  # large eps: Adam would amplify the rounding of tiny gradients
    result: dict = {"losses": [], "grad_norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        by_row = []
        for tokens, positions in plain_rows(batch):
            log_p = (model(tokens[None]).logits[0].float() / TEMPERATURE).log_softmax(-1)
            by_row.append(
                (log_p[positions, tokens[positions + 1]], -(log_p.exp() * log_p).sum(-1)[positions])
            )
        logprobs, entropies = (torch.cat(values) for values in zip(*by_row, strict=True))
        loss = -(logprobs * weights_N).sum()
        loss.backward()
        if step == 0:
            result |= {"logprobs": logprobs.detach(), "entropies": entropies.detach()}
            result["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        result["losses"].append(loss.item())
        result["grad_norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result
