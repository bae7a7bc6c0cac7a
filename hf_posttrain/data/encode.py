"""Samples -> ids: read a row as its method needs it, render, tokenise, cut to size."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, named, shown
from . import chat, images
from .assistant_mask import ASKED, assistant_mask
from .formats import Sample, add_system, read_format, read_label, read_template_kwargs
from .messages import are_written_messages, text_of, with_reasoning
from .row_schema import RowKind
from .teacher_prompts import TeacherPlan, for_teacher, read_teacher

PROMPT_CUT = 1
COMPLETION_CUT = 2
NO_TARGET = 4
ALIKE = 8
CHAT = 16
OTHERS = 32
PICTURE_CUT = 64
CUT = PROMPT_CUT | COMPLETION_CUT
"""Bits of a row's state: what `fit` cut; nothing is left to train; both branches are the same; it was messages; turns
of users or tools count as a part of an answer; a picture would be cut, so that the row is left out."""
MARKS = {"weight": "0 or 1", "train": "true or false"}
"""Keys of a turn that say whether it is trained, in the manner of OpenAI and others, and what they may be."""
VERSION = 13
"""Of the ids that rows become, by which `datasets` caches them: raise it with a change that makes other ids of the same
rows (a test sees such a change), or users train on what an older version has cached."""


class Plan(NamedTuple):
    """What the rows become: plain values, so that `datasets` can fingerprint them."""

    method: str  # as messages call it
    rows: RowKind
    form: str  # the format of the raw rows
    name: str  # what messages call the data set
    max_length: int | None = None  # of prompt and longest answer; of the prompt alone where answers are sampled
    completion_only: bool | None = None
    assistant_only: bool = False
    template_kwargs: dict | None = None
    as_chat: bool = False
    vocabulary: int | None = None  # rows that are ids already have them below this
    bos: int | None = None  # the id that a prompt keeps at its beginning when it is cut
    masks: tuple[str, ...] = ()  # columns of masks, which rows of ids all have or all lack
    teacher: TeacherPlan | None = None  # what rows hold for teachers besides
    last_turn: bool = False  # of what assistants wrote, the last turn alone
    image_ids: tuple[int, ...] = ()  # tokens that become features of pictures, where the model sees
    image_folder: str | None = None  # where relative paths of pictures start
    reasoning: str | None = None  # keep or drop what assistants thought
    asked: bool = False  # is the raw prompt kept next to its ids, for what judges answers?
    version: int = VERSION


def read(row: dict, plan: Plan) -> list[Sample]:
    """The samples of a row for this method: one, or of labelled rows two where the row is a pair.

    Raises InputError for a missing column, for a value of the wrong kind, for ids outside the vocabulary, and for
    pictures in plain text or in one of several answers.
    """
    if not plan.image_ids:
        return _read(row, plan)
    row, pictures = images.take_pictures(row, plan.form, plan.image_folder)
    samples = _read(row, plan)
    for sample in samples if pictures and "_ids" not in plan.form else ():
        if not sample.is_chat:
            raise InputError("a row with pictures needs messages: set apply_chat_template: true, or write messages")
        if sample.prompt is not None and images.MARK in text_of(sample.branches):
            raise InputError("a picture stands in an answer: they may stand before it alone")
    return [sample._replace(pictures=tuple(pictures)) for sample in samples]


def _read(row: dict, plan: Plan) -> list[Sample]:
    """`read` of a row with MARK in the place of pictures."""
    # `datasets` puts None where only some rows of a file have a column
    present = [column for column, value in row.items() if value is not None]
    for column in (*plan.form.split(" + "), *plan.masks):
        if column not in present:
            raise InputError(f"column {column!r}: missing or null, this row has {named(present) or 'nothing else'}")
    try:
        sample = read_format(row, plan.form)
    except RecursionError:
        raise InputError(f"columns {plan.form}: a value is nested too deeply") from None
    if plan.vocabulary is not None:
        top = max((i for part in (sample.prompt, *sample.branches) for i in part), default=0)
        if top >= plan.vocabulary:
            raise InputError(f"columns {plan.form}: token id {top} is none of the tokenizer's {plan.vocabulary}")
    # plain strings become turns where apply_chat_template asks for it; so do right answers, which are not trained
    if to_turns := plan.as_chat and isinstance(sample.prompt, str):
        sample = sample._replace(prompt=[{"role": "user", "content": sample.prompt}])
    if to_turns or (plan.rows.sampled and sample.is_chat):
        answers = [[{"role": "assistant", "content": b}] if isinstance(b, str) else b for b in sample.branches]
        sample = sample._replace(branches=answers)
    # a system turn that stands in a column of its own, and tools, which plain text has no place for
    with_columns = "_ids" not in plan.form and plan.form != "text"
    if row.get("system") and with_columns:
        with error_context("column 'system'"):
            sample = add_system(sample, row["system"])
    # options for the template are the row's before those of all rows
    own = {}
    if row.get("chat_template_kwargs") and with_columns:
        with error_context("column 'chat_template_kwargs'"):
            own = read_template_kwargs(row["chat_template_kwargs"])
    sample = sample._replace(template_kwargs=(plan.template_kwargs or {}) | own)
    if (sample.tools or own) and not sample.is_chat:
        column = "tools" if sample.tools else "chat_template_kwargs"
        instead = "set apply_chat_template: true, or drop them"
        raise InputError(f"column {column!r}: the row is plain text otherwise: {instead}")
    # prompt and answers are one kind, and answers of messages begin with an assistant's
    if sample.is_chat and sample.prompt is not None:
        roles = [answer[0]["role"] for answer in sample.branches if isinstance(answer, list)]
        if wrong := [role for role in roles if role != "assistant"]:
            begin = f"a completion begins with the turn of {shown(wrong[0])}"
            raise InputError(f"columns {plan.form}: {begin}, expected 'assistant'")
    if len({type(part) for part in (sample.prompt, *sample.branches) if part is not None}) > 1:
        raise InputError(f"columns {plan.form}: some are strings and some are lists of messages, expected one kind")
    # turns that are marked as not to be trained, in the manner of OpenAI and others
    if sample.is_chat and not plan.rows.sampled:
        turns = [turn for branch in sample.branches for turn in branch]
        for turn, (mark, wanted) in product(turns, MARKS.items()):
            if (value := turn.get(mark)) not in (None, 0, 1):  # False is 0
                raise InputError(f"columns {plan.form}: a turn has {mark}: {shown(value)}, expected {wanted}")
        marked = [turn["role"] for turn in turns if _is_left_out(turn)]
        if marked and not plan.assistant_only:
            mend = "set train_on: assistant, which leaves it out, or make it a part of a prompt"
            raise InputError(f"columns {plan.form}: a turn of {shown(marked[0])} has weight: 0 or train: false: {mend}")
    # a pair is two labelled examples
    if plan.rows.labelled and len(sample.branches) == 2:
        chosen, rejected = sample.branches
        return [sample._replace(branches=[b], label=label) for b, label in ((chosen, True), (rejected, False))]
    whole = plan.rows.masked and sample.prompt is None and sample.is_chat
    if whole and not any(turn["role"] == "assistant" for turn in sample.branches[0]):
        raise InputError(f"column {plan.form!r}: no turn is an assistant's, so there is no answer to train")
    # where answers are sampled, the last turn of a conversation is its answer; one that is labelled false is none
    if plan.rows.sampled and sample.prompt is None:
        turns = sample.branches[0]
        answered = turns[-1]["role"] == "assistant" and len(turns) > 1
        prompt, answers = (turns[:-1], [turns[-1:]]) if answered else (turns, [])
        sample = sample._replace(prompt=prompt, branches=answers)
    if plan.rows.sampled and row.get("label") is not None and not read_label(row["label"]):
        sample = sample._replace(branches=[], mask=None)
    return [sample]


def _is_left_out(turn: Mapping) -> bool:
    """Is a turn marked as not to be trained, in the manner of OpenAI and others?"""
    return any(turn.get(mark) == 0 for mark in MARKS)


def _without_marks(turns: Sequence[Mapping]) -> list[dict]:
    """The turns without what says whether they are trained, which no template writes."""
    return [{key: value for key, value in turn.items() if key not in MARKS} for turn in turns]


def kind_of(sample: Sample, plan: Plan) -> int:
    """The bits CHAT and OTHERS that are true of a raw sample."""
    answered = sample.is_chat and sample.prompt is not None and not plan.rows.sampled and not plan.assistant_only
    roles = {turn["role"] for turns in sample.branches for turn in turns} if answered else set()
    return CHAT * sample.is_chat + OTHERS * bool(roles - {"assistant"})


def refuse_misread(
    columns: Mapping[str, Sequence], samples: list[Sample], plan: Plan, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raises InputError where all of the first 20 rows say that they hold something else than what is read: texts that
    are messages, as a data frame's to_csv leaves them, answers with their prompts, or, with the tokenizer, prompts that
    have gone through the chat template already. columns: the raw values.
    """
    for column in plan.form.split(" + "):
        texts = columns[column][:20]
        if len(texts) > 1 and all(map(are_written_messages, texts)):
            parse = "make lists of them with json.loads, or ast.literal_eval if Python printed them"
            meant = "if such a text is the answer, give lists of messages with it as content"
            problem = f"column {column!r}: {shown(texts[0])} is messages written as text: {parse}; {meant}"
            raise InputError(f"{plan.name}: {problem}")
    # whole texts begin with their prompts, of 20 characters in the mean: one answer may repeat its question, and any a
    # prompt as short as "Hi"
    pairs = [(text_of(s.prompt).strip(), text_of(branch).lstrip()) for s in samples[:20] for branch in s.branches]
    whole = len(samples) > 1 and all(len(text) > len(asked) and text.startswith(asked) for asked, text in pairs)
    if whole and pairs and sum(len(asked) for asked, _ in pairs) >= 20 * len(pairs):
        other = ", or leave it out (columns: {unused: prompt})" if "chosen" in plan.form else ""
        raise InputError(f"{plan.name}: columns {plan.form}: answers begin with the whole prompt: cut it off{other}")
    if plan.as_chat and tokenizer is not None:
        _refuse_rendered(columns, tokenizer, plan)


def _refuse_rendered(columns: Mapping[str, Sequence], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> None:
    """Raises InputError where all of the first 20 prompts, plain text that shall go through the chat template, hold
    what it writes. columns: the raw values.
    """
    column = next((name for name in plan.form.split(" + ") if name in ("prompt", "instruction")), None)
    prompts = columns[column][:20] if column else []  # messages may hold the prompt
    tokens: Sequence[str] = ()
    with suppress(InputError):  # of a template that takes no such turn alone
        tokens = tokenizer.convert_ids_to_tokens(sorted(chat.template_token_ids(tokenizer, plan.template_kwargs)))
    found = [next((token for token in tokens if token in text_of(prompt)), None) for prompt in prompts]
    if len(found) > 1 and all(found) and all(isinstance(prompt, str) for prompt in prompts):
        why = f"the prompts hold {shown(found[0])}, which the chat template writes"
        raise InputError(f"{plan.name}: {why}: they have gone through it already: set apply_chat_template: false")


def encode(samples: list[Sample], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> list[Sample]:
    """Raw samples, all plain text or all messages -> ids. rows: the number of each sample's raw row, for errors."""
    is_chat = samples[0].is_chat
    texts = []
    with error_context(plan.name):
        end_id = chat.turn_end_id(tokenizer, plan.template_kwargs) if is_chat else chat.eos_id(tokenizer)
    for sample, row in zip(samples, rows, strict=True):
        with error_context(f"{plan.name}, row {row}"):
            if sample.is_chat is not is_chat:
                raise InputError(f"columns {plan.form}: some rows hold plain text and some hold messages")
            if is_chat and plan.reasoning:
                sample = _with_reasoning(sample, tokenizer, plan.reasoning)
            texts.append((_assistant_ids if plan.assistant_only else _text)(sample, tokenizer, plan))
    if plan.assistant_only:
        return texts
    # every branch is tokenised with its prompt; a prompt without answers, with an empty one
    pairs = [(text.prompt, branch) for text in texts for branch in text.branches or [""]]
    own = chat.special_ids(tokenizer) if is_chat else frozenset()  # a call may have another end than an answer
    ids = iter(chat.encode_pairs(tokenizer, [p for p, _ in pairs], [b for _, b in pairs], end_id, own))
    encoded = []
    for text in texts:
        mine = [next(ids) for _ in text.branches or [""]]
        branches = [completion for _, completion in mine][: len(text.branches)]
        # an answer that is its end alone is empty, which leaves nothing to train
        encoded.append(text._replace(prompt=mine[0][0], branches=[[] if b == [end_id] else b for b in branches]))
    return encoded


def teachers_prompts(
    raw: Sequence[Mapping],
    samples: Sequence[Sample],
    rows: list[int],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    asked: TeacherPlan,
) -> dict[str, list]:
    """Columns for the teachers of raw samples, of which `raw` has the rows and `rows` their numbers."""
    teachers = []
    prompts = []
    own = plan._replace(assistant_only=False)
    for row, sample, number in zip(raw, samples, rows, strict=True):
        with error_context(f"{plan.name}, row {number}"):
            if asked.tokenizers and not all(sample.mask or ()):
                raise InputError("a teacher with its own tokenizer trains whole answers, and the row masks some of one")
            teacher = read_teacher(row, asked)
            given = row.get("teacher_prompt_ids") or []
            if "_ids" not in plan.form:
                other = for_teacher(row, sample, asked, teacher)
                theirs = asked.tokenizers.get(teacher, tokenizer)
                given = [] if other is None else encode([other], [number], theirs, own)[0].prompt
            elif not given and (teacher in asked.prompts or teacher in asked.tokenizers):
                raise InputError("column 'teacher_prompt_ids': missing, and rows of ids have nothing to make it from")
        teachers.append(teacher)
        prompts.append(given)
    return {"teacher": teachers, "teacher_prompt_ids": prompts}


def _with_reasoning(sample: Sample, tokenizer: PreTrainedTokenizerBase, wanted: str) -> Sample:
    """A sample of messages with what assistants thought kept as the template reads it, or dropped."""
    key = chat.reasoning_key(chat.ChatTemplate(tokenizer, sample.tools).text) if tokenizer.chat_template else None
    prompt, *branches = (turns and with_reasoning(turns, wanted, key) for turns in (sample.prompt, *sample.branches))
    return sample._replace(prompt=prompt, branches=branches)


def _text(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Sample:
    """Messages -> text; plain strings stay as they are. A whole text is a branch of the empty prompt. White space at
    the end of a rendering is dropped: an end token that is appended would follow it.
    """
    template = chat.ChatTemplate(tokenizer, sample.tools, sample.template_kwargs, sample.expansions)
    if _is_empty(sample):
        sample = sample._replace(prompt="", branches=["" for _ in sample.branches])
    if not sample.is_chat:
        return sample._replace(prompt=sample.prompt or "")
    if sample.prompt is None:
        pairs = [("", template.render(sample.branches[0]).rstrip())]
        chats = sample.branches
    elif not sample.branches:
        pairs = [(template.prompt_text(sample.prompt), "")]
        chats = [sample.prompt]
    else:
        pairs = [template.split(sample.prompt, branch) for branch in sample.branches]
        chats = [chat.join_messages(sample.prompt, branch) for branch in sample.branches]
    unread = {
        what
        for turns, (start, rest) in zip(chats, pairs, strict=True)
        for what in template.find_unread(turns, start + rest)
    }
    branches = [text for _, text in pairs] if sample.branches else []
    return sample._replace(prompt=pairs[0][0], branches=branches, unread=tuple(sorted(unread)))


def _assistant_ids(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Sample:
    """Ids and mask of what assistants wrote: in the completion where there is one, otherwise everywhere."""
    if not sample.is_chat:
        raise InputError(f"{ASKED} needs messages, {plan.form} holds plain text")
    if _is_empty(sample):
        return sample._replace(prompt=[], branches=[[]])
    template = chat.ChatTemplate(tokenizer, sample.tools, sample.template_kwargs, sample.expansions)
    turns = sample.branches[0] if sample.prompt is None else chat.join_messages(sample.prompt, sample.branches[0])
    # which turns are trained; what marks them is no part of the messages
    chosen = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and not _is_left_out(turn)]
    chosen = chosen[-1:] if plan.last_turn else chosen
    whole = len(chosen) == sum(turn["role"] == "assistant" for turn in turns)
    turns = _without_marks(turns)
    full = template.render(turns).rstrip()
    unread = tuple(template.find_unread(turns, full))
    ids, mask = assistant_mask(template, turns, full, None if whole else chosen)
    if sample.prompt is not None and plan.completion_only is not False:
        start = template.prompt_text(_without_marks(sample.prompt))
        chat.text_behind(start, full)  # or the answer would not begin behind as many tokens
        before = len(chat.encode(tokenizer, [start])[0])
        mask = [0] * before + mask[before:]
    return sample._replace(prompt=[], branches=[ids], mask=mask, unread=unread)


def _is_empty(sample: Sample) -> bool:
    """Is an answer blank, without text and calls, or are all of a whole conversation? Then the row is dropped."""
    whole = sample.prompt is None and sample.is_chat
    branches = sample.branches
    last = [{"content": branch} if isinstance(branch, str) else branch[-1] for branch in branches]
    turns = [turn for turn in branches[0] if turn["role"] == "assistant"] if whole else last
    said = [bool(turn["content"].strip() or turn.get("tool_calls")) for turn in turns]
    return not (any(said) if whole else all(said))


def context(sample: Sample, plan: Plan) -> Sample:
    """`sample` with at least one prompt token, which the first prediction needs. Supervised rows without a prompt, or
    with every token trained, take what stands before the first trained token; others refuse an empty prompt.
    """
    prompt = sample.prompt
    branches = sample.branches
    if not all(branches):  # `fit` drops it
        return sample
    if plan.rows.needs_prompt:
        if not prompt:
            raise InputError(f"columns {plan.form}: empty prompt, {plan.method} needs a prompt of at least one token")
        return sample
    all_trained = plan.completion_only is False
    ids = prompt + branches[0]
    mask = [int(all_trained)] * len(prompt) + (sample.mask or [1] * len(branches[0]))
    n = len(prompt) if prompt and not all_trained else max(1, mask.index(1) if 1 in mask else 1)
    if plan.image_ids:  # what becomes a picture's features is never trained
        mask = [int(on and token not in plan.image_ids) for on, token in zip(mask, ids, strict=True)]
    return sample._replace(prompt=ids[:n], branches=[ids[n:]], mask=mask[n:])


def fit(sample: Sample, plan: Plan) -> tuple[Sample, int]:
    """The sample cut to size, and the bits PROMPT_CUT, COMPLETION_CUT, NO_TARGET and ALIKE that are true of it then."""
    prompt = sample.prompt
    branches = sample.branches
    mask = sample.mask
    if plan.rows.sampled:
        prompt = _without_left(prompt, plan.max_length, plan.bos) if plan.max_length else prompt
    elif plan.max_length is not None:
        # the prompt gives way first, from the left, down to half of max_length; then the branches, from the right
        size = max(1, plan.max_length // 2, plan.max_length - max(map(len, branches)))
        prompt = _without_left(prompt, size, plan.bos)
        branches = [branch[: plan.max_length - len(prompt)] for branch in branches]
        mask = mask and mask[: len(branches[0])]

    def seen(prompt: list[int], branches: list[list[int]]) -> int:
        return sum(token in plan.image_ids for part in (prompt, *branches) for token in part)

    cut = bool(plan.image_ids) and seen(prompt, branches) < seen(sample.prompt, sample.branches)
    lost = cut or not all(branches) or not (plan.rows.sampled or mask is None or any(mask))
    bits = PICTURE_CUT * cut + NO_TARGET * lost
    bits += PROMPT_CUT * (prompt != sample.prompt) + COMPLETION_CUT * (branches != sample.branches)
    alike = len(branches) == 2 and branches[0] == branches[1]
    return sample._replace(prompt=prompt, branches=branches, mask=mask), bits + ALIKE * alike


def _without_left(prompt: list[int], size: int, bos: int | None) -> list[int]:
    """The last `size` ids of the prompt; the first of them is the BOS where the prompt begins with it."""
    if len(prompt) <= size:
        return prompt
    first = prompt[:1] if prompt[0] == bos and size > 1 else []
    return first + prompt[len(prompt) - size + len(first) :]
