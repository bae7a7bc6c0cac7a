"""Table of the features that cannot be combined.

The error messages and the table in docs/reference/compatibility.md are generated from it. `option_features` returns the
features that the options of a Config select. Callers add features that depend on more than the options (images, a
stream, a teacher on a server), and raise or report the `conflicts` of all of them.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from .errors import InputError
from .options import OptionValues


class Feature(StrEnum):
    """A feature of a run, by the name that errors and the documentation use."""

    # data and model
    IMAGES = "images"
    STREAM = "a stream of rows (IterableDataset)"
    QUANTIZED = "a quantized student"
    MERGE_LORA = "merge_lora"
    # options of all methods
    PACKING = "packing"
    GROUP_BY_LENGTH = "train_sampling_strategy: group_by_length"
    EXACT_MATCH = "eval_exact_match"
    LOSS_BY_VALUE = "log_loss_by"
    NEFTUNE = "neftune_noise_alpha"
    ASSISTANT_ONLY = "assistant_only_loss"
    PROMPT_TRAINED = "completion_only_loss: false"
    REFERENCE_CACHE = "precompute_ref_log_probs"
    MUON = "optim: muon"
    SYNC_REFERENCE = "sync_ref_model"
    REWARD_MODEL = "a reward model"
    AUTO_WEIGHTS = "desirable_weight or undesirable_weight: auto"
    # rollouts
    OFF_POLICY = "rollouts of another policy (any source but on_policy)"
    SCORED_EACH_STEP = "rollouts that are scored in every step (all but frozen)"
    FROZEN = "rollouts: frozen"
    REPLAY = "rollouts: replay"
    VLLM = "a vLLM sampler"
    PREFETCH = "sampler.prefetch"
    POLICY_GRADIENT = "loss_type: policy_gradient"
    DATA_SHARE = "lmbda below 1"
    NO_ROLLOUTS = "lmbda: 0"
    REWARD = "reward"
    ADVANTAGE_WEIGHTS = "token_weights of the advantage"
    # teachers
    TEACHER = "a method with a teacher"
    TOP_K = "teacher.top_k"
    RESIDUAL = "teacher.top_k_remainder: residual"
    PRECOMPUTE = "teacher.precompute"
    SERVED = "a teacher on a server"
    SEVERAL = "several teachers"
    OWN_PROMPT = "a teacher with its own prompt"
    OWN_TOKENIZER = "a teacher with its own tokenizer"
    MOVING_AVERAGE = "teacher.self: ema"
    TEACHER_MODEL = "a teacher model"
    RECORDED = "teacher.logprobs_column"
    # rounds, engines and commands
    ROUNDS = "rounds"
    MODEL_JUDGE = "a judge that is a model"
    SEQUENCE_PARALLEL = "sequence parallelism"
    SHARDED = "sharded weights"
    FLATTENED = "flattened weights (ZeRO-1 and ZeRO-2)"
    SAMPLE_URL = "sample --url"


class Conflict(NamedTuple):
    """Two features that exclude each other."""

    first: Feature  # the one to change
    second: Feature
    reason: str
    fix: str = "Remove one of the two"


_F = Feature
_IDS = "only token ids are sent"
_BIASED = "the loss is biased on tokens that another policy sampled"
_CURRENT = "it requires tokens that the current policy sampled"
_CHUNKS = "the tokens of such a teacher are aligned with the student's by text spans"
_NO_ANSWERS = "it has no language modeling head, and generates no answers"
_LENGTH = "the number of rows must be known"
_OTHER_TEXT = "such a teacher reads another text before the answer"
_WHOLE_MATRICES = ("its update requires whole matrices", "Use one GPU or DDP, or another optimizer")
_ONE_DOCUMENT = "each row must be one document, and rows are split"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(_F.VLLM, _F.IMAGES, _IDS),
    Conflict(_F.SAMPLE_URL, _F.IMAGES, _IDS),
    Conflict(_F.SERVED, _F.IMAGES, _IDS),
    Conflict(_F.REPLAY, _F.IMAGES, "the replay buffer keeps only token ids"),
    Conflict(_F.OWN_PROMPT, _F.IMAGES, "the template writes only text"),
    Conflict(_F.OWN_TOKENIZER, _F.IMAGES, "only texts are aligned"),
    Conflict(_F.SEVERAL, _F.IMAGES, "batches with images are not split by teacher"),
    Conflict(_F.MODEL_JUDGE, _F.IMAGES, "judges read only text; use a function"),
    Conflict(_F.SEQUENCE_PARALLEL, _F.IMAGES, "positions of images are not split"),
    Conflict(_F.VLLM, _F.QUANTIZED, "vLLM receives unquantized weights"),
    Conflict(
        _F.MERGE_LORA,
        _F.QUANTIZED,
        "a quantized base would round the adapter away",
        "Merge it into full precision after training",
    ),
    Conflict(_F.ROUNDS, _F.STREAM, _LENGTH),
    Conflict(_F.PACKING, _F.STREAM, _LENGTH),
    Conflict(_F.GROUP_BY_LENGTH, _F.STREAM, _LENGTH),
    Conflict(_F.LOSS_BY_VALUE, _F.STREAM, "the values must be known"),
    Conflict(_F.LOSS_BY_VALUE, _F.ROUNDS, "the rows of a round have no such column"),
    Conflict(_F.LOSS_BY_VALUE, _F.REPLAY, "the replay buffer keeps no rows"),
    Conflict(_F.FROZEN, _F.STREAM, _LENGTH),
    Conflict(_F.PRECOMPUTE, _F.STREAM, _LENGTH),
    Conflict(_F.REFERENCE_CACHE, _F.STREAM, "scores by row number are not supported with IterableDataset"),
    Conflict(_F.AUTO_WEIGHTS, _F.STREAM, "the labels of all rows must be known", "Set the weights to numbers"),
    Conflict(_F.PREFETCH, _F.ROUNDS, "a round samples all its answers before it trains on them"),
    Conflict(_F.REFERENCE_CACHE, _F.ROUNDS, "the rows of a round are not known before it starts"),
    Conflict(_F.EXACT_MATCH, _F.REWARD_MODEL, _NO_ANSWERS),
    Conflict(_F.ROUNDS, _F.REWARD_MODEL, _NO_ANSWERS),
    Conflict(_F.SYNC_REFERENCE, _F.ROUNDS, "rounds.reference determines when it changes"),
    Conflict(_F.REFERENCE_CACHE, _F.SYNC_REFERENCE, "the scores of the first weights would be used throughout"),
    Conflict(
        _F.SYNC_REFERENCE,
        _F.SHARDED,
        "the updated weights are not sharded",
        "Use one GPU or DDP, or remove sync_ref_model",
    ),
    Conflict(_F.MUON, _F.SHARDED, *_WHOLE_MATRICES),
    Conflict(_F.MUON, _F.FLATTENED, *_WHOLE_MATRICES),
    Conflict(_F.SEQUENCE_PARALLEL, _F.ROUNDS, "rows must be known before training"),
    Conflict(_F.ROUNDS, _F.TEACHER, "a method with a teacher does not learn from judged answers"),
    Conflict(_F.PACKING, _F.SEQUENCE_PARALLEL, _ONE_DOCUMENT),
    Conflict(_F.EXACT_MATCH, _F.SEQUENCE_PARALLEL, "generation requires attention masks, which are removed"),
    Conflict(_F.NEFTUNE, _F.SEQUENCE_PARALLEL, "the scale of the noise depends on the length of the whole row"),
    Conflict(_F.OFF_POLICY, _F.POLICY_GRADIENT, _BIASED),
    Conflict(_F.DATA_SHARE, _F.POLICY_GRADIENT, _BIASED),
    Conflict(_F.OFF_POLICY, _F.NO_ROLLOUTS, "no rollouts are sampled"),
    Conflict(_F.PREFETCH, _F.OFF_POLICY, "only on-policy rollouts are prefetched"),
    Conflict(_F.ADVANTAGE_WEIGHTS, _F.REWARD, "token weights are computed from the advantage without the reward"),
    Conflict(_F.TOP_K, _F.POLICY_GRADIENT, "the loss reads only the sampled token"),
    Conflict(_F.RESIDUAL, _F.OFF_POLICY, _CURRENT),
    Conflict(_F.RESIDUAL, _F.DATA_SHARE, _CURRENT),
    Conflict(_F.RESIDUAL, _F.PREFETCH, _CURRENT),
    Conflict(
        _F.PRECOMPUTE,
        _F.SCORED_EACH_STEP,
        "rollouts of later steps do not exist before training",
        "Set rollouts: frozen, or remove teacher.precompute",
    ),
    Conflict(_F.PRECOMPUTE, _F.DATA_SHARE, "only rollouts are scored before training"),
    Conflict(_F.PRECOMPUTE, _F.MOVING_AVERAGE, "the scores of the first weights would be used throughout"),
    Conflict(_F.RECORDED, _F.TEACHER_MODEL, "the column has the scores of the teacher"),
    Conflict(_F.RECORDED, _F.PRECOMPUTE, "the column has the scores of the teacher"),
    Conflict(_F.RECORDED, _F.SEVERAL, "the column has the scores of one teacher"),
    Conflict(_F.RECORDED, _F.OWN_PROMPT, "no teacher reads the prompt"),
    Conflict(_F.RECORDED, _F.OWN_TOKENIZER, "the recorded ids are read as ids of the student"),
    Conflict(_F.REPLAY, _F.OWN_PROMPT, "the replay buffer keeps no rows"),
    Conflict(_F.REPLAY, _F.SEVERAL, "the replay buffer keeps no rows"),
    Conflict(_F.ASSISTANT_ONLY, _F.OWN_PROMPT, _OTHER_TEXT),
    Conflict(_F.ASSISTANT_ONLY, _F.OWN_TOKENIZER, _OTHER_TEXT),
    Conflict(_F.PROMPT_TRAINED, _F.OWN_PROMPT, _OTHER_TEXT),
    Conflict(_F.PROMPT_TRAINED, _F.OWN_TOKENIZER, _OTHER_TEXT),
    Conflict(_F.SEVERAL, _F.OWN_TOKENIZER, "rows of one batch would have different tokens"),
    Conflict(_F.OFF_POLICY, _F.OWN_TOKENIZER, _CURRENT),
    Conflict(_F.PREFETCH, _F.OWN_TOKENIZER, _CURRENT),
    Conflict(_F.TOP_K, _F.OWN_TOKENIZER, _CHUNKS),
    Conflict(
        _F.PRECOMPUTE,
        _F.OWN_TOKENIZER,
        "scores are stored for the student's tokens",
        "Remove teacher.precompute",
    ),
    Conflict(_F.REWARD, _F.OWN_TOKENIZER, _CHUNKS),
    Conflict(_F.DATA_SHARE, _F.OWN_TOKENIZER, _CHUNKS),
    Conflict(_F.ADVANTAGE_WEIGHTS, _F.OWN_TOKENIZER, _CHUNKS),
    Conflict(
        _F.MOVING_AVERAGE,
        _F.SHARDED,
        "the averaged weights are not sharded",
        "Use one GPU or DDP, or self: start",
    ),
)
"""Pairs of features that exclude each other."""
_BY_PAIR = {(conflict.first, conflict.second): conflict for conflict in CONFLICTS}


def option_features(values: OptionValues) -> dict[Feature, str]:
    """Return the features that the options of a Config select, each with the name of its option.

    Args:
        values: The options, with instances of their groups.
    """
    rollouts = getattr(values, "rollouts", None)
    sampler = getattr(values, "sampler", None)
    teacher = getattr(values, "teacher", None)
    lmbda = getattr(values, "lmbda", 1)
    weights = getattr(values, "token_weights", None)
    class_weights = getattr(values, "desirable_weight", None), getattr(values, "undesirable_weight", None)
    selected = {
        Feature.MERGE_LORA: (values.merge_lora, "merge_lora"),
        Feature.PACKING: (getattr(values, "packing", False), "packing"),
        Feature.GROUP_BY_LENGTH: (values.train_sampling_strategy == "group_by_length", "train_sampling_strategy"),
        Feature.EXACT_MATCH: (values.eval_exact_match, "eval_exact_match"),
        Feature.LOSS_BY_VALUE: (values.log_loss_by, "log_loss_by"),
        Feature.NEFTUNE: (values.neftune_noise_alpha, "neftune_noise_alpha"),
        Feature.ASSISTANT_ONLY: (getattr(values, "assistant_only_loss", False), "assistant_only_loss"),
        Feature.PROMPT_TRAINED: (getattr(values, "completion_only_loss", None) is False, "completion_only_loss"),
        Feature.REFERENCE_CACHE: (getattr(values, "precompute_ref_log_probs", None), "precompute_ref_log_probs"),
        Feature.MUON: (values.optim == "muon", "optim"),
        Feature.SYNC_REFERENCE: (getattr(values, "sync_ref_model", False), "sync_ref_model"),
        Feature.AUTO_WEIGHTS: (
            "auto" in class_weights,
            "desirable_weight" if class_weights[0] == "auto" else "undesirable_weight",
        ),
        Feature.DATA_SHARE: (lmbda < 1, "lmbda"),
        Feature.NO_ROLLOUTS: (lmbda == 0, "lmbda"),
        Feature.POLICY_GRADIENT: (getattr(values, "loss_type", None) == "policy_gradient", "loss_type"),
        Feature.REWARD: (getattr(values, "reward", None), "reward"),
        Feature.ADVANTAGE_WEIGHTS: (weights is not None and weights.requires_advantage, "token_weights"),
    }
    if rollouts is not None:
        selected |= {
            Feature.OFF_POLICY: (not rollouts.on_policy, "rollouts"),
            Feature.SCORED_EACH_STEP: (not rollouts.scored_once, "rollouts"),
            Feature.FROZEN: (rollouts.kind == "frozen", "rollouts"),
            Feature.REPLAY: (rollouts.kind == "replay", "rollouts"),
        }
    if sampler is not None:
        selected[Feature.VLLM] = (sampler.kind.startswith("vllm"), "sampler")
        selected[Feature.PREFETCH] = (sampler.prefetch, "sampler.prefetch")
    if teacher is not None:
        selected |= {
            Feature.TEACHER: (True, "teacher"),
            Feature.TOP_K: (teacher.top_k is not None, "teacher.top_k"),
            Feature.RESIDUAL: (teacher.top_k_remainder == "residual", "teacher.top_k_remainder"),
            Feature.PRECOMPUTE: (teacher.precompute, "teacher.precompute"),
            Feature.SEVERAL: (teacher.names, "teacher.names"),
            Feature.OWN_PROMPT: (teacher.prompt, "teacher.prompt"),
            Feature.OWN_TOKENIZER: (teacher.tokenizer, "teacher.tokenizer"),
            Feature.RECORDED: (teacher.logprobs_column is not None, "teacher.logprobs_column"),
        }
    return {feature: option for feature, (is_selected, option) in selected.items() if is_selected}


def conflicts(features: Mapping[Feature, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of the options and the message of each conflict between features.

    Args:
        features: The features of a run, each with the name of its option.
    """
    for first, second in _BY_PAIR:
        if first in features and second in features:
            yield (features[first], features[second]), conflict_message(first, second)


def conflict_message(first: Feature, second: Feature) -> str:
    """Return the error message of a conflict.

    Raises:
        KeyError: If the two features can be combined.
    """
    conflict = _BY_PAIR[first, second]
    return f"{first} cannot be combined with {second}: {conflict.reason}. {conflict.fix}"


def check_features(features: Mapping[Feature, str]) -> None:
    """Raise InputError for the first conflict between features."""
    for _, problem in conflicts(features):
        raise InputError(problem)
