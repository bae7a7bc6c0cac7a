"""Conversion of the settings of TRL that depend on several keys."""

from ..errors import short_repr
from ..methods import METHODS
from .conversion import Conversion, distillation_method, take_source

_SINGLE_DATASET = ("name", "config", "train_split", "test_split", "streaming")
"""Keys about the one data set, after `dataset_`, which TRL ignores if there are `datasets`."""
_GKD_ON_DATA = {"beta": 0.5, "disable_dropout": True}
"""Defaults of TRL's GKDConfig that differ from those of distillation on data."""
_GKD_ON_SAMPLES = {"lmbda": 0.5, "temperature": 0.9, "beta": 0.5, "max_new_tokens": 128}
"""Defaults of TRL's GKDConfig that differ from those of on-policy distillation."""
_GKD_ONLY = {"max_new_tokens", "seq_kd"}
"""Options that GKDConfig has, and TRL's other Configs of distillation do not have."""


def prepare(conversion: Conversion) -> None:
    """Convert what depends on several keys of TRL."""
    _convert_sources(conversion)
    if METHODS[conversion.recipe["method"]].second == "teacher":
        _convert_distillation(conversion)
    if conversion.has_option("train.sampler"):
        mode = conversion.take("vllm_mode", "colocate")
        if mode not in ("colocate", "server"):
            raise conversion.error("vllm_mode", f"must be colocate or server, not {short_repr(mode)}")
        if conversion.take("use_vllm") is True:
            conversion.set("train.sampler.kind", f"vllm_{mode}")
    if conversion.take_new_adapter():
        conversion.set_target_modules()


def _convert_sources(conversion: Conversion) -> None:
    """Set the data section: `datasets`, or `dataset_name` with its splits."""
    settings = conversion.settings
    if settings.get("datasets"):
        conversion.ignore([f"dataset_{name}" for name in _SINGLE_DATASET], "datasets comes first")
    else:
        conversion.ignore(["test_split_size"], "only datasets are split")
    train = []
    for name, entry in conversion.take_entries("datasets").items():
        train.append(take_source(conversion, name, entry))
        if entry.pop("fraction", None) is not None:
            conversion.notes[f"{name}.fraction"] = "set weights of the sources"
        conversion.note_rest(name, entry)
    conversion.set_sources("train", train)
    conversion.split_sources("test_split_size")
    path = settings.get("dataset_name")
    split = conversion.take("dataset_test_split")
    if path and conversion.evaluates:
        source = {"path": path, "name": settings.get("dataset_config"), "split": split or "test"}
        source["streaming"] = settings.get("dataset_streaming") or None
        conversion.set_sources("eval", [{key: value for key, value in source.items() if value is not None}])
    elif split:
        conversion.ignored["dataset_test_split"] = "eval_strategy is not set"


def _convert_distillation(conversion: Conversion) -> None:
    """Set the options of the loss and of the sampling, and note those whose defaults are unknown.

    GKD uses its temperature for sampling alone. In TRL's other trainers, as here, it also divides the loss's logits.
    """
    settings = conversion.settings
    is_gkd = bool(settings.keys() & _GKD_ONLY)
    is_sampled = METHODS[conversion.recipe["method"]].rows.sampled
    if not is_sampled:
        conversion.set("train.kd_coef", 1.0)  # TRL trains with the teacher alone
        conversion.ignore(["max_new_tokens", "max_completion_length"], "nothing is sampled")
        if conversion.take_number("lmbda"):
            method = distillation_method(sampled=True)
            conversion.notes["lmbda"] = f"answers are not sampled. Use the method {method}"
    if is_gkd and not is_sampled:
        conversion.ignore(["temperature"], "GKD uses it for sampling alone")
    elif settings.get("temperature", 1) != 1 and "max_completion_length" not in settings:
        problem = "it also divides the logits of the loss, as in DistillationTrainer"
        conversion.notes["temperature"] = f"{problem}. For GKD, which uses it for sampling alone, set temperature: 1"
    defaults = _GKD_ON_SAMPLES if is_sampled else _GKD_ON_DATA
    if is_gkd:
        conversion.add_defaults(defaults)
    elif missing := conversion.missing(defaults):
        values = ", ".join(f"{key} {value}" for key, value in missing.items())
        problem = f"not set in the file. GKDConfig has {values}, and other trainers have other defaults"
        conversion.notes[", ".join(missing)] = f"{problem}. Set those of your trainer"
    _convert_beta(conversion)


def _convert_beta(conversion: Conversion) -> None:
    """Set the divergence from `beta`, whose ends are the two directions of the KL divergence."""
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    beta = conversion.take_number("beta")
    if beta is None:
        return
    option = "train.loss_type" if conversion.has_option("train.loss_type") else "train.divergence"
    conversion.set(option, ends.get(beta, "jsd"))
    if beta not in ends:
        conversion.settings["beta"] = beta
