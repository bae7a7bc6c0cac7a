"""PEFT adapters: their config from a recipe, checks of what PEFT rejects or ignores, and their weights."""

import copy
import itertools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedConfig

from ..errors import InputError, name_hint
from ..scoring import forward
from ..scoring.recurrent_segments import stateful_layers
from .config import ModelSection

logger = logging.getLogger(__name__)
_VARIANTS_WITH_LOSS = ("kasa_config", "monteclora_config")
"""Fields of LoraConfig for variants of LoRA that require a loss."""
_MAMBA_MODEL_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Models in which PEFT rejects an adapter on out_proj (tuners_utils._check_lora_target_modules_mamba)."""
_PLAIN_LINEAR_NAMES = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
"""Linear layers of Falcon, whose class overrides forward but computes the same product."""
_INIT_BY_WEIGHT = ("orthogonal", "pissa", "olora", "lora_ga", "mica")
"""Values of init_lora_weights, or their prefixes, that read the weight of a layer."""
_INIT_BY_DATA = {"corda": "eigens", "eva": None, "lora_ga": "_peft_loraga_grad"}
"""Values of init_lora_weights that depend on data -> the attribute that PEFT's preprocessing sets on a layer."""
PEFT_OPTION = "peft_config (model.lora)"
"""The options that request an adapter, for messages."""
_WITHOUT_EXPERTS = "set target_modules to layers outside of the experts, such as [q_proj, v_proj]"
_WRAPPERS = BaseTunerLayer, AuxiliaryTrainingWrapper
"""Classes of PEFT's layers around layers of the base model."""
ZERO_ROW = 1e-4
_TASK_TYPES = {"language": "CAUSAL_LM", "score": "SEQ_CLS"}
"""Task types of PEFT. With SEQ_CLS it trains and saves the score layer in addition to the adapter."""
_LORA_ALIASES = {"alpha": "lora_alpha", "dropout": "lora_dropout"}


def lora_config(section: ModelSection, location: str = "model") -> peft.LoraConfig | None:
    """Return `section.lora` as a LoraConfig for a causal LM, by default on all linear layers, or None without LoRA.

    `alpha` and `dropout` are aliases of the names in LoraConfig.

    Args:
        section: The section of the model.
        location: Location of the section, for messages.

    Raises:
        InputError: If a field is set under two names, and for errors of LoraConfig.
    """
    if section.lora is None:
        return None
    values = {_LORA_ALIASES.get(name, name): value for name, value in section.lora.items()}
    for alias, name in _LORA_ALIASES.items():
        if {alias, name} <= section.lora.keys():
            problem = f"model.lora has {alias} and {name}, which are the same option"
            raise InputError(f"{location}: {problem}. Remove one of them")

    # PEFT takes a string as a regular expression of full names, which a single word does not match
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(word := values.get(name), str) and word != "all-linear" and re.fullmatch(r"[\w.]+", word):
            values[name] = [word]
    try:
        return peft.LoraConfig(**{"target_modules": "all-linear", "task_type": _TASK_TYPES[section.head], **values})
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{location}: model.lora: {error}") from error


def trained_adapter_config(section: ModelSection) -> peft.PeftConfig | None:
    """Return the config of the adapter that is trained, a saved or a new one, or None if there is none."""
    return peft.PeftConfig.from_pretrained(section.adapter) if section.adapter else lora_config(section)


def check_adapter_kind(config: peft.PeftConfig) -> None:
    """Raise InputError for kinds of adapters that cannot be trained here.

    These are adapters outside of the layers (prompt tuning), adapters that require more than a forward, such as their
    own inputs (or for AdaLoRA a loss, and calls in each step), and adapters with random weights in each step.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    variant = next((name for name in _VARIANTS_WITH_LOSS if getattr(config, name, None)), None)
    if config.is_prompt_learning or variant or kind in ("ADALORA", "POLY", "PVERA", "SHADOW", "XLORA"):
        raise InputError(
            f"{variant or kind} is not supported. Use an adapter that acts only inside layers, such as LoRA"
        )
    if str(init := getattr(config, "init_lora_weights", None)).startswith("pissa_niter"):
        raise InputError(
            f"init_lora_weights: {init} is not supported, since it starts from a random part of the weights that is "
            "not reproduced when the adapter is loaded. Use pissa"
        )


def add_adapter(model: nn.Module, peft_config: object, vision: bool = False) -> nn.Module:
    """Return the model, which may be on the meta device, with a new adapter.

    Args:
        model: The model.
        peft_config: The config of the adapter.
        vision: Whether the vision encoder gets an adapter, too.

    Raises:
        InputError: If the model has an adapter, if PEFT rejects the config, and for names in the config that do not
            exist in the model.
    """
    if isinstance(model, peft.PeftModel):
        raise InputError(
            "the model already has an adapter. Merge it first, or remove peft_config (model.lora) to train it further"
        )
    if not isinstance(peft_config, peft.PeftConfig):
        raise InputError(f"peft_config must be a LoraConfig or another PeftConfig, not {type(peft_config).__name__}")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    on_meta = next(model.parameters()).is_meta
    _check_init(peft_config, model)
    # a copy, since PEFT writes into the config
    config: Any = config_with_default_init(peft_config) if on_meta else copy.deepcopy(peft_config)
    if forward.is_reward_model(model):
        config.task_type = _TASK_TYPES["score"]
    if hasattr(config, "exclude_modules"):
        config.exclude_modules = _merge_excluded(config.exclude_modules, _excluded_modules(model, config, vision))
    modules = [name for name, _ in model.named_modules()]
    if getattr(config, "layer_replication", None) and stateful_layers(model):
        reason = "a model with recurrent layers, whose cache has one state for each layer of its config"
        raise InputError(f"{PEFT_OPTION}: layer_replication is not supported for {reason}. Remove layer_replication")

    # PEFT reads these rows of the embedding while it adds the adapter
    tokens = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    rows = itertools.chain(*tokens.values()) if isinstance(tokens, dict) else tokens
    size = forward.causal_lm(model).config.get_text_config().vocab_size
    if invalid := [row for row in rows if row not in range(size)]:
        raise InputError(
            f"{PEFT_OPTION}: trainable_token_indices: {invalid[0]} is not one of the {size} tokens of the model"
        )

    with _unchanged_on_error(model):
        policy = _inject_adapter(model, config, peft_config, modules)
        for problem in itertools.chain(_ignored_options(policy, peft_config, modules), _unloadable_weights(policy)):
            raise InputError(f"{PEFT_OPTION}: {problem}")
    _fill_zero_rows(policy)
    return policy


def _inject_adapter(
    model: nn.Module, config: peft.PeftConfig, user_config: peft.PeftConfig, modules: list[str]
) -> peft.PeftModel:
    """Return the model with PEFT's layers.

    Args:
        model: The model.
        config: The config of the adapter, adjusted to the model.
        user_config: The config of the adapter as the user passed it.
        modules: Names of the modules without the adapter.

    Raises:
        InputError: If PEFT rejects the config, or if the initialization reads weights that a layer does not have.
    """
    init = getattr(user_config, "init_lora_weights", None)
    try:
        with without_needless_warnings():
            if next(model.parameters()).is_meta:
                _try_init(user_config)
            policy: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    except (ValueError, TypeError, ImportError, AttributeError, re.error) as error:
        if match := re.match(r"'(\w+)' object has no attribute 'weight'", str(error)):
            raise _init_without_weight_error(init, match[1]) from error
        problem = str(error).strip().partition("\n")[0].rstrip(".")
        if "not found" in problem:
            problem += _module_hint(config, modules)
        elif "ParamWrapper does not work" in problem:
            problem = problem.replace("lora.ParamWrapper", "an adapter on fused experts")
            problem += f". Change this option, or remove target_parameters and {_WITHOUT_EXPERTS}"
        elif match := re.match(r"Target module \w*Experts\b", problem):
            problem = f"{match[0]} is no linear layer. Use target_parameters{_fused_hint(model)}"
        elif "target_parameters" in problem:
            problem += _fused_hint(model)
        raise InputError(f"{PEFT_OPTION}: {problem}") from error
    if str(init).startswith(_INIT_BY_WEIGHT):
        for layer in adapted_layers(policy):
            if not hasattr(base := layer.get_base_layer(), "weight"):
                raise _init_without_weight_error(init, type(base).__name__)
    return policy


@contextmanager
def without_needless_warnings() -> Iterator[None]:
    """Hide warnings of PEFT that do not concern the user."""
    with warnings.catch_warnings():
        # PEFT reads this attribute under its old name
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        # it looks for the ranks of fused experts among modules alone; `_ignored_options` looks among all layers
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        yield


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Remove the layers of an adapter from the model if the block raises an error."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        yield
    except Exception:
        # all are found before any is replaced, since a wrapper of PEFT may read its base through another wrapper
        bases = [(name, _unwrapped(layer)) for name, layer in model.named_modules() if isinstance(layer, _WRAPPERS)]
        for name, base in reversed(bases):  # of nested wrappers, the outer one comes first
            model.set_submodule(name, base)
        model.tie_weights()  # type: ignore[operator]
        for weight in trained:
            weight.requires_grad_(True)
        raise


def _unwrapped(layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> nn.Module:
    """Return the layer of the base model inside wrappers of PEFT."""
    inner: Any = layer
    while isinstance(inner, _WRAPPERS):
        inner = inner.get_base_layer() if isinstance(inner, BaseTunerLayer) else inner.original_module
    return inner


def _check_init(config: peft.PeftConfig, model: nn.Module) -> None:
    """Raise InputError for a value of `init_lora_weights` that requires data, if the model was not preprocessed.

    PEFT would use random weights, or fail after the model is loaded.
    """
    init = getattr(config, "init_lora_weights", None)
    if init in _INIT_BY_DATA:
        attribute = _INIT_BY_DATA[init]
        if attribute is None or not any(hasattr(module, attribute) for module in model.modules()):
            raise InputError(
                f"{PEFT_OPTION}: init_lora_weights: {init} requires data before training. Initialize the adapter with "
                "PEFT and pass that model, or choose another value"
            )


def _try_init(config: peft.PeftConfig) -> None:
    """Initialize an adapter of one small layer, so that PEFT raises its errors.

    On the meta device PEFT initializes no weights and does not read `init_lora_weights`.
    """
    if isinstance(config, peft.LoraConfig):
        options: dict[str, Any] = {"init_lora_weights": config.init_lora_weights, "loftq_config": config.loftq_config}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(r=2, target_modules=["0"], **options))


def _init_without_weight_error(init: object, layer: str) -> InputError:
    """Return the error for an initialization that reads the weight of a layer without one."""
    return InputError(
        f"{PEFT_OPTION}: init_lora_weights: {init} reads the weight of each layer, but {layer} stores its experts as "
        f"parameters. Set init_lora_weights: true, or {_WITHOUT_EXPERTS}"
    )


def _module_hint(config: peft.PeftConfig, modules: Iterable[str]) -> str:
    """Return "; did you mean 'q_proj'?" for an unknown target module that resembles a module of the model."""
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, list | set | tuple):
        return ""
    known = {name.rpartition(".")[2] for name in modules} - {""}
    hints = (name_hint(str(name), known, list_valid=False) for name in sorted(targets) if name not in known)
    return next(filter(None, hints), "")


def _fused_experts(model: nn.Module) -> list[str]:
    """Return the names of experts that are one parameter per layer, such as `mlp.experts.gate_up_proj`."""
    names = ((name.replace(".base_layer", ""), weight) for name, weight in model.named_parameters())
    kinds = {_layer_kind(name) for name, weight in names if weight.dim() == 3 and re.search(r"\.experts\.\w+$", name)}
    return sorted(kinds)


def _fused_hint(model: nn.Module) -> str:
    """Return a sentence with the experts that `target_parameters` can name."""
    fused = ", ".join(_fused_experts(model))
    return f". Its fused experts are {fused}" if fused else ". It has no fused experts. Remove target_parameters"


def _fill_zero_rows(policy: nn.Module) -> None:
    """Add a small value to the adapter in weight rows of zeros under DoRA, such as that of padding in a tied head.

    DoRA divides by the norm of a row, which would give NaN.
    """
    for layer in adapted_layers(policy):
        for name, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
            weight = getattr(layer.get_base_layer(), "weight", None)
            if weight is None or weight.dim() != 2 or weight.is_meta or not weight.is_floating_point():
                continue
            rows = (weight.detach() == 0).all(dim=1).nonzero().flatten()
            if len(rows) and len(magnitude.weight) == len(weight):
                lora_a = layer.lora_A[name].weight
                lora_b = layer.lora_B[name].weight
                with torch.no_grad():
                    lora_b[rows, 0] = ZERO_ROW
                    magnitude.weight[rows] = (layer.scaling[name] * lora_b[rows] @ lora_a).norm(dim=1)


def _excluded_modules(model: nn.Module, config: peft.PeftConfig, vision: bool) -> list[str]:
    """Return modules that never get an adapter: exceptions of all-linear, and without `vision` the vision encoder."""
    excluded = []
    if getattr(config, "target_modules", None) == "all-linear":
        linear: dict[str, type[nn.Module]] = {
            name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        excluded = _excluded_from_all_linear(forward.causal_lm(model).config, linear)
    if not vision and forward.is_vision_language_model(model):
        excluded += [name for name, _ in model.named_modules() if forward.is_vision_parameter(model, name)]
        logger.info("no adapter on the vision encoder (train_vision: false)")
    return excluded


def _merge_excluded(user_value: str | Iterable[str] | None, names: list[str]) -> str | list[str] | None:
    """Return `exclude_modules` of the user, which is a list or a regular expression of full names, with more names."""
    if not isinstance(user_value, str):
        return [*(user_value or ()), *names] or None
    return "|".join([f"(?:{user_value})", *(rf"(?:.*\.)?{re.escape(name)}" for name in names)])


def _excluded_from_all_linear(config: PreTrainedConfig, linear: dict[str, type[nn.Module]]) -> list[str]:
    """Return the names of layers that all-linear excludes.

    These are routers that are linear by class but return several tensors, and layers of Mamba models that PEFT rejects,
    since kernels read their weight directly.
    """
    model_specific = {
        name.rpartition(".")[2]: layer_class
        for name, layer_class in linear.items()
        if layer_class.__module__.startswith("transformers.models.")
    }
    excluded = {
        name
        for name, layer_class in model_specific.items()
        if layer_class.forward is not nn.Linear.forward and name not in _PLAIN_LINEAR_NAMES
    }
    if getattr(config, "model_type", "") in _MAMBA_MODEL_TYPES:
        excluded |= {"out_proj"} & {name.rpartition(".")[2] for name in linear}
    if excluded:
        logger.info(
            "all-linear: no adapter on %s, whose output or weight is not used as in a linear layer",
            ", ".join(sorted(excluded)),
        )
    return sorted(excluded)


def _ignored_options(policy: peft.PeftModel, config: peft.PeftConfig, modules: list[str]) -> Iterator[str]:
    """Yield a message for each option that PEFT has silently ignored.

    Args:
        policy: The model with the adapter.
        config: The config of the adapter as the user passed it.
        modules: Names of the modules without the adapter.
    """

    def value_of(option: str) -> Any:
        return getattr(config, option, None) or ()

    # PEFT does not exclude parameters
    parameters: list[str] = getattr(policy, "targeted_parameter_names", [])
    excluded = value_of("exclude_modules")
    patterns = [excluded] if isinstance(excluded, str) else [rf"(.*\.)?{re.escape(name)}" for name in excluded]
    for name in parameters:
        owner = name.rpartition(".")[0]
        if any(re.fullmatch(pattern, part) for pattern in patterns for part in (name, owner)):
            problem = f"exclude_modules: PEFT does not exclude the parameter {name}"
            yield f"{problem}. To train no experts, {_WITHOUT_EXPERTS}"

    # PEFT replaces the names that experts had as modules by their fused parameters
    actual: Any = policy.active_peft_config
    replaced: set[str] = set()
    if parameters and not isinstance(value_of("target_modules"), str):
        replaced = {*value_of("target_modules")} - {*(actual.target_modules or ())}

    adapted = [*getattr(policy, "targeted_module_names", ()), *parameters]
    known_names = {name.rpartition(".")[2] for name in modules}
    candidates = {"target_modules": adapted, "target_parameters": adapted}
    candidates |= {"exclude_modules": modules, "modules_to_save": modules}
    for option, names in candidates.items():
        if isinstance(value := value_of(option), str) and option != "modules_to_save":
            # a regular expression of full names; for targets that match nothing PEFT raises an error itself
            expected = {value: value} if option == "exclude_modules" else {}
        else:
            expected = {name: rf"(.*\.)?{re.escape(name)}" for name in sorted({*value} - replaced)}
        for entry, pattern in expected.items():
            if not any(re.fullmatch(pattern, name) for name in names):
                fix = name_hint(entry, known_names, list_valid=False)
                fix = _fused_hint(policy) if option == "target_parameters" else fix
                unknown = f"matches nothing in the model{fix}"
                yield f"{option}: {entry!r} {'is excluded by other options' if entry in known_names else unknown}"

    for option in ("rank_pattern", "alpha_pattern"):
        # if several expressions match a layer, PEFT takes the first
        keys = value_of(option)
        used = {next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None) for name in adapted}
        if unused := [key for key in keys if key not in used]:
            yield f"{option}: {unused[0]!r} matches no layer with an adapter, or only layers that match an earlier key"

    if (layers := getattr(config, "layers_to_transform", None)) not in (None, []):
        requested = {layers} if isinstance(layers, int) else {*layers}
        pattern = value_of("layers_pattern") or "[^.]*"
        numbered = rf"(?:^|.*?\.)(?:{pattern if isinstance(pattern, str) else '|'.join(pattern)})\.(\d+)\."
        actual = {int(match[1]) for name in adapted if (match := re.match(numbered, name))}
        if requested != actual:
            yield f"layers_to_transform: requests layers {sorted(requested)}, but adapters are in {sorted(actual)}"

    # PEFT's adapters of head and embedding are then views of one memory, which each move or cast of the model separates
    base_model: Any = policy.get_base_model()
    head = base_model.get_output_embeddings()
    embedding = base_model.get_input_embeddings()
    if value_of("ensure_weight_tying") and isinstance(head, BaseTunerLayer) and head.weight is embedding.weight:
        yield (
            "ensure_weight_tying: LoRA on a tied head does not stay tied when the model is moved to a GPU. Use "
            "modules_to_save: [embed_tokens], or trainable_token_indices"
        )


def _unloadable_weights(policy: peft.PeftModel) -> Iterator[str]:
    """Yield a message if weights of the adapter would be saved but not loaded again.

    PEFT applies the renamings that transformers has for weights of older files. For Laguna they change the names of
    its shared experts.
    """
    if policy.active_peft_config.peft_type == peft.PeftType.LORA:
        # without embeddings, for which PEFT would query the Hub
        saved = peft.get_peft_model_state_dict(policy, save_embedding_layers=False)
        result: Any = peft.set_peft_model_state_dict(policy, saved)
        lost = sorted({name.partition(".lora_")[0] for name in result.missing_keys if ".lora_" in name})
        if lost:
            suffixes = sorted({".".join(name.split(".")[-2:]) for name in lost})
            model_type = forward.causal_lm(policy).config.model_type
            yield (
                f"PEFT cannot load what it saves of {len(lost)} layers of {model_type}. Set exclude_modules: "
                f"[{', '.join(suffixes)}], or use another version of transformers"
            )


def is_adapter_weight(policy: peft.PeftModel, name: str) -> bool:
    """Return whether the weight has no effect when adapters are disabled.

    LoRA's bias is a weight of the base and keeps its effect.
    """
    return any(part in name for part in (str(policy.base_model.prefix), ".modules_to_save.", ".trainable_tokens_"))


def describe_adapter(policy: peft.PeftModel, config: object = None) -> str:
    """Return a line that says on which share of the weights the active adapter acts.

    The line also names the matrices without an adapter. If the config of a new adapter targets all linear layers, or
    some of an MLP with experts, it names the option for an adapter on its fused experts.

    Args:
        policy: The model with the adapter.
        config: The config of a new adapter as the user passed it.
    """
    reached: set[int] = set()
    for layer in adapted_layers(policy):
        fused = getattr(layer, "parameter_name", None)  # in a module with several parameters, an adapter is on one
        parameters = layer.get_base_layer().named_parameters(recurse=False)
        reached |= {id(weight) for name, weight in parameters if fused in (None, name)}
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    embedded = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}

    base_model = policy.get_base_model()
    total = 0
    adapted = 0
    unadapted = Counter[str]()
    for name, weight in base_model.named_parameters():
        if is_adapter_weight(policy, name):
            continue
        total += weight.numel()
        if id(weight) in reached | trained:
            adapted += weight.numel()
        elif weight.dim() > 1 and id(weight) not in embedded:
            unadapted[_layer_kind(name.replace(".base_layer", ""))] += weight.numel()

    line = f"the adapter acts on {100 * adapted / max(total, 1):.0f} % of the model's weights"
    shares = [f"{kind} ({100 * count / total:.0f} %)" for kind, count in unadapted.most_common() if 100 * count > total]
    if shares:
        line += f", but not on {', '.join(shares)}"
    fused = [kind for kind in _fused_experts(base_model) if kind in unadapted]
    blocks = {f".{kind.partition('.experts.')[0]}." for kind in fused}
    in_block = any(block in name for name in getattr(policy, "targeted_module_names", ()) for block in blocks)
    if fused and config is not None and (in_block or getattr(config, "target_modules", None) == "all-linear"):
        line += f". To train fused experts, set target_parameters: [{', '.join(fused)}]"
    return line


def _layer_kind(name: str) -> str:
    """Return the part of a weight's name that is the same in all layers: `mlp.experts.gate_up_proj`, `q_proj`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part]
    last_number = max((n for n, part in enumerate(parts) if part.isdigit()), default=-1)
    suffix = parts[last_number + 1 :]
    return ".".join(suffix if "experts" in suffix else suffix[-1:])


class UnlessAutocast:
    """A value that is False while autocast is on, for PEFT's `cast_input_dtype_enabled`.

    LoRA layers cast their input to float32, the dtype of the adapter, and autocast casts it back for the product. The
    numbers are the same without both casts, which took about an eighth of the GPU's time in a LoRA step of an 8B model
    on an H200.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)


def skip_needless_casts(model: nn.Module, device_type: str) -> None:
    """Let plain LoRA layers cast their input only while autocast is off.

    Layers with dropout are not changed, since the factor of dropout would then be rounded.
    """
    for layer in model.modules():
        if not isinstance(layer, peft.tuners.lora.Linear) or layer.lora_variant:
            continue
        if not any(getattr(dropout, "p", 0) for dropout in layer.lora_dropout.values()):
            layer.cast_input_dtype_enabled = UnlessAutocast(device_type)  # type: ignore[assignment]


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return PEFT's layers of a model in order, none for a model without an adapter."""
    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def config_with_default_init(config: peft.PeftConfig) -> Any:
    """Return a copy of an adapter's config with the default initialization, for weights that are set afterwards.

    An initialization such as PiSSA would change the base a second time.
    """
    copied: Any = copy.deepcopy(config)
    if hasattr(copied, "init_lora_weights"):
        copied.init_lora_weights = True
    return copied
