"""Adapters: the config that a recipe asks for, what PEFT refuses or passes over, and what belongs to an adapter."""

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
from .config import ModelSection

logger = logging.getLogger(__name__)
_VARIANTS_WITH_LOSS = ("kasa_config", "monteclora_config")  # variants of LoRA
_MAMBA_MODEL_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Models in which PEFT refuses an adapter on out_proj (tuners_utils._check_lora_target_modules_mamba)."""
_PLAIN_LINEAR_NAMES = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")  # Falcon's, whose class writes the product out
_INIT_BY_WEIGHT = ("orthogonal", "pissa", "olora", "lora_ga", "mica")
"""Values of init_lora_weights, or their beginnings, that read the weight of a layer."""
_INIT_BY_DATA = {"corda": "eigens", "eva": None, "lora_ga": "_peft_loraga_grad"}
"""Values of init_lora_weights that data decide -> what PEFT's preprocessing leaves with a layer, before the adapter."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PEFT_OPTION = "peft_config (model.lora)"
"""The options that ask for an adapter, for messages."""
ZERO_ROW = 1e-4
_LORA_ALIASES = {"alpha": "lora_alpha", "dropout": "lora_dropout"}


def lora_config(section: ModelSection, where: str = "model") -> peft.LoraConfig | None:
    """`section.lora` as a LoraConfig for a causal LM, on all linear layers by default; None without LoRA.

    alpha and dropout are short for LoraConfig's names. where: the place of the section, for messages. Raises
    InputError for a field under two names, and for what LoraConfig refuses.
    """
    if section.lora is None:
        return None
    values = {_LORA_ALIASES.get(name, name): value for name, value in section.lora.items()}
    if len(values) < len(section.lora):
        raise InputError(f"{where}: model.lora gives alpha or dropout under two names")
    # PEFT takes a string as a regular expression of whole names, and a plain word is none of them
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        if isinstance(word := values.get(name), str) and word != "all-linear" and re.fullmatch(r"[\w.]+", word):
            values[name] = [word]
    try:
        return peft.LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **values})
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{where}: model.lora: {error}") from error


def check_adapter_kind(config: peft.PeftConfig) -> None:
    """Raises InputError for an adapter that is not inside the layers (prompt tuning), and for one that needs more than
    a forward: inputs of its own, or as AdaLoRA a loss, and calls in each step; or that draws its weights in each.
    """
    kind = getattr(config.peft_type, "value", config.peft_type)
    variant = next((name for name in _VARIANTS_WITH_LOSS if getattr(config, name, None)), None)
    if config.is_prompt_learning or variant or kind in ("ADALORA", "POLY", "PVERA", "SHADOW", "XLORA"):
        what = variant or kind
        raise InputError(f"{what}: only adapters that act inside the layers, by themselves, are supported (LoRA, ...)")
    if str(init := getattr(config, "init_lora_weights", None)).startswith("pissa_niter"):
        problem = "begins at a random part of the weights, which who loads the adapter does not draw again: use pissa"
        raise InputError(f"init_lora_weights: {init} {problem}")


def add_adapter(model: nn.Module, config: Any, vision: bool = False) -> nn.Module:
    """The model, which may be on the meta device, with a new adapter, which is not on a tower for pictures unless
    `vision`. Raises InputError where it has one, for what PEFT refuses, and for names in the config that nothing in the
    model has.
    """
    if isinstance(model, peft.PeftModel):
        raise InputError(
            "the model already has an adapter: merge it first, or drop peft_config (model.lora) to continue it"
        )
    if not isinstance(config, peft.PeftConfig):
        raise InputError(f"peft_config: a {type(config).__name__} is none: pass a LoraConfig, or another of PEFT's")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    on_meta = next(model.parameters()).is_meta
    asked = config
    _check_init(asked, model)
    config = config_with_default_init(config) if on_meta else copy.deepcopy(config)  # PEFT writes into it
    if hasattr(config, "exclude_modules"):
        config.exclude_modules = _merge_excluded(config.exclude_modules, _excluded_modules(model, config, vision))
    modules = [name for name, _ in model.named_modules()]
    # PEFT reads these rows of the embedding at once
    tokens = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    rows = itertools.chain(*tokens.values()) if isinstance(tokens, dict) else tokens
    size = forward.causal_lm(model).config.get_text_config().vocab_size
    if wrong := [row for row in rows if row not in range(size)]:
        raise InputError(f"{PEFT_OPTION}: trainable_token_indices: {wrong[0]} is none of the {size} tokens of the model")
    with _unchanged_on_error(model):
        policy = _inject_adapter(model, config, asked, modules)
        for problem in itertools.chain(_ignored_options(policy, asked, modules), _unloadable_weights(policy)):
            raise InputError(f"{PEFT_OPTION}: {problem}")
    _fill_zero_rows(policy)
    return policy


def _inject_adapter(model: Any, config: Any, asked: Any, modules: list[str]) -> Any:
    """The model with PEFT's layers in it. Raises InputError for what PEFT refuses, and for an initialization that reads
    weights which a layer does not have.

    asked: the config as the user gave it. modules: names in the model without the adapter.
    """
    init = getattr(asked, "init_lora_weights", None)
    try:
        with warnings.catch_warnings():
            # PEFT reads it by its old name
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
            if next(model.parameters()).is_meta:
                _try_init(asked)
            policy: Any = peft.get_peft_model(model, config)
    except (ValueError, TypeError, ImportError, AttributeError, re.error) as error:
        if found := re.match(r"'(\w+)' object has no attribute 'weight'", str(error)):
            raise _init_without_weight(init, found[1]) from error
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{PEFT_OPTION}: {first.rstrip('.')}{_module_hint(config, modules)}") from error
    if str(init).startswith(_INIT_BY_WEIGHT):
        for layer in adapted_layers(policy):
            if not hasattr(base := layer.get_base_layer(), "weight"):
                raise _init_without_weight(init, type(base).__name__)
    return policy


@contextmanager
def _unchanged_on_error(model: Any) -> Iterator[None]:
    """Take the layers of an adapter out of the model again, where the block raises an error."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        yield
    except Exception:
        wrappers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        for name, layer in reversed(wrappers):  # of several around one layer, the outer one comes first
            own = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer.original_module
            model.set_submodule(name, own)
        model.tie_weights()
        for weight in trained:
            weight.requires_grad_(True)
        raise


def _check_init(config: Any, model: nn.Module) -> None:
    """Raises InputError for a value of `init_lora_weights` that data decide where they did not: PEFT takes it as random
    weights, or fails after the model is loaded.
    """
    init = getattr(config, "init_lora_weights", None)
    if init in _INIT_BY_DATA:
        left = _INIT_BY_DATA[init]
        if left is None or not any(hasattr(module, left) for module in model.modules()):
            fix = "initialize the adapter with PEFT and pass that model, or choose another value"
            raise InputError(f"{PEFT_OPTION}: init_lora_weights: {init} reads data before training: {fix}")


def _try_init(config: peft.PeftConfig) -> None:
    """Initialize an adapter of one small layer. PEFT raises its errors: on the meta device it draws no weights, and
    does not read `init_lora_weights`.
    """
    if isinstance(config, peft.LoraConfig):
        options: dict[str, Any] = {"init_lora_weights": config.init_lora_weights, "loftq_config": config.loftq_config}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(r=2, target_modules=["0"], **options))


def _init_without_weight(init: Any, layer: str) -> InputError:
    """Return the error for an initialisation that reads the weight of a layer, where there is none."""
    problem = f"init_lora_weights: {init} reads the weight of each layer, and {layer} keeps its experts as parameters"
    fix = "set init_lora_weights: true, or target_modules to layers outside of the experts, such as [q_proj, v_proj]"
    return InputError(f"{PEFT_OPTION}: {problem}: {fix}")


def _module_hint(config: peft.PeftConfig, modules: Iterable[str]) -> str:
    """Return "; did you mean 'q_proj'?" for a target module that the model lacks and that resembles one of its own."""
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, list | set | tuple):
        return ""
    known = {name.rpartition(".")[2] for name in modules} - {""}
    hints = (name_hint(str(name), known, list_valid=False) for name in sorted(targets) if name not in known)
    return next(filter(None, hints), "")


def _fill_zero_rows(policy: nn.Module) -> None:
    """Give rows of zeros under DoRA, such as that of padding in a tied head, a little of the adapter: it divides by
    their norm, and would compute NaN.
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
    """Modules that get no adapter, whatever its config says: a tower's unless `vision`, and what all-linear leaves
    out.
    """
    found = []
    if getattr(config, "target_modules", None) == "all-linear":
        linear = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        found = _excluded_from_all_linear(forward.causal_lm(model).config, linear)
    if not vision and forward.is_vision_language_model(model):
        found += [name for name, _ in model.named_modules() if forward.is_vision_parameter(model, name)]
        logger.info("no adapter on the tower for pictures (train_vision: false)")
    return found


def _merge_excluded(theirs: Any, ours: list[str]) -> Any:
    """`exclude_modules` of a user, names or an expression of whole ones, with more names."""
    if not isinstance(theirs, str):
        return [*(theirs or ()), *ours] or None
    return "|".join([f"(?:{theirs})", *(rf"(?:.*\.)?{re.escape(name)}" for name in ours)])


def _excluded_from_all_linear(config: PreTrainedConfig, linear: dict[str, Any]) -> list[str]:
    """Names of layers that all-linear leaves out: routers that are linear by class and return several tensors, and what
    PEFT refuses in models of Mamba's kind, whose kernels read the weight itself.
    """
    own = {
        name.rpartition(".")[2]: kind
        for name, kind in linear.items()
        if kind.__module__.startswith("transformers.models.")
    }
    found = {name for name, kind in own.items() if kind.forward is not nn.Linear.forward and name not in _PLAIN_LINEAR_NAMES}
    if getattr(config, "model_type", "") in _MAMBA_MODEL_TYPES:
        found |= {"out_proj"} & {name.rpartition(".")[2] for name in linear}
    if found:
        logger.info("all-linear: no adapter on %s, whose output or weight is used otherwise", ", ".join(sorted(found)))
    return sorted(found)


def _ignored_options(policy: Any, asked: Any, modules: list[str]) -> Iterator[str]:
    """What PEFT has left out in silence of `asked`, an adapter's config as the user gave it.

    modules: names in the model without the adapter.
    """
    given: Any = lambda option: getattr(asked, option, None) or ()  # noqa: E731
    adapted = [name for kind in ("module", "parameter") for name in getattr(policy, f"targeted_{kind}_names", ())]
    ends = {name.rpartition(".")[2] for name in modules}
    places = {"target_modules": adapted, "target_parameters": adapted}
    for option, names in (places | {"exclude_modules": modules, "modules_to_save": modules}).items():
        if isinstance(wanted := given(option), str) and option != "modules_to_save":
            # an expression of whole names; of targets PEFT says itself if none match
            patterns = {wanted: wanted} if option == "exclude_modules" else {}
        else:
            patterns = {end: rf"(.*\.)?{re.escape(end)}" for end in sorted(wanted)}
        for each, pattern in patterns.items():
            if not any(re.fullmatch(pattern, name) for name in names):
                missing = f"matches nothing in the model{name_hint(each, ends, list_valid=False)}"
                yield f"{option}: {each!r} {'is left out by other options' if each in ends else missing}"
    for option in ("rank_pattern", "alpha_pattern"):
        # of several expressions that match a layer PEFT takes the first
        used = {next((key for key in given(option) if re.match(rf"(.*\.)?({key})$", name)), None) for name in adapted}
        if unused := [key for key in given(option) if key not in used]:
            yield f"{option}: {unused[0]!r} matches no layer with an adapter, or those of an earlier key alone"
    if (layers := getattr(asked, "layers_to_transform", None)) not in (None, []):
        chosen = {layers} if isinstance(layers, int) else {*layers}
        lists = given("layers_pattern") or "[^.]*"
        numbered = rf"(?:^|.*?\.)(?:{lists if isinstance(lists, str) else '|'.join(lists)})\.(\d+)\."
        found = {int(match[1]) for name in adapted if (match := re.match(numbered, name))}
        if chosen != found:
            yield f"layers_to_transform: asks for layers {sorted(chosen)}, and adapters are in {sorted(found)}"
    # PEFT's adapters of the two are then views of one memory, which each move or cast of the model parts
    head, embedding = (getattr(policy.get_base_model(), f"get_{end}_embeddings")() for end in ("output", "input"))
    if given("ensure_weight_tying") and isinstance(head, BaseTunerLayer) and head.weight is embedding.weight:
        instead = "modules_to_save: [embed_tokens], or trainable_token_indices"
        yield f"ensure_weight_tying: LoRA on a tied head does not stay tied on its way to a GPU: use {instead}"


def _unloadable_weights(policy: peft.PeftModel) -> Iterator[str]:
    """What of an adapter is saved and would not be loaded again. PEFT loads through the renamings that transformers has
    for weights of older files, and those of Laguna turn names of its shared experts into others.
    """
    if policy.active_peft_config.peft_type == peft.PeftType.LORA:
        # without embeddings, for which it would ask the Hub
        saved = peft.get_peft_model_state_dict(policy, save_embedding_layers=False)
        found: Any = peft.set_peft_model_state_dict(policy, saved)
        lost = sorted({name.partition(".lora_")[0] for name in found.missing_keys if ".lora_" in name})
        if lost:
            ends = sorted({".".join(name.split(".")[-2:]) for name in lost})
            kind = forward.causal_lm(policy).config.model_type
            mend = f"set exclude_modules: [{', '.join(ends)}], or try another version of transformers"
            yield f"PEFT would not load again what is saved of {len(lost)} layers of {kind}: {mend}"


def is_adapter_weight(policy: peft.PeftModel, name: str) -> bool:
    """Does the weight of this name go away when adapters are switched off? LoRA's bias, one of the base, does not."""
    return any(part in name for part in (str(policy.base_model.prefix), ".modules_to_save.", ".trainable_tokens_"))


def describe_adapter(policy: peft.PeftModel) -> str:
    """Return in a line on which share of the model's weights the active adapter acts, which matrices it leaves as they
    are, and what to set so that it acts on fused experts too.
    """
    reached: set[int] = set()
    for layer in adapted_layers(policy):
        fused = getattr(layer, "parameter_name", None)  # of a module with several, an adapter is on one
        own = layer.get_base_layer().named_parameters(recurse=False)
        reached |= {id(weight) for name, weight in own if fused in (None, name)}
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    embedded = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    convolutions = {id(module.weight) for module in policy.modules() if isinstance(module, CONVOLUTIONS)}
    inner = policy.get_base_model()
    total = 0
    acted = 0
    left = Counter[str]()
    fused_left: set[str] = set()
    for name, weight in inner.named_parameters():
        if is_adapter_weight(policy, name):
            continue
        total += weight.numel()
        if id(weight) in reached | trained:
            acted += weight.numel()
        elif weight.dim() > 1 and id(weight) not in embedded:
            kind = _layer_kind(name.replace(".base_layer", ""))
            left[kind] += weight.numel()
            fused_left |= {kind} if weight.dim() == 3 and id(weight) not in convolutions else set()
    said = f"the adapter acts on {100 * acted / max(total, 1):.0f} % of the model's weights"
    if shares := [f"{kind} ({100 * count / total:.0f} %)" for kind, count in left.most_common() if 100 * count > total]:
        said += f"; without it are {', '.join(shares)}"
    if fused_left:
        said += f". To train fused experts too, set target_parameters: [{', '.join(sorted(fused_left))}]"
    return said


def _layer_kind(name: str) -> str:
    """Return the end of a weight's name that is the same in all layers: `mlp.experts.gate_up_proj`, `q_proj`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part]
    last = max((n for n, part in enumerate(parts) if part.isdigit()), default=-1)
    behind = parts[last + 1 :]
    return ".".join(behind if "experts" in behind else behind[-1:])


class UnlessAutocast:
    """False where autocast is on, for PEFT's `cast_input_dtype_enabled`.

    LoRA layers cast their input to float32, the dtype of the adapter, and autocast casts it back for the product: the
    same numbers as without both, which took about an eighth of the GPU's time in a LoRA step of 8B on an H200.
    """

    def __init__(self, device_type: str):
        self.device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self.device_type)


def skip_needless_casts(model: nn.Module, device_type: str) -> None:
    """Let plain LoRA layers cast their input only where autocast is off. Not where it has dropout, whose factor is then
    rounded.
    """
    for layer in model.modules():
        if not isinstance(layer, peft.tuners.lora.Linear) or layer.lora_variant:
            continue
        if not any(getattr(dropout, "p", 0) for dropout in layer.lora_dropout.values()):
            layer.cast_input_dtype_enabled = UnlessAutocast(device_type)  # type: ignore[assignment]


def adapted_layers(model: nn.Module) -> list[Any]:
    """PEFT's layers of a model, in its order; none of a model without an adapter."""
    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def config_with_default_init(config: Any) -> Any:
    """A copy of an adapter's config for weights that come next: PiSSA and the like would change the base once more."""
    copied = copy.deepcopy(config)
    if hasattr(copied, "init_lora_weights"):
        copied.init_lora_weights = True
    return copied
