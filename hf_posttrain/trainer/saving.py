"""How PostTrainer saves: every weight, whatever the engine, read again and compared before anybody relies on it."""

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

# in the README.md of a run where `report.card` wrote it
CARD_MARKER = "<!-- written by hf_posttrain; remove this line to keep your own text from being replaced -->"
_WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def _tied_once(model: nn.Module, state: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """A gathered state without the second names of tied weights: gathered, they are tensors of their own."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(w), name) for name, w in model.named_parameters(remove_duplicate=False)}
    return state and {name: tensor for name, tensor in state.items() if names.get(name, name) == name}


def save_last_step(trainer: TrainerInterface) -> str:
    """Save a checkpoint of the last whole step, in which the weights are still, and say so: after an error that all
    ranks have. Nothing where checkpoints are not wanted.
    """
    step = trainer.state.global_step
    if trainer.args.save_strategy == "no" or not step:
        return ""
    if trainer.saved_step != step:
        trainer._save_checkpoint(trainer.model_wrapped, None)
    return f"; checkpoint-{step} is saved: the same command with train.resume_from_checkpoint=auto goes on"


def _adapter_in_fsdp(trainer: TrainerInterface) -> bool:
    return bool(trainer.accelerator.is_fsdp2 and isinstance(forward.unwrap_model(trainer.model), peft.PeftModel))


def remove_engine_copies(trainer: TrainerInterface, checkpoint: Path) -> None:
    """Remove the weights that Accelerate has saved of an adapter under FSDP2. It adds a tied head, which is frozen, and
    the trained weights are in the adapter's own file. All ranks call it.
    """
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        (checkpoint / "pytorch_model_fsdp.bin").unlink(missing_ok=True)
        shutil.rmtree(checkpoint / "pytorch_model_fsdp_0", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def load_sharded_adapter(policy: peft.PeftModel, checkpoint: str) -> None:
    """Copy an adapter's file into the parts of it that FSDP2 has left on this rank. All ranks call it."""
    own = trained_state(policy)
    saved = load_file(adapter_folder(policy, checkpoint) / "adapter_model.safetensors")
    if missing := sorted(own.keys() - saved.keys()):
        raise RuntimeError(f"{checkpoint} lacks {len(missing)} of the adapter's {len(own)} weights, {missing[0]} first")
    with torch.no_grad():
        for name, weight in own.items():
            value = saved[name].to(weight.device)
            if isinstance(weight, DTensor):
                weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
            else:
                weight.copy_(value)


def _loads_pretrained(trainer: TrainerInterface) -> bool:
    """Is the policy a whole model in one piece, not an adapter and not in an engine's own files?"""
    return isinstance(trainer.model, PreTrainedModel) and not engine.changes_weights(trainer.accelerator)


def add_tags(model: PreTrainedModel, method: str) -> None:
    """Give a model the tags that `push_to_hub` and the model card write: the library and the method."""
    if hasattr(model, "add_model_tags"):
        model.add_model_tags(["hf_posttrain", method])


# ---- what is saved


def full_state_dict(trainer: TrainerInterface, adapter_only: bool) -> dict[str, Tensor] | None:
    """Every weight, on the first rank (others may get less), or None where a model's own state_dict is as good.

    adapter_only: without the frozen base, where the engine can leave it out. All ranks call it.
    """
    accelerator = trainer.accelerator
    model = trainer.model_wrapped
    if accelerator.is_fsdp2:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter_only)
        whole: Any = get_model_state_dict(model, options=options)
        return whole
    if not (stage := engine.zero_stage(accelerator)):
        return None
    from deepspeed.utils import safe_get_full_fp32_param

    if stage == 3:
        state = model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=adapter_only)
    else:
        state = accelerator.get_state_dict(model)
    # DeepSpeed trains a float32 copy of bf16 and fp16 weights, which themselves show little of a small step
    for name, weight in model.module.named_parameters(remove_duplicate=False):
        if weight.requires_grad and weight.dtype != torch.float32:
            copied = safe_get_full_fp32_param(weight)  # all ranks together
            if state is not None and name in state:
                state[name] = copied.cpu()
    return state


def save_merged(trainer: TrainerInterface, folder: str) -> None:
    """The trained adapter merged into its base and saved as a plain model; raises as `check_mergeable`. All ranks."""
    policy = forward.unwrap_model(trainer.model)
    check_mergeable(policy)
    state = full_state_dict(trainer, adapter_only=False) or policy.state_dict()
    if trainer.args.should_save:
        generation = set_generation_config(policy, trainer.terminal_ids)
        write_merged(policy, state, trainer.processing_class, generation, folder)


def write_merged(
    policy: peft.PeftModel, state: dict[str, Tensor], processing_class: Any, generation: GenerationConfig, folder: str
) -> None:
    """Save `policy` with its adapter merged, as a plain model, with its tokenizer or processor, and check the files.

    state: every weight of the policy, whole. Raises RuntimeError where what was saved is not the whole model.
    """
    # a twin in one piece, with the same adapter; not through from_config, since DeepSpeed would cut it
    inner: Any = policy.get_base_model()
    trained = policy.active_adapter
    base = sharded.original_class(inner)(copy.deepcopy(inner.config)).to(inner.dtype)
    # a tied head is merged by itself, and is one tensor with the embedding again if they are equal then
    head = base.get_output_embeddings()
    if tied := head is not None and head.weight is base.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    twin = peft.get_peft_model(base, config_with_default_init(policy.peft_config[trained]), adapter_name=trained)
    # what a layer has worked out of its base's weight and no state has: AdaMSS, which of its rows go together
    for copied, layer in zip(adapted_layers(twin), adapted_layers(policy), strict=True):
        for name in layer.other_param_names:
            if isinstance(values := getattr(layer, name, None), dict) and trained in values:
                getattr(copied, name)[trained] = copy.deepcopy(values[trained])
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name in state:  # models keep some in float32
            tensor.data = tensor.data.to(state[name].dtype)
    others = set(policy.peft_config) - {trained}
    twin.load_state_dict({name: tensor for name, tensor in state.items() if not others & set(name.split("."))})
    buffers = dict(twin.named_buffers())
    for name, buffer in policy.named_buffers():  # some kinds draw what no state dict has
        if name in buffers:
            buffers[name].copy_(buffer)
    with warnings.catch_warnings(action="ignore"):  # that head and embedding are two tensors for now
        merged: Any = twin.merge_and_unload()
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
    """Raises InputError where there is nothing to merge, nothing to merge into, or a kind of layer that PEFT cannot."""
    has_adapter = isinstance(model, peft.PeftModel)
    quantised = has_adapter and getattr(model.get_base_model(), "is_quantized", False)
    if problem := rules.merge_problem(has_adapter, quantised):
        raise InputError(problem)
    if any(getattr(adapter, "layer_replication", None) for adapter in model.peft_config.values()):
        raise InputError("merge_lora: the copies of layer_replication share weights: save it without merge_lora")
    # of each kind the smallest is copied: a head has gigabytes
    found = sorted(adapted_layers(model), key=lambda layer: -sum(weight.numel() for weight in layer.parameters()))
    try:
        for layer in {type(layer): layer for layer in found}.values():
            if any(hasattr(weight, "ds_id") for weight in layer.parameters()):  # not whole
                continue
            copied = copy.deepcopy(layer)
            if any(weight.is_meta for weight in layer.parameters()):
                copied.to_empty(device="cpu")
            copied.merge()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:  # NotImplementedError too
        raise InputError(f"merge_lora: PEFT cannot merge this adapter ({error}): save it without merge_lora") from error


def trained_base_weights(policy: peft.PeftModel) -> list[str]:
    """Names of trained parameters that PEFT does not save with the adapter: those of the base that the user unfroze."""
    known = {id(weight) for weight in adapter_state(policy).values()}
    return [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in known]


def adapter_state(policy: peft.PeftModel) -> dict[str, Tensor]:
    """The parameters, and buffers (VeRA's projections), that PEFT saves with an adapter, by their saved names."""
    state = policy.state_dict(keep_vars=True)
    return peft.get_peft_model_state_dict(policy, state, policy.active_adapter, save_embedding_layers=False)


def trained_state(policy: peft.PeftModel) -> dict[str, Tensor]:
    """Return what is saved of a model with an adapter: `adapter_state`, and parameters of the base that are trained."""
    named = dict(policy.named_parameters())
    return adapter_state(policy) | {name: named[name] for name in trained_base_weights(policy)}


def adapter_folder(policy: peft.PeftModel, folder: str | Path) -> Path:
    """Where PEFT saves the active adapter."""
    return Path(folder) if policy.active_adapter == "default" else Path(folder, policy.active_adapter)


# ---- the proof


def check_folder(trainer: TrainerInterface, folder: str | Path, merged: bool) -> None:
    """`from_pretrained` puts an adapter on top of a whole model in the same folder, which must then be its base.

    merged: an adapter is saved as part of a whole model. Raises InputError where the two would not belong together.
    """
    model = forward.unwrap_model(trainer.model)
    adapter = isinstance(model, peft.PeftModel) and not merged
    others = [name for name in (_WHOLE if adapter else ("adapter_config.json",)) if Path(folder, name).exists()]
    if not others or (adapter and Path(model.get_base_model().config.name_or_path).resolve() == Path(folder).resolve()):
        return
    kinds = ("an adapter", "a whole model") if adapter else ("a whole model", "an adapter")
    raise InputError(
        f"{folder} would get {kinds[0]} and holds {kinds[1]} ({others[0]}): from_pretrained would add one to the "
        "other. Save to another output_dir (resume_from_checkpoint takes a checkpoint's folder), or move it away"
    )


def check_saved(model: nn.Module, folder: str | Path) -> None:
    """Compare names, shapes and first rows in the safetensors files of `folder` with the model's or its adapter's.

    Raises RuntimeError where a file cannot be read, or a weight is missing, has another shape or other values.
    """
    inner = forward.unwrap_model(model)
    adapter = isinstance(inner, peft.PeftModel)
    place = adapter_folder(inner, folder) if adapter else Path(folder)
    named: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    if adapter:
        named = trained_state(inner)
    saved: dict[str, WeightSummary] = {}
    for file in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    saved[name] = WeightSummary(("", 0), shape, part[:1] if shape else opened.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{file} was just saved and cannot be read: {error}") from error
    expected = {name: WeightSummary.of(weight) for name, weight in named.items()}
    if not adapter and any(missing_weights(expected, saved)):
        expected = hub_format_summaries(inner, named)
    missing = [*missing_weights(expected, saved)]
    changed = [name for name, weight in expected.items() if name in saved and not weight.starts_as(saved[name])]
    if missing or changed:
        wrong, problem = (missing, "are missing or have another shape") if missing else (changed, "have other values")
        raise RuntimeError(
            f"what was saved in {folder} is not the whole model: {len(wrong)} of {len(expected)} weights {problem}, "
            f"{wrong[0]} first"
        )


class WeightSummary(NamedTuple):
    """What is compared of a weight."""

    identity: tuple[str, int]  # the same for the names of a tied weight
    shape: list[int]
    start: Tensor | None  # its first row; None where an engine has cut the weight

    @classmethod
    def of(cls, weight: Tensor, layer: str = "") -> "WeightSummary":
        """Return this of a weight, or of what ZeRO-3 has left of it. `layer` tells apart those that are freed."""
        shape = list(getattr(weight, "ds_shape", weight.shape))
        start = None if is_sharded(weight) else weight.detach()[:1] if shape else weight.detach()
        return cls((layer, id(weight)), shape, start)

    def starts_as(self, saved: "WeightSummary") -> bool:
        """Return whether the first row is the one that was saved, as far as it is known."""
        if self.start is None or saved.start is None or self.shape != saved.shape:
            return True  # another shape is listed as missing
        own = self.start.cpu()
        return torch.equal(saved.start.to(own.dtype).nan_to_num(), own.nan_to_num())


def missing_weights(expected: Mapping[str, WeightSummary], saved: Mapping[str, WeightSummary]) -> Iterator[str]:
    """Yield a name of each weight that was not saved in its shape. Of tied weights one name is enough."""
    there = {each.identity for name, each in expected.items() if name in saved and saved[name].shape == each.shape}
    for name, weight in expected.items():
        if weight.identity not in there:
            there.add(weight.identity)
            yield name


def hub_format_summaries(inner: nn.Module, named: Mapping[str, Tensor]) -> dict[str, WeightSummary]:
    """Return weights by the names of the hub's format, in which each expert has tensors of its own, for example.

    One layer is converted at a time: on CPU, or without values where an engine has cut it.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, weight in named.items():
        numbered = re.match(r".*?\.\d+\.", name)
        layers.setdefault(numbered[0] if numbered else "", {})[name] = weight
    found: dict[str, WeightSummary] = {}
    for layer, weights in layers.items():
        cut = any(map(is_sharded, weights.values()))
        whole: dict[int, Tensor] = {}
        for weight in weights.values():  # tied weights stay one tensor
            empty = torch.empty(WeightSummary.of(weight).shape, dtype=weight.dtype, device="meta")
            whole.setdefault(id(weight), empty if cut else weight.detach().cpu())
        converted = hub_weights(inner, {name: whole[id(weight)] for name, weight in weights.items()})
        kept = {name: WeightSummary.of(weight, layer) for name, weight in converted.items()}
        found |= {name: weight._replace(start=None if cut else weight.start) for name, weight in kept.items()}
    return found


def is_sharded(weight: Tensor) -> bool:
    """Return whether an engine has left a part of a weight here, or nothing."""
    return hasattr(weight, "ds_id") or isinstance(weight, DTensor) or weight.is_meta


class SavingMixin(TrainerInterface):
    """Methods of `PostTrainer` that save and load."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every weight under every engine, read again and compared; merged where merge_lora says so. All ranks call it.

        Raises RuntimeError where that is not the whole model, InputError where adapter and model would share a folder.
        """
        folder = output_dir or self.args.output_dir
        # checkpoints, which are resumed, keep the adapter: HF names a folder for them, and none for push_to_hub
        merged = self.args.merge_lora and not (_internal_call and output_dir)
        check_folder(self, folder, merged)
        with input_error_on_write(folder), original_dropout(self.model):
            if self.args.should_save:  # a tokenizer without a chat template leaves that of an earlier run there
                Path(folder, "chat_template.jinja").unlink(missing_ok=True)
                shutil.rmtree(Path(folder, "additional_chat_templates"), ignore_errors=True)
            if merged:
                save_merged(self, folder)
            else:
                self._save(
                    folder, _tied_once(self.model, full_state_dict(self, isinstance(self.model, peft.PeftModel)))
                )
                if self.args.should_save:
                    check_saved(self.model, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """HF's, and the generation config with the trained turn end, next to an adapter too."""
        folder = Path(output_dir or self.args.output_dir)
        exact = any(tensor.dtype == torch.float32 for tensor in (state_dict or {}).values())
        generation = set_generation_config(self.model, self.terminal_ids)  # before HF refuses to save it
        with without_reference_adapter(self.model, state_dict) as state_dict:
            super()._save(output_dir, state_dict)
            if not self.args.should_save:
                return
            if isinstance(self.model, peft.PeftModel) and (trained := trained_base_weights(self.model)):
                # weights of the base that are trained too: PEFT loads them from the adapter's file, and saves none
                state = state_dict or self.model.state_dict()
                file = adapter_folder(self.model, folder) / "adapter_model.safetensors"
                added = {name: state[name].detach().cpu().contiguous() for name in trained}
                save_file(load_file(file) | added, file, metadata={"format": "pt"})
        generation.save_pretrained(folder)
        # config.json has the dtype of the model in memory; weights that were saved in float32 are to be loaded so
        if exact and (file := folder / "config.json").exists():
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.get("dtype") in ("bfloat16", "float16"):
                file.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """HF's, into a folder that gets its name when it is complete; its time is not training time."""
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
        """Return the folder of checkpoints: while one is saved, the one that has incomplete checkpoints."""
        return self.saving_folder or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint to the Hub once it is complete. Trainer would push it while it is saved."""
        if self.saving_folder is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """HF copies tensors by name, and so leaves out those that are saved under other names (fused experts)."""
        if _loads_pretrained(self):
            own = self.model if model is None else model
            with input_error_on_load(resume_from_checkpoint):
                loaded = type(own).from_pretrained(resume_from_checkpoint, config=own.config, dtype="auto")
                own.load_state_dict(loaded.state_dict())
            return
        with input_error_on_load(resume_from_checkpoint):
            if _adapter_in_fsdp(self) and not any(Path(resume_from_checkpoint).glob("pytorch_model_fsdp*")):
                load_sharded_adapter(forward.unwrap_model(model or self.model_wrapped), resume_from_checkpoint)
                return
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as Trainer does. Raises InputError for files of another optimizer or model."""
        with input_error_on_load(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint. Trainer leaves out fused experts, and adapters with another name than default."""
        if engine.changes_weights(self.accelerator) and not _adapter_in_fsdp(self):
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card of Trainer, unless the folder has that of the report, which has more.

        dataset_name: the name that TRL has for `dataset`.
        """
        if "dataset_name" in kwargs:
            kwargs["dataset"] = kwargs.pop("dataset_name")
        card = Path(self.args.output_dir, "README.md")
        if not (card.exists() and CARD_MARKER in card.read_text(encoding="utf-8", errors="replace")):
            if not args[2:]:  # the third positional argument is tags
                own = getattr(self.scored[0], "model_tags", None) or []
                given = kwargs.get("tags") or []
                kwargs["tags"] = list(dict.fromkeys([*([given] if isinstance(given, str) else given), *own]))
            super().create_model_card(*args, **kwargs)
