"""Part f: greedy generation by batch size, ours and transformers' `generate`, with the 0.6B shape in bf16.

`adapter` is ours with a LoRA adapter of random weights, in float32 under bf16 autocast: as OPD with LoRA generates.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import peft
import torch

from hf_posttrain.generation import graphs, rollout
from hf_posttrain.scoring.forward import causal_lm

from .models import build
from .settings import Settings, measure_call
from .supervisor import Case, Record

BATCHES = (64, 256, 8)
NEAR_BEST = 0.25
"""How far below the largest logit a greedy token's logit may be, when a forward over the whole row computes it again.
Logits of 0.6 standard deviations are rounded to bf16; a wrong context gives 4, positions that are wrong by a factor of
two 0.4."""
CHECKED_ROWS = 4


def cases(settings: Settings) -> list[Case]:
    """One process for each way of generation, which goes through the batch sizes."""
    return [Case(by, partial(measure, settings, by), settings.pick(30, None)) for by in GENERATE]


def measure(settings: Settings, by: str) -> Iterator[Record]:
    """Yield new tokens per second and memory by batch size, if the tokens are the most likely ones."""
    prompt_length, new_tokens = settings.pick((256, 128), (16, 8))
    logging.basicConfig(level=logging.INFO)  # why a model decodes without CUDA graphs
    model = build(settings, ours=by != "transformers").eval()
    autocast = torch.autocast(settings.device, torch.bfloat16, enabled=by == "adapter")
    if by == "adapter":
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model.float(), config)
    yield autocast(check_rows_that_end)(settings, by, model)
    for rows in settings.pick(BATCHES, (4, 2)):
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(2, settings.vocabulary, (rows, prompt_length), generator=draw).tolist()
        run = autocast(partial(GENERATE[by], model, prompts, new_tokens))
        completions = run()
        gap = autocast(worst_gap)(model, prompts[:CHECKED_ROWS], completions[:CHECKED_ROWS])
        right = gap <= NEAR_BEST and all(len(ids) == new_tokens for ids in completions)
        record: Record = {"by": by, "rows": rows, "new_tokens": new_tokens, "gap": gap, "right": right}
        record["way"] = getattr(causal_lm(model), "generation_backend", ("", 0))[0]
        if right:
            cost = measure_call(settings.device, run, 1, warm_up=False)
            record |= {"peak_gib": cost.peak_gib, "added_gib": cost.added_gib}
            record |= {"tokens_per_second": rows * new_tokens / cost.seconds}
            record["ms_per_step"] = 1e3 * cost.seconds / new_tokens
        yield record


def check_rows_that_end(settings: Settings, by: str, model: Any) -> Record:
    """Generate rows that end at different tokens, with buffers that are lengthened twice, and check the tokens."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, settings.vocabulary, (n,), generator=draw).tolist() for n in (3, 40, 7, 25) * 2]
    new_tokens = settings.pick(64, 40)
    chunk = graphs.COLUMN_CHUNK
    graphs.COLUMN_CHUNK = 16
    try:
        free = GENERATE[by](model, prompts, new_tokens)
        ends = [free[0][4], free[1][20], free[2][35]]
        completions = GENERATE[by](model, prompts, new_tokens, ends)
    finally:
        graphs.COLUMN_CHUNK = chunk
    gap = worst_gap(model, prompts, completions)
    ended = [ids[-1] in ends for ids in completions]
    right = gap <= NEAR_BEST and all(token not in ends for ids in completions for token in ids[:-1])
    lengths = [len(ids) for ids in completions]
    return {"check": "rows that end", "gap": gap, "ended": sum(ended), "lengths": lengths, "right": right}


@torch.no_grad()
def worst_gap(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> float:
    """Return the largest difference between the best logit and that of the chosen token, over all tokens."""
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion], device=model.device)
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append(logits.amax(-1) - chosen)
    return torch.cat(gaps).amax().item()


def ours(model: Any, prompts: list[list[int]], new_tokens: int, ends: Sequence[int] = ()) -> list[list[int]]:
    """Generate as OPD and evaluation do."""
    return rollout.generate(model, prompts, new_tokens, list(ends), pad_id=1)


def transformers(model: Any, prompts: list[list[int]], new_tokens: int, ends: Sequence[int] = ()) -> list[list[int]]:
    """Generate by `model.generate`."""
    ids, mask = rollout.left_pad(prompts, 1, model.device)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": list(ends) or None, "pad_token_id": 1}
    found = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()
    return [rollout.truncate_at_terminal(row, ends) for row in found]


GENERATE = {"ours": ours, "adapter": ours, "transformers": transformers}
