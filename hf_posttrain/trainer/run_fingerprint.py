"""What a run is, written into its checkpoints, and how another run that would resume one differs from it.

Every option of the Config counts but for those named here, which change no weight; so an option that is new counts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import datasets
import peft
import xxhash
from peft import PeftConfig
from torch import nn

from ..data.dataset_type import AnyDatasets
from ..data.images import image_versions
from ..engines import sharded
from ..errors import short_repr
from ..models import adapters, score_cache
from ..monitoring.symptoms import as_names
from ..scoring import forward
from .interface import TrainerInterface
from .option_group import OptionGroup, OptionKind
from .renamed_options import RENAMED, rename_options

_names = lambda text: frozenset(text.split())  # noqa: E731
WEIGHT_SAMPLE = 64  # values of each weight that tell one model from another
UNCOMPARED_OPTIONS = _names("""
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
"""Options that may change: what is logged, saved and shown, where and how the same numbers are computed. The engine and
the rows of a step are compared by `checkpoint.resume_problems`."""
UNCOMPARED_PARTS = frozenset({"accelerator_config.non_blocking"})
"""The same of parts of an option: checkpoints describe them, and they are not compared."""
EVALUATION_OPTIONS = _names("""
    eval_strategy eval_steps eval_delay eval_on_start eval_exact_match eval_max_completion_length eval_dataset
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps per_device_eval_batch_size
    prediction_loss_only include_for_metrics bf16_full_eval fp16_full_eval
""")
"""Options that may change where nothing depends on evaluations: no best model is looked for, no rate follows them."""
OPTIMIZER_STATE_OPTIONS = _names("""
    optim optim_args optim_target_modules learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2
    adam_epsilon
""")
"""Options whose former value comes with the optimizer's state: a new one would have no effect."""


def describe_run(trainer: Any) -> dict[str, Any]:
    """{name: JSON} of everything that the trained weights depend on. Reads every prepared row once."""
    args = trainer.args
    policy = forward.unwrap_model(trainer.model)
    options = args.to_dict()
    follows = options["metric_for_best_model"] or options["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy")
    left_out = UNCOMPARED_OPTIONS if follows else UNCOMPARED_OPTIONS | EVALUATION_OPTIONS
    found = {"method": trainer.method.name} | {name: options[name] for name in options if name not in left_out}
    found |= {name: value.fingerprint() for name, value in vars(args).items() if isinstance(value, OptionKind)}
    # the length of a run shapes its learning rate, if that is not constant
    kind = options["lr_scheduler_type"]
    warmup = args.warmup_steps or 0
    if kind == "constant" or (kind == "constant_with_warmup" and (warmup >= 1 or not warmup)):
        del found["num_train_epochs"], found["max_steps"]
    elif args.max_steps > 0:
        del found["num_train_epochs"]
    adapter = policy.peft_config[policy.active_adapter].to_dict() if isinstance(policy, peft.PeftModel) else {}
    unread = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "runtime_config")
    causal = forward.causal_lm(policy)
    found |= {
        "model": score_cache.numeric_config(causal)
        | {"class": sharded.original_class(causal).__name__, "dtype": str(causal.dtype)},
        "base_weights": trainer.base_key,
        "start_weights": trainer.start_key,
        "second_model": trainer.second_key,
        "adapter": {"peft_type": None} | {name: value for name, value in adapter.items() if name not in unread},
        "train_dataset": describe_rows(trainer, trainer.train_dataset),
    }
    rounds = getattr(args, "rounds", None)
    found["rounds"] = rounds and rounds.fingerprint()
    if rounds:  # where one begins depends on the length of a run, whatever its learning rate does
        found |= {"num_train_epochs": args.passes, "max_steps": args.max_steps}
    if not isinstance(trainer.train_dataset, datasets.Dataset):
        if trainer.recipe:  # not all rows of a stream are known
            sources = trainer.recipe["data"]["train"]
            sources = sources if isinstance(sources, list) else [sources]
            found["data"] = {str(n): source | {"path": None} for n, source in enumerate(sources)}
        found["dataloader_num_workers"] = args.dataloader_num_workers  # share a stream's files: another order
    if follows:
        found["eval_dataset"] = describe_rows(trainer, trainer.eval_dataset)
    plugin = trainer.accelerator.state.deepspeed_plugin
    for name in ("optimizer", "scheduler") if plugin is not None else ():  # of DeepSpeed's own
        found[f"deepspeed.{name}"] = plugin.deepspeed_config.get(name)
    return json.loads(json.dumps(found, default=score_cache.json_default))


def base_weights_key(model: nn.Module, peft_config: PeftConfig | None, method: Any) -> str:
    """A hash of the weights that a checkpoint lacks: those that are frozen, or what a reference begins as. Of what
    ZeRO-3 has cut it is that of this rank's part: such a run is resumed by as many ranks.
    """
    all_of_them = method.second == "reference" and peft_config is None
    return _weights_key(weight for weight in model.named_parameters() if all_of_them or not weight[1].requires_grad)


def start_weights_key(model: nn.Module, peft_config: PeftConfig | None) -> str | None:
    """A hash of the trained weights that a run begins with, without those of a new adapter, which are drawn at random:
    a LoRA that is continued has some B that is not 0, and of other kinds it is not known.
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
    then: Mapping[str, Any], now: Mapping[str, Any], despite: Any, groups: Mapping[str, OptionGroup]
) -> dict[str, str]:
    """{name: "NAME: then X, now Y"} of what both runs describe otherwise and `despite` does not name.

    despite: a name or a list of them; `model` stands for all that begins so. Options of the optimizer stay. groups: of
    the method.
    """
    allowed = set(as_names(despite)) - OPTIMIZER_STATE_OPTIONS
    then = _with_groups(then, groups)
    return {
        key: f"{key}: then {short_repr(before)}, now {short_repr(after)}"
        for key, before, after in _differing(then, now)
        if not {key, key.partition(".")[0]} & allowed
        and key not in UNCOMPARED_PARTS
        and not (key == "second_model" and None in (before, after))  # its scores came from the cache
    }


def _with_groups(then: Mapping[str, Any], groups: Mapping[str, OptionGroup]) -> Mapping[str, Any]:
    """Return a description of a run whose options are in groups, which the last release described one by one."""
    rounds = then.get("rounds")
    if isinstance(rounds, dict) and "rollout" in rounds:
        program = {"transformers": "policy"}.get(rounds["rollout"], rounds["rollout"])
        rounds = {key: value for key, value in rounds.items() if key != "rollout"} | {"sampler": program}
        then = {**then, "rounds": rounds}
    if not groups or not RENAMED.keys() & then.keys():
        return then
    values, _ = rename_options(then, groups, {*groups, "beta"})
    old = {key: group.restore(values.get(key)) for key, group in groups.items()}
    return values | {key: options.fingerprint() for key, options in old.items() if options is not None}


def describe_rows(trainer: TrainerInterface, rows: AnyDatasets | None) -> Any:
    """How many prepared rows, and a hash of their tokens and labels; of a stream that of its first rows. None of rows
    that are raw, as those that replaced others.
    """
    if rows is None or isinstance(rows, dict):
        return rows and {name: describe_rows(trainer, part) for name, part in rows.items()}
    columns = trainer.data_method.rows.columns
    if "index" not in (getattr(rows, "column_names", None) or ()):
        return None
    if not isinstance(rows, datasets.Dataset):
        first = [{name: row[name] for name in columns if name in row} for row in rows.take(8)]
        return f"a stream ({score_cache.rows_key(datasets.Dataset.from_list(first))[:12]})"
    used = rows.select_columns([name for name in columns if name in rows.column_names])
    described = f"{len(rows)} rows ({score_cache.rows_key(used)[:12]})"
    if "images" not in rows.column_names:
        return described
    sizes = [size for size, _ in image_versions(rows["images"])]  # their files may have been copied since
    return f"{described}, {len(sizes)} pictures ({xxhash.xxh3_64_hexdigest(repr(sizes).encode())[:12]})"


def _differing(then: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value then, value now) where two trees differ. Another version of a library may have more options,
    and a model's or adapter's config more fields: what only one of the trees has there is no difference.
    """
    grows = above in ("", "model.", "adapter.") or above.startswith("data.")
    for name in sorted(then.keys() & now.keys() if grows else then.keys() | now.keys()):
        before = then.get(name)
        after = now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differing(before, after, f"{above}{name}.")
        elif before != after:
            yield f"{above}{name}", before, after
