"""Description of a run, stored in its checkpoints, and differences from a run that resumes one of them.

Every option of the Config is compared, except for those listed here, which do not change the trained weights. So a new
option is compared by default.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import peft
import xxhash
from peft import PeftConfig
from torch import nn

from ..data.dataset_type import AnyDatasets
from ..data.images import image_versions
from ..data.recorded_scores import recorded_columns
from ..engines import sharded
from ..errors import short_repr
from ..models import adapters, score_cache
from ..monitoring.symptoms import as_list
from ..scoring import forward
from .interface import TrainerInterface
from .method_spec import Method
from .option_group import OptionGroup, OptionKind
from .renamed_options import RENAMED, rename_options


def _name_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


WEIGHT_SAMPLE = 64  # number of values of each weight that are hashed
UNCOMPARED_OPTIONS = _name_set("""
    output_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id report_to disable_tqdm
    log_level log_level_replica log_on_each_node logging_strategy logging_steps logging_first_step
    logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics debug stop_on save_strategy
    save_steps save_total_limit save_only_model save_on_each_node enable_jit_checkpoint merge_lora push_to_hub
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision do_train do_eval do_predict
    local_rank use_cpu use_cache full_determinism resume_from_checkpoint resume_despite ignore_data_skip layout
    per_device_train_batch_size gradient_accumulation_steps torch_empty_cache_steps activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs dataset_num_proc
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context precompute_ref_log_probs precompute_ref_batch_size
    fsdp fsdp_config deepspeed parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph ddp_backend ddp_timeout no_remove_unused_columns teacher_model_name_or_path teacher_model_revision
""")
"""Options that may change: logging, saving, and the place and order in which the same numbers are computed. The engine
and the rows per step are compared by `checkpoint.resume_problems`."""
UNCOMPARED_PARTS = frozenset({"accelerator_config.non_blocking"})
"""Parts of options that may change. Checkpoints store them, and they are not compared."""
EVALUATION_OPTIONS = _name_set("""
    eval_strategy eval_steps eval_delay eval_on_start eval_exact_match eval_max_completion_length eval_dataset
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps per_device_eval_batch_size
    prediction_loss_only include_for_metrics bf16_full_eval fp16_full_eval
""")
"""Options that may change if no best model is selected, and if the learning rate does not depend on evaluations."""
OPTIMIZER_STATE_OPTIONS = _name_set("""
    optim optim_args optim_target_modules learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2
    adam_epsilon
""")
"""Options whose value is part of the optimizer state, so that a new one would have no effect."""
_FILE_FIELDS = _name_set("""
    base_model_name_or_path revision inference_mode peft_version auto_mapping runtime_config
""")
"""Fields of an adapter's config that describe its files and not its weights."""


def describe_options(args: Any, method: Method) -> dict[str, Any]:
    """Return the options of a Config that the trained weights depend on, as JSON values by name."""
    options = args.to_dict()
    scheduler = options["lr_scheduler_type"]
    omitted = UNCOMPARED_OPTIONS if _depends_on_evaluation(args) else UNCOMPARED_OPTIONS | EVALUATION_OPTIONS
    description = {"method": method.name} | {name: options[name] for name in options if name not in omitted}
    description |= {name: value.fingerprint() for name, value in vars(args).items() if isinstance(value, OptionKind)}
    # the learning rate depends on the length of the run if it is not constant
    warmup = args.warmup_steps or 0
    if scheduler == "constant" or (scheduler == "constant_with_warmup" and (warmup >= 1 or not warmup)):
        del description["num_train_epochs"], description["max_steps"]
    elif args.max_steps > 0:
        del description["num_train_epochs"]
    rounds = getattr(args, "rounds", None)
    description["rounds"] = rounds and rounds.fingerprint()
    if rounds:  # the steps at which rounds start depend on the length of the run, whatever its learning rate
        description |= {"num_train_epochs": args.passes, "max_steps": args.max_steps}
    return _as_json(description)


def describe_run(trainer: TrainerInterface) -> dict[str, Any]:
    """Return everything that the trained weights depend on, as JSON values by name. Every prepared row is read once."""
    args = trainer.args
    columns = hashed_columns(trainer.data_method, args)
    policy = forward.unwrap_model(trainer.model)
    causal = forward.causal_lm(policy)
    description = describe_options(args, trainer.method) | {
        "model": score_cache.numeric_config(causal)
        | {"class": sharded.original_class(causal).__name__, "dtype": str(causal.dtype)},
        "base_weights": trainer.base_key,
        "start_weights": trainer.start_key,
        "second_model": trainer.second_key,
        "adapter": adapter_settings(policy),
        "train_dataset": describe_rows(trainer.train_dataset, columns),
    }
    if not isinstance(trainer.train_dataset, datasets.Dataset):
        if trainer.recipe:  # the rows of a stream cannot all be hashed
            sources = trainer.recipe["data"]["train"]
            sources = sources if isinstance(sources, list) else [sources]
            description["data"] = {str(n): source | {"path": None} for n, source in enumerate(sources)}
        description["dataloader_num_workers"] = args.dataloader_num_workers  # workers share the files of a stream
    if _depends_on_evaluation(args):
        description["eval_dataset"] = describe_rows(trainer.eval_dataset, columns)
    plugin = trainer.accelerator.state.deepspeed_plugin
    for name in ("optimizer", "scheduler") if plugin is not None else ():  # defined in the config of DeepSpeed
        description[f"deepspeed.{name}"] = plugin.deepspeed_config.get(name)
    return _as_json(description)


def adapter_settings(policy: nn.Module) -> dict[str, Any]:
    """Return the config of the policy's adapter, as JSON values by name. Without an adapter, `peft_type` is None."""
    config = policy.peft_config[policy.active_adapter].to_dict() if isinstance(policy, peft.PeftModel) else {}
    return _as_json({"peft_type": None} | {name: value for name, value in config.items() if name not in _FILE_FIELDS})


def _depends_on_evaluation(args: Any) -> bool:
    """Return whether evaluations determine the trained weights: the best model, or the learning rate."""
    return bool(args.metric_for_best_model) or args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")


def _as_json(description: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(description, default=score_cache.json_default))


def base_weights_key(model: nn.Module, peft_config: PeftConfig | None, method: Method) -> str:
    """Return a hash of the weights that are not in a checkpoint: frozen ones, and the initial ones of a reference.

    Under ZeRO-3 the hash is of the shard of this rank, since such a run is resumed by the same number of ranks.
    """
    is_reference = method.second == "reference" and peft_config is None
    return _weights_key(weight for weight in model.named_parameters() if is_reference or not weight[1].requires_grad)


def start_weights_key(model: nn.Module, peft_config: PeftConfig | None) -> str | None:
    """Return a hash of the trained weights at the start of a run, or None with `peft_config`.

    The random weights of a new adapter are excluded. A LoRA adapter is new if all its B weights are 0. Adapters of
    other kinds are always excluded, since they cannot be recognized as new.
    """
    if peft_config is not None:
        return None
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if isinstance(model, peft.PeftModel) and not any(weight.any() for name, weight in trained if "lora_B" in name):
        trained = [(name, weight) for name, weight in trained if not adapters.is_adapter_weight(model, name)]
    return _weights_key(trained)


def _weights_key(weights: Iterable[tuple[str, Any]]) -> str:
    return score_cache.weights_key({name: getattr(w, "ds_tensor", w) for name, w in weights}, sample=WEIGHT_SAMPLE)


def differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    despite: list[str] | str | None,
    groups: Mapping[str, OptionGroup],
) -> dict[str, str]:
    """Return the differences between the descriptions of two runs, as "NAME: then X, now Y" by name.

    Args:
        then: Description stored in a checkpoint.
        now: Description of this run.
        despite: Names that may differ. `model` includes all names that start with `model.`. Options of the optimizer
            state cannot be excluded.
        groups: Groups of options of the method.
    """
    allowed = set(as_list(despite)) - OPTIMIZER_STATE_OPTIONS
    then = _with_groups(then, groups)
    return {
        key: f"{key}: then {short_repr(before)}, now {short_repr(after)}"
        for key, before, after in _differing(then, now)
        if not {key, key.partition(".")[0]} & allowed
        and key not in UNCOMPARED_PARTS
        and not (key == "second_model" and None in (before, after))  # its scores are from the cache
    }


def _with_groups(then: Mapping[str, Any], groups: Mapping[str, OptionGroup]) -> Mapping[str, Any]:
    """Return the description of a run with its options in groups. The last release stored each option separately."""
    rounds = then.get("rounds")
    if isinstance(rounds, dict) and isinstance(kind := rounds.get("sampler", rounds.get("rollout")), str):
        sampler = {"kind": "vllm", "prefetch": False} if kind == "vllm" else {"kind": "policy"}
        rounds = {key: value for key, value in rounds.items() if key != "rollout"} | {"sampler": sampler}
        then = {**then, "rounds": rounds}
    if not groups or not RENAMED.keys() & then.keys():
        return then
    values, _ = rename_options(then, groups, {*groups, "beta"})
    old = {key: group.restore(values.get(key)) for key, group in groups.items()}
    return values | {key: options.fingerprint() for key, options in old.items() if options is not None}


def hashed_columns(method: Method, config: object) -> tuple[str, ...]:
    """Return the columns of prepared rows on which the trained weights depend. Rows may lack some."""
    return (*method.rows.columns, "token_weights", *recorded_columns(config))


def describe_rows(rows: AnyDatasets | None, columns: Sequence[str]) -> Any:
    """Return the number of prepared rows and a hash of their tokens, labels and weights of tokens.

    The hash of a stream is of its first rows. The result is None for raw rows, and a dict for a dict of data sets.

    Args:
        rows: The rows.
        columns: Columns of prepared rows.
    """
    if rows is None or isinstance(rows, dict):
        return rows and {name: describe_rows(part, columns) for name, part in rows.items()}
    if "index" not in (getattr(rows, "column_names", None) or ()):
        return None
    if not isinstance(rows, datasets.Dataset):
        first = [{name: row[name] for name in columns if name in row} for row in rows.take(8)]
        return f"a stream ({score_cache.rows_key(datasets.Dataset.from_list(first))[:12]})"
    used = rows.select_columns([name for name in columns if name in rows.column_names])
    description = f"{len(rows)} rows ({score_cache.rows_key(used)[:12]})"
    if "images" not in rows.column_names:
        return description
    sizes = [
        size for size, _ in image_versions(rows["images"])
    ]  # not the modification times, since files may be copied
    return f"{description}, {len(sizes)} pictures ({xxhash.xxh3_64_hexdigest(repr(sizes).encode())[:12]})"


def _differing(then: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value then, value now) of each difference between two trees.

    Another version of a library may have more options, or more fields in the config of a model or an adapter. There a
    name in only one of the trees is no difference.
    """
    only_common = above in ("", "model.", "adapter.") or above.startswith("data.")
    for name in sorted(then.keys() & now.keys() if only_common else then.keys() | now.keys()):
        before = then.get(name)
        after = now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differing(before, after, f"{above}{name}.")
        elif before != after:
            yield f"{above}{name}", before, after
