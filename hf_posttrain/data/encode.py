"""Encoding of samples as token ids: a row is read as its method requires, rendered, tokenized and truncated."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, join_names, short_repr
from . import chat, images
from .assistant_mask import MASK_OPTIONS, Conversation, assistant_masks
from .formats import Sample, add_system_turn, read_format, read_label, read_margin, read_template_kwargs
from .messages import Messages, is_serialized_messages, normalize_reasoning, text_of
from .recorded_scores import RecordedPlan
from .row_schema import RowKind
from .teacher_prompts import TeacherPlan, read_teacher_name, teacher_sample

# bits of a row's state
PROMPT_TRUNCATED = 1
COMPLETION_TRUNCATED = 2
NO_TARGET = 4  # no token is trained
IDENTICAL = 8  # both branches are the same
CHAT = 16  # the raw sample consists of messages
OTHER_ROLES = 32  # turns of users or tools count as a part of an answer
IMAGE_TRUNCATED = 64  # an image would be truncated, so the row is excluded
TRUNCATED = PROMPT_TRUNCATED | COMPLETION_TRUNCATED
LOSS_KEYS = {"weight": "0 or 1", "train": "true or false"}
"""Keys of a turn that determine whether it is trained, as in OpenAI's format and others, with their allowed values."""
VERSION = 13
"""Version of the encoding, a part of the fingerprint by which `datasets` caches the token ids. Increase it with any
change that encodes the same rows differently (a test detects such a change). Otherwise users train on ids that an older
version has cached."""


class Plan(NamedTuple):
    """Options of the encoding. They are plain values, so that `datasets` can fingerprint them.

    Attributes:
        method: Name of the method in messages.
        rows: Kind of rows that the method reads.
        form: Format of the raw rows.
        name: Name of the data set in messages.
        max_length: Maximum number of tokens of the prompt and the longest answer, or of the prompt alone if answers are
            sampled.
        completion_only: Whether only the completion is trained, or None for the default of the method.
        assistant_only: Whether only the tokens of assistants are trained.
        template_kwargs: Options of the chat template for all rows.
        as_chat: Whether plain strings become messages (`apply_chat_template`).
        vocabulary: Number of ids in the vocabulary, for rows that consist of token ids.
        bos: Id that a truncated prompt keeps at its beginning.
        masks: Columns of masks, which either all rows of token ids have or none.
        teacher: Options of the columns for teachers.
        last_turn: Whether only the last assistant turn is trained.
        image_ids: Ids of tokens that are replaced by image features, if the model reads images.
        image_folder: Folder that relative paths of images start from.
        reasoning: Whether the reasoning of assistants is kept (keep) or dropped (drop).
        weighted: Whether tokens have weights, by `text_weights` or by the column of spans.
        text_weights: Regular expressions of texts in the answer, with the weights of their tokens.
        group_column: Column by whose values the loss is logged.
        keep_prompt: Whether the raw prompt is kept next to its ids, for judges of answers.
        recorded: Options for log-probabilities of a teacher that are recorded in the rows.
        version: Version of the encoding.
    """

    method: str
    rows: RowKind
    form: str
    name: str
    max_length: int | None = None
    completion_only: bool | None = None
    assistant_only: bool = False
    template_kwargs: dict[str, Any] | None = None
    as_chat: bool = False
    vocabulary: int | None = None
    bos: int | None = None
    masks: tuple[str, ...] = ()
    teacher: TeacherPlan | None = None
    last_turn: bool = False
    image_ids: tuple[int, ...] = ()
    image_folder: str | None = None
    reasoning: str | None = None
    keep_prompt: bool = False
    weighted: bool = False
    text_weights: Mapping[str, float] | None = None
    group_column: str | None = None
    recorded: RecordedPlan | None = None
    version: int = VERSION


def read(row: dict[str, Any], plan: Plan) -> list[Sample]:
    """Return the raw samples of a row: one, or two for a method that trains on labeled answers if the row is a pair.

    Raises:
        InputError: If a column is missing, a value has the wrong type, an id is not in the vocabulary, or an image
            is in plain text or in an answer.
    """
    if not plan.image_ids:
        return _read(row, plan)
    row, row_images = images.extract_images(row, plan.form, plan.image_folder)
    samples = _read(row, plan)
    for sample in samples if row_images and "_ids" not in plan.form else ():
        if not sample.is_chat:
            fix = "Set `apply_chat_template: true`, or write the row as messages"
            raise InputError(f"a row with images requires messages, and the row is plain text. {fix}")
        if sample.prompt is not None and images.MARK in text_of(sample.branches):
            raise InputError("an image is in an answer, and images are only supported before it. Move it to the prompt")
    return [sample._replace(images=tuple(row_images)) for sample in samples]


def _read(row: dict[str, Any], plan: Plan) -> list[Sample]:
    """Return the samples of a row as `read` does. The row has `MARK` in place of images."""
    # `datasets` inserts None if only some rows of a file have a column
    present = [column for column, value in row.items() if value is not None]
    for column in (*plan.form.split(" + "), *plan.masks):
        if column not in present:
            raise InputError(f"column {column!r}: missing or null. This row has {join_names(present) or 'no columns'}")
    try:
        sample = read_format(row, plan.form)
    except RecursionError:
        raise InputError(f"columns {plan.form}: a value is nested too deeply") from None
    if plan.vocabulary is not None:
        max_id = max((i for part in (sample.prompt, *sample.branches) for i in part), default=0)
        if max_id >= plan.vocabulary:
            problem = f"token id {max_id} is not in the tokenizer's vocabulary of {plan.vocabulary} ids"
            raise InputError(f"columns {plan.form}: {problem}")

    # plain strings become turns with `apply_chat_template`. So do reference answers, which are not trained
    to_turns = plan.as_chat and isinstance(sample.prompt, str)
    if to_turns:
        sample = sample._replace(prompt=[{"role": "user", "content": sample.prompt}])
    if to_turns or (plan.rows.sampled and sample.is_chat):
        answers = [
            [{"role": "assistant", "content": branch}] if isinstance(branch, str) else branch
            for branch in sample.branches
        ]
        sample = sample._replace(branches=answers)

    # a separate column with the system turn, and columns that require messages
    has_optional_columns = "_ids" not in plan.form and plan.form != "text"
    if row.get("system") and has_optional_columns:
        with error_context("column 'system'"):
            sample = add_system_turn(sample, row["system"])
    # options of the row take precedence over the options of all rows
    row_kwargs: dict[str, Any] = {}
    if row.get("chat_template_kwargs") and has_optional_columns:
        with error_context("column 'chat_template_kwargs'"):
            row_kwargs = read_template_kwargs(row["chat_template_kwargs"])
    sample = sample._replace(template_kwargs=(plan.template_kwargs or {}) | row_kwargs)
    if (sample.tools or row_kwargs) and not sample.is_chat:
        column = "tools" if sample.tools else "chat_template_kwargs"
        fix = "Set `apply_chat_template: true`, or remove the column"
        raise InputError(f"column {column!r}: requires messages, and the row is plain text. {fix}")

    # prompt and answers have one type, and answers of messages begin with an assistant turn
    if sample.is_chat and sample.prompt is not None:
        roles = [answer[0]["role"] for answer in sample.branches if isinstance(answer, list)]
        if wrong_roles := [role for role in roles if role != "assistant"]:
            problem = f"the first turn of a completion has the role {short_repr(wrong_roles[0])}, expected 'assistant'"
            raise InputError(f"columns {plan.form}: {problem}")
    if len({type(part) for part in (sample.prompt, *sample.branches) if part is not None}) > 1:
        problem = "some values are strings and some are lists of messages. Use one type for all of them"
        raise InputError(f"columns {plan.form}: {problem}")

    # turns that are excluded from training by their keys
    if sample.is_chat and not plan.rows.sampled:
        turns = [turn for branch in sample.branches for turn in branch]
        for turn, (key, allowed) in product(turns, LOSS_KEYS.items()):
            if (value := turn.get(key)) not in (None, 0, 1):  # False equals 0
                raise InputError(f"columns {plan.form}: a turn has {key}: {short_repr(value)}, expected {allowed}")
        untrained = [turn["role"] for turn in turns if _is_untrained(turn)]
        if untrained and not plan.assistant_only:
            problem = f"a turn of {short_repr(untrained[0])} has weight: 0 or train: false"
            fix = "Set `train_on: assistant`, which excludes it from training, or move it to the prompt"
            raise InputError(f"columns {plan.form}: {problem}. {fix}")

    # a pair is two labeled examples
    if plan.rows.labeled and len(sample.branches) == 2:
        chosen, rejected = sample.branches
        return [sample._replace(branches=[b], label=label) for b, label in ((chosen, True), (rejected, False))]
    is_conversation = plan.rows.masked and sample.prompt is None and sample.is_chat
    if is_conversation and not any(turn["role"] == "assistant" for turn in sample.branches[0]):
        raise InputError(f"column {plan.form!r}: there is no assistant turn, so there is no answer to train")

    # if answers are sampled, the last turn of a conversation is its answer, unless it is labeled false
    if plan.rows.sampled and sample.prompt is None:
        turns = sample.branches[0]
        has_answer = turns[-1]["role"] == "assistant" and len(turns) > 1
        prompt, answers = (turns[:-1], [turns[-1:]]) if has_answer else (turns, [])
        sample = sample._replace(prompt=prompt, branches=answers)
    if plan.rows.sampled and row.get("label") is not None and not read_label(row["label"]):
        sample = sample._replace(branches=[], mask=None)
    if "margin" in plan.rows.columns:
        sample = sample._replace(margin=read_margin(row.get("margin")))
    return [sample]


def _is_untrained(turn: Mapping[str, Any]) -> bool:
    """Return whether the keys of a turn exclude it from training."""
    return any(turn.get(key) == 0 for key in LOSS_KEYS)


def _without_loss_keys(turns: Sequence[Mapping[str, Any]]) -> Messages:
    """Return the turns without the keys that determine whether they are trained, which no template writes."""
    return [{key: value for key, value in turn.items() if key not in LOSS_KEYS} for turn in turns]


def state_bits(sample: Sample, plan: Plan) -> int:
    """Return the bits CHAT and OTHER_ROLES of a raw sample."""
    has_answer = sample.is_chat and sample.prompt is not None and not plan.rows.sampled and not plan.assistant_only
    roles = {turn["role"] for turns in sample.branches for turn in turns} if has_answer else set()
    return CHAT * sample.is_chat + OTHER_ROLES * bool(roles - {"assistant"})


def check_misread(
    columns: Mapping[str, Sequence[Any]],
    samples: list[Sample],
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Check that the first 20 rows do not all hold something else than their format.

    Args:
        columns: The raw values.
        samples: The raw samples.
        plan: Options of the encoding.
        tokenizer: The tokenizer, to check whether prompts are already rendered.

    Raises:
        InputError: If all texts are serialized messages (as `to_csv` of a data frame writes them), if all answers
            contain their prompts, or if all prompts are already rendered by the chat template.
    """
    for column in plan.form.split(" + "):
        texts = columns[column][:20]
        if len(texts) > 1 and all(map(is_serialized_messages, texts)):
            problem = f"column {column!r}: {short_repr(texts[0])} is a list of messages as text"
            fix = "Convert it with json.loads, or with ast.literal_eval if Python printed it"
            alternative = "If such a text is the answer, use it as the content of a message"
            raise InputError(f"{plan.name}: {problem}. {fix}. {alternative}")

    # whole texts begin with their prompts. The prompts must have 20 characters on average, since a single answer may
    # repeat its question, and any answer a prompt as short as "Hi"
    pairs = [
        (text_of(sample.prompt).strip(), text_of(branch).lstrip())
        for sample in samples[:20]
        for branch in sample.branches
    ]
    has_prompts = len(samples) > 1 and all(
        len(text) > len(prompt) and text.startswith(prompt) for prompt, text in pairs
    )
    if has_prompts and pairs and sum(len(prompt) for prompt, _ in pairs) >= 20 * len(pairs):
        alternative = ", or drop the prompt column (columns: {unused: prompt})" if "chosen" in plan.form else ""
        problem = f"answers begin with the whole prompt. Remove it from the answers{alternative}"
        raise InputError(f"{plan.name}: columns {plan.form}: {problem}")
    if plan.as_chat and tokenizer is not None:
        _check_not_rendered(columns, tokenizer, plan)


def _check_not_rendered(columns: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> None:
    """Raise InputError if the first 20 prompts all contain special tokens of the chat template, as plain text.

    Args:
        columns: The raw values.
        tokenizer: The tokenizer with the chat template.
        plan: Options of the encoding, with `as_chat`.
    """
    column = next((name for name in plan.form.split(" + ") if name in ("prompt", "instruction")), None)
    prompts = columns[column][:20] if column else []  # the prompt may be a part of messages
    tokens: Sequence[str] = ()
    with suppress(InputError):  # a template may reject a single user turn
        tokens = tokenizer.convert_ids_to_tokens(sorted(chat.template_token_ids(tokenizer, plan.template_kwargs)))
    first_tokens = [next((token for token in tokens if token in text_of(prompt)), None) for prompt in prompts]
    if len(first_tokens) > 1 and all(first_tokens) and all(isinstance(prompt, str) for prompt in prompts):
        problem = f"the prompts contain {short_repr(first_tokens[0])}, which the chat template writes"
        raise InputError(f"{plan.name}: {problem}, so they are already rendered. Set `apply_chat_template: false`")


def encode(samples: list[Sample], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> list[Sample]:
    """Encode raw samples as token ids.

    Args:
        samples: Raw samples, which must all be plain text or all be messages.
        rows: Number of each sample's raw row, for errors.
        tokenizer: The tokenizer.
        plan: Options of the encoding.
    """
    is_chat = samples[0].is_chat
    with error_context(plan.name):
        end_id = chat.turn_end_id(tokenizer, plan.template_kwargs) if is_chat else chat.eos_id(tokenizer)
    texts = []
    conversations: list[Conversation | None] = []  # with `assistant_only`, None for a sample that is dropped
    failure = None
    for sample, row in zip(samples, rows, strict=True):
        try:
            with error_context(f"{plan.name}, row {row}"):
                if sample.is_chat is not is_chat:
                    raise InputError(f"columns {plan.form}: some rows hold plain text and some hold messages")
                if is_chat and plan.reasoning:
                    sample = _normalize_reasoning(sample, tokenizer, plan.reasoning)
                if plan.assistant_only:
                    sample, conversation = _rendered_conversation(sample, tokenizer, plan)
                    conversations.append(conversation)
                else:
                    sample = _rendered_text(sample, tokenizer, plan)
        except InputError as error:
            failure = error  # the error of an earlier sample comes first
            break
        texts.append(sample)
    with_ids = _with_assistant_ids(texts, conversations, rows, tokenizer, plan) if plan.assistant_only else None
    if failure is not None:
        raise failure
    if with_ids is not None:
        return with_ids

    # each branch is tokenized with its prompt, and a prompt without answers with an empty one
    pairs = [(text.prompt, branch) for text in texts for branch in text.branches or [""]]
    alternative_ends = chat.special_ids(tokenizer) if is_chat else frozenset()  # a call may have another end
    prompts = [prompt for prompt, _ in pairs]
    completions = [completion for _, completion in pairs]
    # a classifier reads conversations as the template writes them
    single_end = None if is_chat and plan.rows.classified else end_id
    ids = iter(chat.encode_pairs(tokenizer, prompts, completions, single_end, alternative_ends))
    encoded = []
    for text in texts:
        id_pairs = [next(ids) for _ in text.branches or [""]]
        branches = [completion for _, completion in id_pairs][: len(text.branches)]
        # an answer that consists of its end alone is empty, so that nothing is trained
        branches = [[] if branch == [end_id] else branch for branch in branches]
        if plan.rows.classified:
            branches = [_without_padding(branch, tokenizer.pad_token_id) for branch in branches]
        encoded.append(text._replace(prompt=id_pairs[0][0], branches=branches))
    return encoded


def _without_padding(ids: list[int], pad_id: int | None) -> list[int]:
    """Return ids up to the last one that is not `pad_id`, also if it is the eos. Transformers reads the score there."""
    size = len(ids)
    while size and ids[size - 1] == pad_id:
        size -= 1
    return ids[:size]


def teacher_columns(
    raw: Sequence[Mapping[str, Any]],
    samples: Sequence[Sample],
    rows: list[int],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    teacher_plan: TeacherPlan,
) -> dict[str, list[Any]]:
    """Return the columns for the teachers.

    Args:
        raw: Raw row of each sample.
        samples: Raw samples.
        rows: Number of each sample's raw row.
        tokenizer: The student's tokenizer.
        plan: Options of the encoding.
        teacher_plan: Options of the columns for teachers.

    Returns:
        The name of each sample's teacher, and the ids of its prompt, which are empty if it is the student's.
    """
    teachers = []
    prompts = []
    groups: dict[tuple[str, bool], list[tuple[int, Sample]]] = {}  # by teacher: places and raw prompts to encode
    for place, (row, sample, number) in enumerate(zip(raw, samples, rows, strict=True)):
        with error_context(f"{plan.name}, row {number}"):
            if teacher_plan.tokenizers and not all(sample.mask or ()):
                problem = "a teacher with its own tokenizer requires whole answers, and the row masks a part of one"
                raise InputError(problem)
            teacher = read_teacher_name(row, teacher_plan)
            prompt_ids = row.get("teacher_prompt_ids") or []
            if "_ids" not in plan.form:
                prompt_sample = teacher_sample(row, sample, teacher_plan, teacher)
                prompt_ids = []
                if prompt_sample is not None:
                    groups.setdefault((teacher, prompt_sample.is_chat), []).append((place, prompt_sample))
            elif not prompt_ids and (teacher in teacher_plan.prompts or teacher in teacher_plan.tokenizers):
                fix = "Rows of token ids require it for a teacher with its own prompt or tokenizer"
                raise InputError(f"column 'teacher_prompt_ids': missing. {fix}")
        teachers.append(teacher)
        prompts.append(prompt_ids)
    prompt_plan = plan._replace(assistant_only=False)
    for (teacher, _), group in groups.items():
        places, prompt_samples = zip(*group, strict=True)
        numbers = [rows[place] for place in places]
        teacher_tokenizer = teacher_plan.tokenizers.get(teacher, tokenizer)
        encoded = encode([*prompt_samples], numbers, teacher_tokenizer, prompt_plan)
        for place, sample in zip(places, encoded, strict=True):
            prompts[place] = sample.prompt
    return {"teacher": teachers, "teacher_prompt_ids": prompts}


def _normalize_reasoning(sample: Sample, tokenizer: PreTrainedTokenizerBase, action: str) -> Sample:
    """Return a sample of messages with the assistant's reasoning kept as the template reads it, or dropped."""
    key = chat.reasoning_key(chat.ChatTemplate(tokenizer, sample.tools).text) if tokenizer.chat_template else None
    prompt, *branches = (
        turns and normalize_reasoning(turns, action, key) for turns in (sample.prompt, *sample.branches)
    )
    return sample._replace(prompt=prompt, branches=branches)


def _rendered_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Sample:
    """Render the messages of a sample as text.

    Plain strings are unchanged. A whole text is a branch of an empty prompt. White space at the end of a rendering is
    dropped, since the end token would be appended after it.
    """
    template = chat.ChatTemplate(tokenizer, sample.tools, sample.template_kwargs, sample.expansions)
    if _is_empty(sample):
        sample = sample._replace(prompt="", branches=["" for _ in sample.branches])
    if not sample.is_chat:
        return sample._replace(prompt=sample.prompt or "")
    if sample.prompt is None:
        pairs = [("", template.render(sample.branches[0]).rstrip())]
        conversations = sample.branches
    elif not sample.branches:
        pairs = [(template.prompt_text(sample.prompt), "")]
        conversations = [sample.prompt]
    else:
        pairs = template.split(sample.prompt, sample.branches, plan.rows.classified)
        conversations = [chat.join_messages(sample.prompt, branch) for branch in sample.branches]
    unread = {
        part
        for turns, (start, rest) in zip(conversations, pairs, strict=True)
        for part in template.find_unread(turns, start + rest)
    }
    branches = [text for _, text in pairs] if sample.branches else []
    return sample._replace(prompt=pairs[0][0], branches=branches, unread=tuple(sorted(unread)))


def _rendered_conversation(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> tuple[Sample, Conversation | None]:
    """Render the messages of a sample for the mask of assistants, which is in the completion if there is one.

    Returns:
        The sample with the parts that the template does not write, and its conversation, or None for a sample that is
        dropped because its answers are empty.
    """
    if not sample.is_chat:
        raise InputError(f"{MASK_OPTIONS} requires messages, and {plan.form} is plain text")
    if _is_empty(sample):
        return sample, None
    template = chat.ChatTemplate(tokenizer, sample.tools, sample.template_kwargs, sample.expansions)
    turns = sample.branches[0] if sample.prompt is None else chat.join_messages(sample.prompt, sample.branches[0])

    # determine the turns that are trained, and remove the keys that exclude turns
    chosen = [n for n, turn in enumerate(turns) if turn["role"] == "assistant" and not _is_untrained(turn)]
    chosen = chosen[-1:] if plan.last_turn else chosen
    are_all_chosen = len(chosen) == sum(turn["role"] == "assistant" for turn in turns)
    turns = _without_loss_keys(turns)

    text, spans = template.render_with_spans(turns)
    full = text.rstrip()
    unread = tuple(template.find_unread(turns, full))
    prompt = None
    if sample.prompt is not None and plan.completion_only is not False:
        prompt = template.prompt_text(_without_loss_keys(sample.prompt))
    text = text if spans is not None and are_all_chosen else full
    conversation = Conversation(template, turns, text, spans, None if are_all_chosen else chosen, prompt)
    return sample._replace(unread=unread), conversation


def _with_assistant_ids(
    samples: list[Sample],
    conversations: Sequence[Conversation | None],
    rows: list[int],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
) -> list[Sample]:
    """Return samples with ids and a mask of the tokens of assistants.

    Args:
        samples: Samples of messages.
        conversations: The conversation of each sample, or None for one that is dropped.
        rows: Number of each sample's raw row, for errors.
        tokenizer: The tokenizer.
        plan: Options of the encoding.
    """
    encoded = []
    masked = assistant_masks(tokenizer, [*filter(None, conversations)])
    for sample, conversation, row in zip(samples, conversations, rows, strict=False):
        if conversation is None:
            encoded.append(sample._replace(prompt=[], branches=[[]]))
            continue
        with error_context(f"{plan.name}, row {row}"):
            ids, mask = next(masked)
        encoded.append(sample._replace(prompt=[], branches=[ids], mask=mask))
    return encoded


def _is_empty(sample: Sample) -> bool:
    """Return whether a sample is dropped, because an answer has neither text nor calls.

    In a whole conversation all answers must be empty.
    """
    is_conversation = sample.prompt is None and sample.is_chat
    branches = sample.branches
    last_turns = [{"content": branch} if isinstance(branch, str) else branch[-1] for branch in branches]
    turns = [turn for turn in branches[0] if turn["role"] == "assistant"] if is_conversation else last_turns
    has_content = [bool(turn["content"].strip() or turn.get("tool_calls")) for turn in turns]
    return not (any(has_content) if is_conversation else all(has_content))


def with_context(sample: Sample, plan: Plan) -> Sample:
    """Return the sample with at least one prompt token, which the first prediction requires.

    In supervised rows without a prompt, or with every token trained, the prompt becomes the tokens before the first
    trained token.

    Raises:
        InputError: If the prompt is empty and the method requires one.
    """
    prompt = sample.prompt
    branches = sample.branches
    if not all(branches):  # `truncate` marks it as dropped
        return sample
    if plan.rows.needs_prompt:
        if not prompt:
            problem = f"the prompt is empty, and {plan.method} requires a prompt of at least one token"
            raise InputError(f"columns {plan.form}: {problem}")
        return sample
    all_trained = plan.completion_only is False
    ids = prompt + branches[0]
    mask = [int(all_trained)] * len(prompt) + (sample.mask or [1] * len(branches[0]))
    size = len(prompt) if prompt and not all_trained else max(1, mask.index(1) if 1 in mask else 1)
    if plan.image_ids:  # tokens that are replaced by image features are never trained
        mask = [int(is_trained and token not in plan.image_ids) for is_trained, token in zip(mask, ids, strict=True)]
    weights = sample.weights and [1.0] * len(prompt) + sample.weights
    return sample._replace(
        prompt=ids[:size], branches=[ids[size:]], mask=mask[size:], weights=weights and weights[size:]
    )


def truncate(sample: Sample, plan: Plan) -> tuple[Sample, int]:
    """Truncate a sample to the maximum length.

    Returns:
        The sample, and its bits PROMPT_TRUNCATED, COMPLETION_TRUNCATED, IMAGE_TRUNCATED, NO_TARGET and IDENTICAL.
    """
    prompt = sample.prompt
    branches = sample.branches
    mask = sample.mask
    weights = sample.weights
    longest = max(map(len, branches), default=0)
    if plan.rows.sampled:
        prompt = _truncate_left(prompt, plan.max_length, plan.bos) if plan.max_length else prompt
    elif plan.max_length is not None and len(prompt) + longest > plan.max_length:
        # the prompt is truncated first, from the left, down to half of max_length, then the branches from the right
        size = max(1, plan.max_length // 2, plan.max_length - longest)
        prompt = _truncate_left(prompt, size, plan.bos)
        branches = [branch[: plan.max_length - len(prompt)] for branch in branches]
        mask = mask and mask[: len(branches[0])]
        weights = weights and weights[: len(branches[0])]

    def count_image_tokens(prompt: list[int], branches: list[list[int]]) -> int:
        return sum(token in plan.image_ids for part in (prompt, *branches) for token in part)

    loses_image = bool(plan.image_ids) and (
        count_image_tokens(prompt, branches) < count_image_tokens(sample.prompt, sample.branches)
    )
    has_no_target = loses_image or not all(branches) or not (plan.rows.sampled or mask is None or any(mask))
    bits = IMAGE_TRUNCATED * loses_image + NO_TARGET * has_no_target
    bits += PROMPT_TRUNCATED * (prompt != sample.prompt) + COMPLETION_TRUNCATED * (branches != sample.branches)
    is_identical = len(branches) == 2 and branches[0] == branches[1]
    kept = sample._replace(prompt=prompt, branches=branches, mask=mask, weights=weights)
    return kept, bits + IDENTICAL * is_identical


def _truncate_left(prompt: list[int], size: int, bos: int | None) -> list[int]:
    """Return the last `size` ids of the prompt, of which the first is the BOS if the prompt begins with it."""
    if len(prompt) <= size:
        return prompt
    first = prompt[:1] if prompt[0] == bos and size > 1 else []
    return first + prompt[len(prompt) - size + len(first) :]
