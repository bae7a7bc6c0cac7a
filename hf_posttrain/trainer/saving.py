"""Saving of models by PostTrainer. Every weight is saved under every engine, and the files are read and compared."""

import copy
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GenerationConfig, PreTrainedModel

from ..engines import engine, sharded
from ..errors import InputError
from ..models.adapters import adapted_layers, config_with_default_init
from ..models.hub_weights import hub_weights
from ..models.policy import original_dropout, set_generation_config
from ..models.reference import without_reference_adapter
from ..scoring import forward
from . import checkpoint, rules, stateful
from .checkpoint import input_error_on_load
from .interface import TrainerInterface
from .output_dir import check_space, input_error_on_write, min_checkpoint_bytes

CARD_MARKER = "<!-- written by hf_posttrain; remove this line to keep your own text from being replaced -->"
"""Line of a README.md that `report.card` has written."""
_MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def _without_tied_duplicates(model: nn.Module, state: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Return a gathered state without the second names of tied weights, which are separate tensors in it."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(w), name) for name, w in model.named_parameters(remove_duplicate=False)}
    return state and {name: tensor for name, tensor in state.items() if names.get(name, name) == name}


def save_last_step(trainer: TrainerInterface) -> str:
    """Save a checkpoint of the last complete step, whose weights have not changed, after an error on all ranks.

    Returns:
        The end of the error message, which is empty if there is no checkpoint, because saving is off or no step was
        completed.
    """
    step = trainer.state.global_step
    if trainer.args.save_strategy == "no" or not step:
        return ""
    if trainer.saved_step != step:
        trainer._save_checkpoint(trainer.model_wrapped, None)
    return f". checkpoint-{step} is saved. To resume, run the same command with train.resume_from_checkpoint=auto"


def _adapter_in_fsdp(trainer: TrainerInterface) -> bool:
    """Return whether the policy is a model with an adapter under FSDP2."""
    return bool(trainer.accelerator.is_fsdp2 and isinstance(forward.unwrap_model(trainer.model), peft.PeftModel))


def remove_engine_copies(trainer: TrainerInterface, checkpoint: Path) -> None:
    """Remove the weights that Accelerate has saved for a model with an adapter under FSDP2. All ranks call it.

    Accelerate also saves a tied head, which is frozen. The trained weights are in the file of the adapter.
    """
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        (checkpoint / "pytorch_model_fsdp.bin").unlink(missing_ok=True)
        shutil.rmtree(checkpoint / "pytorch_model_fsdp_0", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def load_sharded_adapter(policy: peft.PeftModel, checkpoint: str) -> None:
    """Load the file of an adapter into its shards on this rank under FSDP2. All ranks call it."""
    weights = trained_state(policy)
    saved = load_file(adapter_folder(policy, checkpoint) / "adapter_model.safetensors")
    if missing := sorted(weights.keys() - saved.keys()):
        counts = f"{len(missing)} of the adapter's {len(weights)} weights"
        raise RuntimeError(f"{checkpoint} lacks {counts}, the first is {missing[0]}")
    with torch.no_grad():
        for name, weight in weights.items():
            value = saved[name].to(weight.device)
            if isinstance(weight, DTensor):
                weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
            else:
                weight.copy_(value)


def _loads_pretrained(trainer: TrainerInterface) -> bool:
    """Return whether `from_pretrained` can load a checkpoint: the policy has no adapter, and no engine shards it."""
    return isinstance(trainer.model, PreTrainedModel) and not engine.changes_weights(trainer.accelerator)


def add_tags(model: PreTrainedModel, method: str) -> None:
    """Add the library and the method to the tags that `push_to_hub` and the model card write."""
    if hasattr(model, "add_model_tags"):
        model.add_model_tags(["hf_posttrain", method])


# ---- weights


def full_state_dict(trainer: TrainerInterface, adapter_only: bool) -> dict[str, Tensor] | None:
    """Gather all weights on the first rank. All ranks call it.

    Args:
        trainer: The trainer.
        adapter_only: Whether to omit the frozen base model, if the engine supports this.

    Returns:
        The weights by name, which may be incomplete on other ranks, or None if `state_dict` of the model is complete.
    """
    accelerator = trainer.accelerator
    model = trainer.model_wrapped
    if accelerator.is_fsdp2:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter_only)
        state_dict: Any = get_model_state_dict(model, options=options)
        return state_dict
    if not (stage := engine.zero_stage(accelerator)):
        return None
    from deepspeed.utils import safe_get_full_fp32_param

    if stage == 3:
        state = model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=adapter_only)
    else:
        state = accelerator.get_state_dict(model)
    # DeepSpeed trains a float32 copy of bf16 and fp16 weights, whose own precision would hide small steps
    for name, weight in model.module.named_parameters(remove_duplicate=False):
        if weight.requires_grad and weight.dtype != torch.float32:
            float32_weight = safe_get_full_fp32_param(weight)  # a collective operation
            if state is not None and name in state:
                state[name] = float32_weight.cpu()
    return state


def save_merged(trainer: TrainerInterface, folder: str) -> None:
    """Merge the trained adapter into its base and save a plain model. All ranks call it.

    Raises:
        InputError: If the adapter cannot be merged, as in `check_mergeable`.
    """
    policy = forward.unwrap_model(trainer.model)
    check_mergeable(policy)
    state = full_state_dict(trainer, adapter_only=False) or policy.state_dict()
    if trainer.args.should_save:
        generation = set_generation_config(policy, trainer.terminal_ids)
        write_merged(policy, state, trainer.processing_class, generation, folder)


def write_merged(
    policy: peft.PeftModel, state: dict[str, Tensor], processing_class: Any, generation: GenerationConfig, folder: str
) -> None:
    """Save the policy with its adapter merged, as a plain model, and check the files.

    Args:
        policy: The policy.
        state: All weights of the policy, unsharded.
        processing_class: The tokenizer or processor, which is also saved.
        generation: The generation config, which is also saved.
        folder: The output folder.

    Raises:
        RuntimeError: If the saved weights are not those of the merged model.
    """
    # an unsharded copy with the same adapter, not built with from_config, since DeepSpeed would shard it
    inner: Any = policy.get_base_model()
    adapter = policy.active_adapter
    base = sharded.original_class(inner)(copy.deepcopy(inner.config)).to(inner.dtype)
    # A tied head is merged separately. It is tied to the embedding again if the two are equal after that.
    head = base.get_output_embeddings()
    if tied := head is not None and head.weight is base.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    copied = peft.get_peft_model(base, config_with_default_init(policy.peft_config[adapter]), adapter_name=adapter)
    # values that a layer has computed from its base weight and no state dict has, such as the row groups of AdaMSS
    for copied_layer, layer in zip(adapted_layers(copied), adapted_layers(policy), strict=True):
        for name in layer.other_param_names:
            if isinstance(values := getattr(layer, name, None), dict) and adapter in values:
                getattr(copied_layer, name)[adapter] = copy.deepcopy(values[adapter])
    for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
        if name in state:  # models keep some weights in float32
            tensor.data = tensor.data.to(state[name].dtype)
    others = set(policy.peft_config) - {adapter}
    copied.load_state_dict({name: tensor for name, tensor in state.items() if not others & set(name.split("."))})
    buffers = dict(copied.named_buffers())
    for name, buffer in policy.named_buffers():  # some adapters have random buffers that are in no state dict
        if name in buffers:
            buffers[name].copy_(buffer)
    with warnings.catch_warnings(action="ignore"):  # that head and embedding are separate tensors
        merged: Any = copied.merge_and_unload()
    if tied:
        head = merged.get_output_embeddings()
        embedding = merged.get_input_embeddings()
        config = merged.config
        if equal := torch.equal(head.weight, embedding.weight):
            head.weight = embedding.weight
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = equal
    for saved in (merged, processing_class, generation):
        saved.save_pretrained(folder)
    check_saved(merged, folder)


def check_mergeable(model: Any) -> None:
    """Raise InputError if a model has no adapter, or PEFT cannot merge it into the base model."""
    has_adapter = isinstance(model, peft.PeftModel)
    quantized = has_adapter and getattr(model.get_base_model(), "is_quantized", False)
    if problem := rules.merge_problem(has_adapter, quantized):
        raise InputError(problem)
    if any(getattr(adapter, "layer_replication", None) for adapter in model.peft_config.values()):
        raise InputError("merge_lora: the copies of layer_replication share weights. Remove merge_lora")
    # the smallest layer of each class is tried, since a head has gigabytes
    layers = sorted(adapted_layers(model), key=lambda layer: -sum(weight.numel() for weight in layer.parameters()))
    try:
        for layer in {type(layer): layer for layer in layers}.values():
            if any(hasattr(weight, "ds_id") for weight in layer.parameters()):  # sharded
                continue
            copied = copy.deepcopy(layer)
            if any(weight.is_meta for weight in layer.parameters()):
                copied.to_empty(device="cpu")
            copied.merge()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        raise InputError(f"merge_lora: PEFT cannot merge this adapter ({error}). Remove merge_lora") from error


def trained_base_weights(policy: peft.PeftModel) -> list[str]:
    """Return the names of trained parameters of the base model, which the user unfroze and PEFT does not save."""
    saved = {id(weight) for weight in adapter_state(policy).values()}
    return [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in saved]


def adapter_state(policy: peft.PeftModel) -> dict[str, Tensor]:
    """Return the parameters and buffers (such as the projections of VeRA) that PEFT saves, by their saved names."""
    state = policy.state_dict(keep_vars=True)
    return peft.get_peft_model_state_dict(policy, state, policy.active_adapter, save_embedding_layers=False)


def trained_state(policy: peft.PeftModel) -> dict[str, Tensor]:
    """Return the saved weights of a model with an adapter: `adapter_state` and trained parameters of the base model."""
    parameters = dict(policy.named_parameters())
    return adapter_state(policy) | {name: parameters[name] for name in trained_base_weights(policy)}


def adapter_folder(policy: peft.PeftModel, folder: str | Path) -> Path:
    """Return the folder in which PEFT saves the active adapter."""
    return Path(folder) if policy.active_adapter == "default" else Path(folder, policy.active_adapter)


# ---- verification


def check_folder(model: nn.Module, folder: str | Path, merged: bool) -> None:
    """Raise InputError if a folder has a model and would get an adapter of another model, or the reverse.

    `from_pretrained` would apply the adapter to the model in the same folder.

    Args:
        model: The policy.
        folder: The output folder.
        merged: Whether the adapter is saved as part of a model.
    """
    inner = forward.unwrap_model(model)
    adapter = isinstance(inner, peft.PeftModel) and not merged
    others = [name for name in (_MODEL_FILES if adapter else ("adapter_config.json",)) if Path(folder, name).exists()]
    if not others or (adapter and Path(inner.get_base_model().config.name_or_path).resolve() == Path(folder).resolve()):
        return
    kinds = ("an adapter", "a full model") if adapter else ("a full model", "an adapter")
    raise InputError(
        f"{folder} would get {kinds[0]} and holds {kinds[1]} ({others[0]}). from_pretrained would add one to the "
        "other. Set another output_dir (resume_from_checkpoint may be the folder of a checkpoint), or move the files"
    )


def check_saved(model: nn.Module, folder: str | Path) -> None:
    """Compare the safetensors files of a folder with the weights of a model, or of its adapter.

    Names, shapes and first rows are compared.

    Raises:
        RuntimeError: If a file cannot be read, or a weight is missing, has another shape or other values.
    """
    inner = forward.unwrap_model(model)
    adapter = isinstance(inner, peft.PeftModel)
    weights_folder = adapter_folder(inner, folder) if adapter else Path(folder)
    weights: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    if adapter:
        weights = trained_state(inner)

    saved: dict[str, WeightSummary] = {}
    for file in sorted(weights_folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    saved[name] = WeightSummary(("", 0), shape, part[:1] if shape else opened.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{file} was just saved and cannot be read: {error}") from error

    expected = {name: WeightSummary.from_weight(weight) for name, weight in weights.items()}
    if not adapter and any(missing_weights(expected, saved)):
        expected = hub_format_summaries(inner, weights)
    missing = [*missing_weights(expected, saved)]
    changed = [name for name, weight in expected.items() if name in saved and not weight.equals_saved(saved[name])]
    if missing or changed:
        names, problem = (missing, "are missing or have another shape") if missing else (changed, "have other values")
        raise RuntimeError(
            f"the files saved in {folder} are not the complete model: {len(names)} of {len(expected)} weights {problem}"
            f", the first is {names[0]}"
        )


class WeightSummary(NamedTuple):
    """Properties of a weight that are compared.

    Attributes:
        identity: The same for all names of a tied weight.
        shape: Shape of the unsharded weight.
        first_row: First row of the weight, or None if an engine has sharded it.
    """

    identity: tuple[str, int]
    shape: list[int]
    first_row: Tensor | None

    @classmethod
    def from_weight(cls, weight: Tensor, layer: str = "") -> "WeightSummary":
        """Return the summary of a weight, which may be sharded.

        Args:
            weight: The weight.
            layer: Name of the layer, part of the identity. Temporary tensors of different layers may have equal ids.
        """
        shape = list(getattr(weight, "ds_shape", weight.shape))
        first_row = None if is_sharded(weight) else weight.detach()[:1] if shape else weight.detach()
        return cls((layer, id(weight)), shape, first_row)

    def equals_saved(self, saved: "WeightSummary") -> bool:
        """Return whether the first row equals the saved one, or one of the two is unknown."""
        if self.first_row is None or saved.first_row is None or self.shape != saved.shape:
            return True  # `missing_weights` yields weights of another shape
        first_row = self.first_row.cpu()
        return torch.equal(saved.first_row.to(first_row.dtype).nan_to_num(), first_row.nan_to_num())


def missing_weights(expected: Mapping[str, WeightSummary], saved: Mapping[str, WeightSummary]) -> Iterator[str]:
    """Yield a name of each weight that was not saved with its shape. Tied weights are saved under one name."""
    saved_identities = {
        weight.identity for name, weight in expected.items() if name in saved and saved[name].shape == weight.shape
    }
    for name, weight in expected.items():
        if weight.identity not in saved_identities:
            saved_identities.add(weight.identity)
            yield name


def hub_format_summaries(inner: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, WeightSummary]:
    """Return summaries of weights in the format of the Hub, in which for example each expert has separate tensors.

    One layer is converted at a time, on CPU, or without values if an engine has sharded it.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        numbered = re.match(r".*?\.\d+\.", name)
        layers.setdefault(numbered[0] if numbered else "", {})[name] = weight
    summaries: dict[str, WeightSummary] = {}
    for layer, layer_weights in layers.items():
        sharded_layer = any(map(is_sharded, layer_weights.values()))
        tensors: dict[int, Tensor] = {}
        for weight in layer_weights.values():  # tied weights stay one tensor
            empty = torch.empty(WeightSummary.from_weight(weight).shape, dtype=weight.dtype, device="meta")
            tensors.setdefault(id(weight), empty if sharded_layer else weight.detach().cpu())
        converted = hub_weights(inner, {name: tensors[id(weight)] for name, weight in layer_weights.items()})
        for name, weight in converted.items():
            summary = WeightSummary.from_weight(weight, layer)
            summaries[name] = summary._replace(first_row=None if sharded_layer else summary.first_row)
    return summaries


def is_sharded(weight: Tensor) -> bool:
    """Return whether an engine has sharded a weight, so that this rank has a part of it or nothing."""
    return hasattr(weight, "ds_id") or isinstance(weight, DTensor) or weight.is_meta


class SavingMixin(TrainerInterface):
    """Methods of `PostTrainer` that save and load."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and compare the files with it. An adapter is merged with `merge_lora`. All ranks call it.

        Raises:
            RuntimeError: If the saved files are not the complete model.
            InputError: If a full model and an adapter of another one would be in the same folder.
        """
        folder = output_dir or self.args.output_dir
        # Checkpoints keep the adapter, to be resumed. Trainer passes a folder for them, and none for push_to_hub.
        merged = self.args.merge_lora and not (_internal_call and output_dir)
        check_folder(self.model, folder, merged)
        with input_error_on_write(folder), original_dropout(self.model):
            if self.args.should_save:  # a tokenizer without a chat template does not replace that of an earlier run
                Path(folder, "chat_template.jinja").unlink(missing_ok=True)
                shutil.rmtree(Path(folder, "additional_chat_templates"), ignore_errors=True)
            if merged:
                save_merged(self, folder)
            else:
                state_dict = full_state_dict(self, isinstance(self.model, peft.PeftModel))
                self._save(folder, _without_tied_duplicates(self.model, state_dict))
                if self.args.should_save:
                    check_saved(self.model, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as Trainer does, and the generation config with the trained end of turn, also for an adapter."""
        folder = Path(output_dir or self.args.output_dir)
        saves_float32 = any(tensor.dtype == torch.float32 for tensor in (state_dict or {}).values())
        generation = set_generation_config(self.model, self.terminal_ids)  # before Trainer rejects an invalid one
        with without_reference_adapter(self.model, state_dict) as state_dict:
            super()._save(output_dir, state_dict)
            if not self.args.should_save:
                return
            if isinstance(self.model, peft.PeftModel) and (names := trained_base_weights(self.model)):
                # PEFT loads trained weights of the base model from the file of the adapter, but does not save them
                state = state_dict or self.model.state_dict()
                file = adapter_folder(self.model, folder) / "adapter_model.safetensors"
                base_weights = {name: state[name].detach().cpu().contiguous() for name in names}
                save_file(load_file(file) | base_weights, file, metadata={"format": "pt"})
        generation.save_pretrained(folder)
        # config.json has the dtype of the model in memory, and weights that are saved in float32 must be loaded so
        if saves_float32 and (file := folder / "config.json").exists():
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.get("dtype") in ("bfloat16", "float16"):
                file.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")

    def save_state(self) -> None:
        """Write trainer_state.json to the output folder."""
        if self.is_world_process_zero():
            checkpoint.write_state(self.state, Path(self.args.output_dir, "trainer_state.json"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint in a folder that is renamed after completion. Its time does not count as training time."""
        run = self.args.output_dir
        with self.throughput.paused(), input_error_on_write(run), checkpoint.atomic_checkpoint(self) as folder:
            self.saving_folder = folder
            try:
                if self.args.should_save:
                    check_space(run, min_checkpoint_bytes(self.model))
                super()._save_checkpoint(model, trial)
                if _adapter_in_fsdp(self):
                    remove_engine_copies(self, Path(folder, f"checkpoint-{self.state.global_step}"))
                stateful.save(self.stateful, f"{folder}/checkpoint-{self.state.global_step}", self.args.should_save)
            finally:
                self.saving_folder = None
        self.saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of checkpoints. While a checkpoint is saved, it is the one of incomplete checkpoints."""
        return self.saving_folder or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint to the Hub after it is complete. Trainer would push it while it is saved."""
        if self.saving_folder is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint.

        Trainer copies tensors by name, and would omit those that are saved under other names (fused experts).
        """
        if _loads_pretrained(self):
            target = self.model if model is None else model
            with input_error_on_load(resume_from_checkpoint):
                loaded = type(target).from_pretrained(resume_from_checkpoint, config=target.config, dtype="auto")
                target.load_state_dict(loaded.state_dict())
            return
        with input_error_on_load(resume_from_checkpoint):
            if _adapter_in_fsdp(self) and not any(Path(resume_from_checkpoint).glob("pytorch_model_fsdp*")):
                load_sharded_adapter(forward.unwrap_model(model or self.model_wrapped), resume_from_checkpoint)
                return
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as Trainer does.

        Raises:
            InputError: If the files are of another optimizer or model.
        """
        with input_error_on_load(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint. Trainer would omit fused experts, and adapters with a name other than default."""
        if engine.changes_weights(self.accelerator) and not _adapter_in_fsdp(self):
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card of Trainer, unless the folder has the more detailed one of the report.

        `dataset_name` is accepted for `dataset`, as in TRL.
        """
        if "dataset_name" in kwargs:
            kwargs["dataset"] = kwargs.pop("dataset_name")
        card = Path(self.args.output_dir, "README.md")
        if not (card.exists() and CARD_MARKER in card.read_text(encoding="utf-8", errors="replace")):
            if not args[2:]:  # the third positional argument is tags
                model_tags = getattr(self.scored[0], "model_tags", None) or []
                tags = kwargs.get("tags") or []
                tags = [tags] if isinstance(tags, str) else tags
                kwargs["tags"] = list(dict.fromkeys([*tags, *model_tags]))
            super().create_model_card(*args, **kwargs)
