"""Samples -> ids: read a row as its method needs it, render, tokenise, cut to size."""

import ast
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, named, shown
from . import chat
from .formats import FORMATS, Sample
from .kinds import RowKind

PROMPT_CUT, COMPLETION_CUT, NO_TARGET, ALIKE = 1, 2, 4, 8


@cache
def code_hash() -> str:
    """Of what makes rows into ids, comments and docstrings aside: other code must not take rows from an old cache."""
    digest = sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [part for part in node.body if not _is_docstring(part)]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Plan(NamedTuple):
    """What the rows become: plain values, so that `datasets` can fingerprint them."""

    method: str
    """As messages call it."""
    rows: RowKind
    form: str
    """Which of FORMATS the raw rows have."""
    name: str
    """What messages call the data set."""
    max_length: int | None
    max_prompt: int | None
    completion_only: bool | None
    assistant_only: bool
    template_kwargs: dict | None
    as_chat: bool = False
    vocabulary: int | None = None
    """Ids that tokenised rows may have, below this."""
    code: str = ""
    """`code_hash`, which ages the cache."""


def read(row: dict, plan: Plan) -> list[Sample]:
    """The samples of a row for this method: KTO splits pairs; OPD splits a conversation at its last turn.

    Raises InputError for a missing column (`datasets` puts None where only some rows of a file have it), for a value of
    the wrong kind, and for ids outside the vocabulary.
    """
    present = [column for column, value in row.items() if value is not None]
    for column in plan.form.split(" + "):
        if column not in present:
            raise InputError(f"column {column!r}: missing or null, this row has {named(present) or 'no columns'}")
    try:
        sample = FORMATS[plan.form](row)
    except RecursionError:
        raise InputError(f"columns {plan.form}: a value is nested too deeply") from None
    if plan.vocabulary is not None:
        top = max((i for part in (sample.prompt, *sample.branches) for i in part), default=0)
        if top >= plan.vocabulary:
            raise InputError(f"columns {plan.form}: token id {top} is none of the tokenizer's {plan.vocabulary}")
    if plan.as_chat and isinstance(sample.prompt, str):
        answers = [[{"role": "assistant", "content": b}] if isinstance(b, str) else b for b in sample.branches]
        sample = sample._replace(prompt=[{"role": "user", "content": sample.prompt}], branches=answers)
    for answer in sample.branches if isinstance(sample.prompt, list) and "_ids" not in plan.form else []:
        if isinstance(answer, list) and answer[0]["role"] != "assistant":
            role = shown(answer[0]["role"])
            raise InputError(f"columns {plan.form}: a completion begins with the turn of {role}, expected 'assistant'")
    parts = [part for part in (sample.prompt, *sample.branches) if part is not None]
    if len({type(part) for part in parts}) > 1:
        raise InputError(f"columns {plan.form}: some are strings and some are lists of messages, expected one kind")
    if plan.rows.labelled and len(sample.branches) == 2:
        chosen, rejected = sample.branches
        return [sample._replace(branches=[b], label=label) for b, label in ((chosen, True), (rejected, False))]
    if plan.rows.sampled and sample.prompt is None:
        turns = sample.branches[0]
        answered = turns[-1]["role"] == "assistant" and len(turns) > 1
        return [sample._replace(prompt=turns[:-1], branches=[turns[-1:]]) if answered else
                sample._replace(prompt=turns, branches=[])]  # fmt: skip
    return [sample]


def encode(samples: list[Sample], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> list[Sample]:
    """Raw samples -> ids. All are plain text or all are messages; the whole batch is tokenised together."""
    first = _first_part(samples[0])
    with error_context(plan.name):
        is_chat = isinstance(first, list)
        end_id = chat.turn_end_id(tokenizer, plan.template_kwargs) if is_chat else chat.eos_id(tokenizer)
    texts = []
    for sample, row in zip(samples, rows, strict=True):
        with error_context(f"{plan.name}, row {row}"):
            if type(_first_part(sample)) is not type(first):
                raise InputError(f"columns {plan.form}: some rows hold plain text and some hold messages")
            texts.append(_assistant_ids(sample, tokenizer, plan) if plan.assistant_only else
                         _text(sample, tokenizer, plan))  # fmt: skip
    if plan.assistant_only:
        return texts
    prompts = [text.prompt for text in texts for _ in text.branches or [""]]
    completions = [branch for text in texts for branch in text.branches or [""]]
    pairs = iter(chat.encode_pairs(tokenizer, prompts, completions, end_id))
    encoded = []
    for text, row in zip(texts, rows, strict=True):
        mine = [next(pairs) for _ in text.branches or [""]]
        branches = [ids for _, ids in mine][: len(text.branches)]
        if [end_id] in branches:
            how = " as the chat template writes it" if is_chat else ""
            raise InputError(f"{plan.name}, row {row}: columns {plan.form}: the completion is empty{how}")
        encoded.append(text._replace(prompt=mine[0][0], branches=branches))
    return encoded


def _first_part(sample: Sample) -> Any:
    return sample.branches[0] if sample.prompt is None else sample.prompt


def _text(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Sample:
    """Messages -> text; plain strings stay as they are. A whole text is a branch of the empty prompt."""
    options = (sample.tools, plan.template_kwargs)
    if isinstance(_first_part(sample), str):
        return sample._replace(prompt=sample.prompt or "")
    if sample.prompt is None:
        return sample._replace(prompt="", branches=[chat.render(tokenizer, sample.branches[0], *options)])
    if not sample.branches:
        return sample._replace(prompt=chat.prompt_text(tokenizer, sample.prompt, *options))
    pairs = [chat.split_chat(tokenizer, sample.prompt, branch, *options) for branch in sample.branches]
    return sample._replace(prompt=pairs[0][0], branches=[text for _, text in pairs])


def _assistant_ids(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Sample:
    """Ids and mask of what assistants wrote: in the completion where there is one, otherwise everywhere."""
    options = (sample.tools, plan.template_kwargs)
    if isinstance(_first_part(sample), str):
        raise InputError(f"assistant_only_loss needs messages, {plan.form} holds plain text")
    if sample.prompt is None:
        ids, mask = chat.assistant_mask(tokenizer, sample.branches[0], *options)
        return Sample([], [ids], mask=mask)
    ids, mask = chat.assistant_mask(tokenizer, chat.join_messages(sample.prompt, sample.branches[0]), *options)
    if plan.completion_only is not False:
        context = len(chat.encode(tokenizer, [chat.prompt_text(tokenizer, sample.prompt, *options)])[0])
        mask = [0] * context + mask[context:]
    return Sample([], [ids], mask=mask)


def context(sample: Sample, plan: Plan) -> Sample:
    """`sample` with at least one prompt token. SFT and KD without a prompt, or with every token trained, take what
    stands before the first trained token, at least one; the other methods refuse an empty prompt."""
    prompt, branches = sample.prompt, sample.branches
    if not plan.rows.sampled and not all(branches):
        raise InputError(f"columns {plan.form}: empty completion")
    if plan.rows.needs_prompt:
        if not prompt:
            raise InputError(f"columns {plan.form}: empty prompt, {plan.method} needs a prompt of at least one token")
        return sample
    ids = prompt + branches[0]
    mask = [int(plan.completion_only is False)] * len(prompt) + (sample.mask or [1] * len(branches[0]))
    n = len(prompt) if prompt and plan.completion_only is not False else max(1, mask.index(1) if 1 in mask else 1)
    return sample._replace(prompt=ids[:n], branches=[ids[n:]], mask=mask[n:])


def fit(sample: Sample, plan: Plan) -> tuple[Sample, int]:
    """The sample cut to size, and bits that say what it is then: PROMPT_CUT, COMPLETION_CUT; NO_TARGET where nothing is
    left to train; ALIKE where both branches are the same."""
    prompt, branches, mask = sample.prompt, sample.branches, sample.mask
    if plan.max_prompt is not None:
        prompt = prompt[-plan.max_prompt :]
    elif plan.max_length is not None and not plan.rows.sampled:
        prompt = prompt[-max(1, plan.max_length - max(map(len, branches))) :]
        branches = [branch[: plan.max_length - 1] for branch in branches]
        mask = mask and mask[: plan.max_length - 1]
    lost = not plan.rows.sampled and not (all(branches) and (mask is None or any(mask)))
    bits = PROMPT_CUT * (prompt != sample.prompt) + COMPLETION_CUT * (branches != sample.branches) + NO_TARGET * lost
    alike = len(branches) == 2 and branches[0] == branches[1]
    return sample._replace(prompt=prompt, branches=branches, mask=mask), bits + ALIKE * alike
