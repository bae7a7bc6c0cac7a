"""Log-probabilities of a model as vLLM records them with `return_tokens_as_token_ids`."""

import torch


def recorded(model, ids, count, k):
    """Entries of the last `count` tokens: the token itself first, and the k most likely ones, so K or K + 1 of them."""
    with torch.no_grad():
        logps = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    entries = []
    for row, own in zip(logps[-count - 1 : -1], ids[-count:], strict=True):
        likely = row.topk(min(k, len(row))).indices.tolist()
        entries.append([
            {"token": f"token_id:{i}", "logprob": row[i].item()} for i in dict.fromkeys([own, *likely])
        ])  # fmt: skip
    return entries


def as_completion(entries):
    """The same as `logprobs` of a choice of a chat completion."""
    return {"content": [entry and {**entry[0], "bytes": None, "top_logprobs": entry} for entry in entries]}
