"""The plain slow versions: each answer alone through the model's own forward, full logits, textbook formulas."""

import torch
from torch.nn.functional import logsigmoid
from training_for_tests import as_reward_model

from hf_posttrain.scoring.forward import Scores
from hf_posttrain.scoring.head import Reward


def token_logps(model, prompt, answer):
    """log p(. | before) at each token of the answer, [answer, V]."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : len(prompt) + len(answer) - 1]


def logp(model, prompt, answer):
    """Summed log-probability of the answer."""
    return token_logps(model, prompt, answer)[torch.arange(len(answer)), answer].sum()


def sft(model, rows, **_):
    total, count = 0.0, 0
    for row in rows:
        table = token_logps(model, row["prompt_ids"], row["completion_ids"])
        for t, (token, trained) in enumerate(zip(row["completion_ids"], row["completion_mask"], strict=True)):
            total, count = total - trained * table[t, token], count + trained
    return total / count


def dpo(model, rows, reference, beta=0.1, **_):
    losses = []
    for row in rows:
        a, c = (
            logp(model, row["prompt_ids"], row[k]) - logp(reference, row["prompt_ids"], row[k]).detach()
            for k in ("chosen_ids", "rejected_ids")
        )
        losses.append(-logsigmoid(beta * (a - c)))
    return sum(losses) / len(losses)


def cpo(model, rows, beta=0.1, cpo_alpha=1.0, **_):
    losses = []
    for row in rows:
        chosen, rejected = (logp(model, row["prompt_ids"], row[k]) for k in ("chosen_ids", "rejected_ids"))
        losses.append(-logsigmoid(beta * (chosen - rejected)) - cpo_alpha * chosen / len(row["chosen_ids"]))
    return sum(losses) / len(losses)


def rm(model, rows, **_):
    model.score = as_reward_model(model).score  # its gradient is compared as well
    losses = []
    for row in rows:
        ids = (torch.tensor([row["prompt_ids"] + row[name]]) for name in ("chosen_ids", "rejected_ids"))
        hidden = (model.base_model(input_ids=part, use_cache=False).last_hidden_state[0, -1] for part in ids)
        chosen, rejected = (model.score(state)[0] for state in hidden)
        losses.append(-logsigmoid(chosen - rejected - row["margin"]))
    return sum(losses) / len(losses)


def kto(model, rows, reference, partner, beta=0.1, **_):
    ratio = lambda prompt, answer: logp(model, prompt, answer) - logp(reference, prompt, answer).detach()  # noqa: E731
    with torch.no_grad():
        pairs = [(row["prompt_ids"], rows[int(partner[i])]["completion_ids"]) for i, row in enumerate(rows)]
        kl = (sum(ratio(*pair) for pair in pairs) / len(pairs)).clamp(min=0)
    losses = []
    for row in rows:
        r = ratio(row["prompt_ids"], row["completion_ids"])
        losses.append(1 - torch.sigmoid(beta * (r - kl) if row["label"] else beta * (kl - r)))
    return sum(losses) / len(losses)


def kd(model, rows, teacher, kd_coef=0.4, **_):
    total, count = 0.0, 0
    for row in rows:
        q = token_logps(model, row["prompt_ids"], row["completion_ids"])
        p = token_logps(teacher, row["prompt_ids"], row["completion_ids"]).detach()
        for t, (token, trained) in enumerate(zip(row["completion_ids"], row["completion_mask"], strict=True)):
            kl = (p[t].exp() * (p[t] - q[t])).sum()
            total, count = total + trained * (-(1 - kd_coef) * q[t, token] + kd_coef * kl), count + trained
    return total / count


def opd(model, rows, teacher, rollouts, **_):
    total, count = 0.0, 0
    for row, answer in zip(rows, rollouts, strict=True):
        q = token_logps(model, row["prompt_ids"], answer)
        p = token_logps(teacher, row["prompt_ids"], answer).detach()
        total, count = total + (q.exp() * (q - p)).sum(), count + len(answer)
    return total / count


PLAIN = {"sft": sft, "dpo": dpo, "cpo": cpo, "rm": rm, "kto": kto, "kd": kd, "opd": opd}


def slow_score(model, batch, tile, weights=None, router_logits=False):
    """What `forward.score` gives of a padded batch: each row alone, through the model's own forward."""
    rows = []
    if isinstance(tile, Reward):
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        return Scores(value=torch.cat([model(input_ids=ids[real][None]).logits[0] for ids, real in pairs]))
    columns = batch["input_ids"], batch["attention_mask"].bool(), batch["shift_labels"]
    for ids, real, targets in zip(*columns, strict=True):
        logits = model(input_ids=ids[real][None], use_cache=False).logits[0].float() / tile.temperature
        trained = targets[real] != -100
        rows.append((logits[trained].log_softmax(-1), targets[real][trained]))
    logps, targets = (torch.cat(parts) for parts in zip(*rows, strict=True))
    value = logps.gather(-1, targets[:, None])[:, 0]
    entropy, correct = -(logps.exp() * logps).sum(-1).detach(), (logps.argmax(-1) == targets).float()
    return Scores(value=value, entropy=entropy, correct=correct)
