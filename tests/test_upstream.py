"""Canaries: what we rely on in other packages that they do not promise. A release that changes it fails here, with the
name of our file that needs it, and not in somebody's run.

    NEEDS      the table: upstream symbol -> what we rely on, and our files (below hf_posttrain/) that use it
    canary     the check of a row, a small assertion about upstream alone

A private name of another package that hf_posttrain uses and NEEDS lacks fails
`test_no_private_name_is_used_that_the_table_lacks`: look for a public way first, else add a row and its canary. When
code moves, its file in the table moves along; the failure says where it is now.

vLLM is not installed where tests run: tests/rollouts/test_vllm.py has stand-ins for what rollouts/ needs of it.
"""

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import accelerate
import datasets
import evaluate
import peft
import pytest
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_posttrain
from hf_posttrain.data.sources import load

PACKAGE = Path(hf_posttrain.__file__).parent


class Need(NamedTuple):
    """A row of the table."""

    symbol: str
    """Of another package."""
    files: str
    """Ours that rely on it, below hf_posttrain/, separated by blanks."""
    what: str
    """What they rely on."""
    word: str = ""
    """How they say it, where that is not the last part of the symbol."""


NEEDS = {need.symbol: need for need in [
    Need("transformers.PreTrainedModel._weight_conversions", "models/load.py",
         "what was done to weights while they were loaded, and is undone while they are saved; absent: the usual"),
    # ---- transformers: chat templates
    Need("transformers.utils.chat_template_utils._compile_jinja_template", "data/chat.py",
         "the template with which apply_chat_template renders: its result without the preparation of each message"),
    # ---- transformers: processors
    Need("transformers.ProcessorMixin._process_images", "data/images.py",
         "of pictures it gives the tensors for the model and the text that stands for each"),
    Need("transformers.ProcessorMixin._get_arguments_from_pretrained", "models/load.py",
         "what the constructor is given by place, in the order of get_attributes"),
    Need("transformers.ProcessorMixin._merge_kwargs", "data/images.py",
         "it gives the options for pictures that a processor has of its own, as images_kwargs"),
    # ---- transformers: Trainer, in the order in which a run calls it
    Need("transformers.Trainer.loss_is_scaled_for_ga", "trainer/interface.py",
         "True: training_step does not divide the loss by micro-batches"),
    Need("transformers.Trainer.callback_handler.callbacks", "monitoring/progress.py",
         "HF's flow first, then the caller's, the progress one last"),
    Need("transformers.Trainer._get_train_sampler", "trainer/base.py",
         "the order of training rows; by length: a LengthGroupedSampler"),
    Need("transformers.Trainer._get_eval_sampler", "trainer/base.py", "of evaluation; None: rows in order"),
    Need("transformers.Trainer._get_dataloader", "trainer/evaluation.py",
         "makes every loader, of self.data_collator as it is at that moment"),
    Need("transformers.Trainer._init_training_state", "trainer/checkpoint.py",
         "(..., checkpoint, trial): passes done, micro-batches to skip; state.epoch: passes done + steps / max_steps"),
    Need("transformers.Trainer._prepare_for_training", "trainer/base.py",
         "once a train(): (wrapped model, the loader that is iterated)"),
    Need("transformers.Trainer._load_from_checkpoint", "trainer/saving.py",
         "loads the weights of the folder that is resumed"),
    Need("transformers.Trainer._load_optimizer_and_scheduler", "trainer/saving.py",
         "(checkpoint): loads both from its files, but for DeepSpeed's"),
    Need("transformers.Trainer.get_batch_samples", "trainer/step.py",
         "a step's micro-batches, and num_items_in_batch of compute_loss; none: no step"),
    Need("transformers.Trainer.current_gradient_accumulation_steps", "trainer/step.py", "micro-batches of this step"),
    Need("transformers.Trainer._prepare_inputs", "trainer/step.py",
         "called with each micro-batch, to bring it to the device"),
    Need("transformers.Trainer.is_in_train", "rollouts/policy_sampler.py", "True from the start of train() to its end"),
    Need("transformers.Trainer.log", "monitoring/anomaly_monitor.py",
         "log_history has the entry, with its step, before on_log is called", "log_history"),
    Need("transformers.Trainer._maybe_log_save_evaluate", "trainer/evaluation.py",
         "evaluates; its KeyError for a metric that evaluation lacks names metric_for_best_model"),
    Need("transformers.Trainer.evaluation_loop", "trainer/evaluation.py",
         "is told metric_key_prefix by keyword; what we add to its metrics is logged and returned"),
    Need("transformers.Trainer._save_checkpoint", "trainer/saving.py",
         "saves all of it in checkpoint-N under the names that we look for"),
    Need("transformers.Trainer._get_output_dir", "trainer/saving.py", "the folder that checkpoint-N is made in"),
    Need("transformers.Trainer.save_model(_internal_call)", "trainer/saving.py",
         "True: of a checkpoint with its folder, of push_to_hub without; False: the caller's own", "_internal_call"),
    Need("transformers.Trainer._save", "trainer/saving.py", "writes the given state dict, tokenizer and arguments"),
    Need("transformers.Trainer._push_from_checkpoint", "trainer/saving.py",
         "called by _save_checkpoint with the checkpoint's folder"),
    Need("transformers.Trainer._load_best_model", "trainer/saving.py",
         "called at the end, for state.best_model_checkpoint"),
    Need("transformers.Trainer.create_model_card", "report/card.py",
         "its draft can be told by these words", "generated automatically according to the information"),
    Need("transformers.Trainer.get_total_train_batch_size",
         "trainer/checkpoint.py engines/launch.py monitoring/anomaly_monitor.py",
         "rows of an optimizer step over all ranks"),
    Need("transformers.TrainerState.stateful_callbacks", "trainer/checkpoint.py",
         "ours are kept under the class's name, and a key that is no callback survives saving and resuming"),
    # ---- transformers: the rest
    Need("transformers.TrainingArguments._n_gpu", "trainer/config.py", "n_gpu, and no DataParallel where it is 1"),
    Need("transformers.TrainingArguments.fsdp_plugin_args", "engines/launch.py check/placement.py",
         "what FSDP's plugin will be given: fsdp_version, state_dict_type, cpu_offload"),
    Need("transformers.TrainingArguments.deepspeed_plugin", "engines/launch.py engines/sequence.py check/placement.py",
         "None without DeepSpeed, else Accelerate's, with zero_stage and deepspeed_config"),
    Need("transformers.trainer_utils.has_length", "trainer/step.py trainer/checkpoint.py monitoring/progress.py",
         "False for streams, whose len() raises"),
    Need("transformers.trainer_utils.sort_checkpoints", "trainer/checkpoint.py",
         "folders checkpoint-N, the oldest first, but the best next to last"),
    Need("transformers.trainer_pt_utils.LengthGroupedSampler", "trainer/length_sampler.py",
         "its state is in __dict__, its order that of .generator"),
    Need("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref", "models/load.py",
         "a loading model is cut by ZeRO-3 while this is set, and not after unset_hf_deepspeed_config()"),
    Need("transformers.AttentionInterface", "scoring/attention_selection.py check/placement.py",
         "what is registered is called by models of that name, with 4D masks as we made them, one a kind of layer, and "
         "with keyword arguments that the model was called with"),
    Need("transformers.AttentionMaskInterface", "scoring/attention_selection.py",
         "makes the masks of generation and of padded rows"),
    Need("transformers.PreTrainedModel._can_set_attn_implementation", "scoring/attention_selection.py",
         "True where set_attn_implementation has an effect"),
    Need("transformers.integrations.sdpa_attention.sdpa_attention_forward", "scoring/attention.py",
         "[R, heads, L, D] -> ([R, L, heads, D], None), with is_causal where there is no mask"),
    Need("transformers.PreTrainedConfig._attn_implementation",
         "scoring/attention.py scoring/layout_selection.py engines/sequence.py check/placement.py",
         "the name of the attention that the model runs"),
    Need("transformers.PreTrainedConfig._name_or_path", "models/score_cache.py models/policy.py teachers/factory.py",
         "where it was loaded from, in to_dict() too"),
    Need("transformers.PreTrainedModel._supports_sdpa", "scoring/layout_selection.py",
         "True where attention takes a custom mask"),
    Need("transformers.PreTrainedModel._supports_flex_attn",
         "scoring/layout_selection.py scoring/attention_selection.py",
         "the same"),
    Need("transformers.PreTrainedModel._no_split_modules", "engines/sharded.py",
         "the classes of the layers that FSDP wraps"),
    Need("transformers.PreTrainedModel.base_model", "scoring/forward.py",
         "the backbone: its last_hidden_state through the head is logits; router_logits on request"),
    Need("transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func", "trainer/router_loss.py",
         "its mask weighs tokens, with any numbers"),
    Need("transformers.core_model_loading.revert_weight_conversion", "models/hub_weights.py",
         "names of memory -> those of the hub's files"),
    Need("transformers.GenerationMixin.prepare_inputs_for_generation", "generation/sampler_selection.py",
         "overridden by models that keep more than keys and values"),
    Need("transformers.cache_utils.DynamicLayer",
         "generation/rollout.py generation/graphs.py generation/sampler_selection.py",
         "keys, values, is_initialized, lazy_initialization and the length of keys are all of its state"),
    Need("transformers.DynamicCache.layers",
         "generation/rollout.py generation/graphs.py generation/sampler_selection.py",
         "one a layer, of the kind that its attention needs; may be replaced", "layers"),
    # ---- peft
    Need("peft.PeftModel.forward", "scoring/forward.py",
         "calls the base model's own forward attribute, with keywords that it does not know", "get_base_model"),
    Need("peft.PeftModel.peft_config", "models/reference.py trainer/saving.py",
         "save_pretrained saves the adapters in it, all but default in a folder of their own"),
    Need("peft.PeftModel.create_or_update_model_card", "report/card.py",
         "its empty card can be told by these words", "[More Information Needed]"),
    Need("peft.get_peft_model_state_dict", "models/reference.py trainer/saving.py",
         "one adapter's tensors, which set_peft_model_state_dict takes for another"),
    Need("peft.utils.ModulesToSaveWrapper", "scoring/forward.py",
         "original_module, modules_to_save[name], disable_adapters, active_adapters", "modules_to_save"),
    Need("peft.tuners.lora", "models/hub_weights.py",
         "names: .lora_ in an adapter's weights, .base_layer. in what it wraps", ".lora_"),
    # ---- accelerate
    Need("accelerate.Accelerator.is_fsdp2", "engines/engine.py engines/launch.py engines/sharded.py trainer/saving.py",
         "with state.deepspeed_plugin and state.fsdp_plugin it says which engine runs"),
    Need("accelerate.state.GradientState", "engines/duplicate_mask.py",
         "end_of_dataloader, remainder and active_dataloader of the batch just drawn", "end_of_dataloader"),
    Need("accelerate.data_loader.SkipBatchSampler", "engines/duplicate_mask.py",
         "around the rank's own sampler in a resumed epoch; both hold the one below as batch_sampler", "batch_sampler"),
    Need("accelerate.data_loader.DataLoaderShard.set_epoch", "trainer/length_sampler.py",
         "reaches our sampler", "set_epoch"),
    Need("accelerate.utils.fsdp_utils.fsdp2_prepare_model", "engines/sharded.py",
         "(accelerator, model); reads the plugin's transformer_cls_names_to_wrap, cpu_offload and policies"),
    Need("accelerate.utils.launch.prepare_multi_gpu_env", "engines/launch.py",
         "the names of what the launcher leaves in the environment", "FSDP_STATE_DICT_TYPE"),
    Need("accelerate.ParallelismConfig.sp_handler", "engines/sequence.py",
         "its sp_attn_implementation is what Ulysses will take over", "sp_attn_implementation"),
    # ---- deepspeed
    Need("deepspeed.DeepSpeedEngine._zero3_consolidated_16bit_state_dict", "trainer/saving.py",
         "whole weights; exclude_frozen_parameters"),
    Need("deepspeed.DeepSpeedEngine.empty_partition_cache", "engines/sharded.py",
         "lets go of what a forward has fetched"),
    Need("deepspeed.utils.safe_get_full_fp32_param", "trainer/saving.py",
         "the float32 copy of a low-precision weight, on all ranks"),
    Need("deepspeed.runtime.zero.stage3.unwrap_model_for_generation", "engines/sharded.py",
         "gathers, and takes all hooks off but fwd_pre_hook"),
    Need("deepspeed.DeepSpeedZeRoOffload.fwd_pre_hook", "engines/sharded.py",
         "the hook that compares the order of ranks' forwards, put on by get_param_coordinator().reset_step()"),
    Need("deepspeed.zero.Init", "engines/sharded.py trainer/saving.py report/callbacks.py",
         "marks what it cuts: ds_id, ds_shape, ds_numel", "ds_"),
    Need("deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", "engines/sequence.py",
         "dl, sp_group, sp_rank, sp_world_size; attention is cut in modules in training mode alone", "sp_world_size"),
    Need("deepspeed.ZeROOptimizer.sequence_parallel_size", "engines/sequence.py",
         "what it multiplies summed gradients by"),
    # ---- torch
    Need("torch.distributed.distributed_c10d._get_default_store", "engines/launch.py",
         "the store of the process group, with add()"),
    Need("torch.distributed.fsdp.FSDPModule", "engines/engine.py engines/sharded.py",
         "a wrapped module's class is FSDP<name>, of (FSDPModule, its own class)"),
    Need("torch.nn.Module._non_persistent_buffers_set", "models/hub_weights.py",
         "names of a module's buffers that are not saved"),
    Need("torch.nn.Module._compiled_call_impl", "engines/launch.py", "None unless module.compile() was called"),
    Need("torch.nn.Module.forward", "scoring/forward.py",
         "an attribute of the instance takes its place, with hooks around it", "forward"),
    Need("torch.nn.Linear.forward", "scoring/cpu.py scoring/forward.py",
         "nothing but nn.functional.linear of input, weight and bias", "Linear"),
    # ---- datasets, evaluate, huggingface_hub, bitsandbytes
    Need("datasets.Dataset._fingerprint", "data/fingerprint.py data/sources.py methods/kto_pairing.py",
         "what identifies the rows before they are prepared"),
    Need("datasets.Dataset._indices", "data/audit.py",
         "None, or a table whose first column has the stored row of each row"),
    Need("datasets.IterableDataset._resolve_features", "data/sources.py",
         "the same stream with columns known from its first row"),
    Need("datasets.ReadInstruction.to_absolute", "data/sources.py", "parts with splitname, from_ and to"),
    Need("datasets.ArrowBasedBuilder._split_generators", "data/json_rows.py",
         "with _generate_tables, all that a reader has to define; the first sets the columns"),
    Need("datasets.ArrowBasedBuilder._generate_tables", "data/json_rows.py", "see _split_generators"),
    Need("datasets.features.features.register_feature", "data/json_rows.py",
         "a class of ours that says its Arrow type, and how values go into it and out"),
    Need("evaluate.Metric._info", "generation/exact_match.py",
         "with _compute, all that a metric has to define; it needs no network"),
    Need("evaluate.Metric._compute", "generation/exact_match.py", "see _info"),
    Need("huggingface_hub.constants.HF_HUB_CACHE", "recipe/rules.py",
         "a model of the hub is in its folder models--OWNER--NAME", "models--"),
    Need("trackio.context_vars.current_run", "monitoring/reporters.py", "the run of this process, or None"),
    Need("trackio.context_vars.current_space_id", "monitoring/reporters.py", "the Space that shows the run, or None"),
    Need("trackio.context_vars.current_server", "monitoring/reporters.py", "the server that shows the run, or None"),
    Need("bitsandbytes.nn.Linear4bit.support_avx512bf16_for_cpu", "models/policy.py",
         "False: weights are not repacked in a first forward"),
    Need("torch.ops.mkl._mkl_reorder_linear_weight", "scoring/cpu.py", "packs a weight for a number of rows"),
    Need("torch.ops.mkl._mkl_linear", "scoring/cpu.py", "multiplies as many rows with a packed weight"),
]}  # fmt: skip
CANARIES = {}


def canary(*symbols):
    """Registers the check of these rows: a function that asks for fixtures as a test does."""

    def register(check):
        CANARIES.update(dict.fromkeys(symbols, check))
        return check

    return register


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("symbol", NEEDS)
def test_upstream_is_as_we_rely_on(symbol, request):
    check = CANARIES[symbol]
    given = {name: request.getfixturevalue(name) for name in inspect.signature(check).parameters}
    need = NEEDS[symbol]
    try:
        check(**given)
    except Exception as error:
        what = f"{symbol} is no longer what {need.files} need ({need.what}): {type(error).__name__}: {error}"
        raise AssertionError(what) from error


def test_every_row_has_a_canary_and_every_canary_a_row():
    assert CANARIES.keys() == NEEDS.keys()


# ---- helpers


def accepts(function, *args, **kwargs):
    """Can it be called so?"""
    inspect.signature(function).bind(*args, **kwargs)
    return True


@functools.cache
def tree_of(cls):
    """Its syntax tree, an empty one where it was made at run time or in C."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return ast.parse("")


@functools.cache
def attributes(cls):
    """Names of a class: its own, and those that its methods set on self."""
    stored = (one for one in ast.walk(tree_of(cls)) if isinstance(getattr(one, "ctx", None), ast.Store))
    return {*vars(cls), *(one.attr for one in stored if ast.unparse(one).startswith("self.") and hasattr(one, "attr"))}


def source(thing):
    """Its text on one line."""
    return " ".join(inspect.getsource(thing).split())


# ---- transformers.Trainer: a run of it, watched


class Call(NamedTuple):
    """A call of a method."""

    name: str
    args: tuple
    kwargs: dict
    result: list
    """Filled when it returns."""


class Passed:
    """A loader that says whether it was iterated."""

    def __init__(self, loader):
        self.loader, self.iterated = loader, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.iterated += 1
        return iter(self.loader)


class Counted(TrainerCallback, transformers.trainer_callback.ExportableState):
    """Keeps what it sees."""

    def __init__(self):
        self.logged, self.decided = [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.decided.append(control.should_log)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append((dict(logs), dict(state.log_history[-1])))

    def state(self):
        return {"args": {}, "attributes": {"seen": len(self.logged)}}


class Watched(Trainer):
    """HF's Trainer, its calls noted, changed as little as shows what it does with our overrides."""

    loss_is_scaled_for_ga = True

    def __init__(self, folder, **config):
        self.calls, self.aside, self.losses = [], None, []
        rows = datasets.Dataset.from_list([{"input_ids": [5, 6, n, 8], "labels": [5, 6, n, 8]} for n in range(9, 15)])
        args = TrainingArguments(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, per_device_train_batch_size=2,
            per_device_eval_batch_size=4, gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps",
            eval_steps=1, save_steps=1, load_best_model_at_end=True, bf16=False, **config,
        )  # fmt: skip
        self.counted = Counted()
        super().__init__(tiny_model(), args, None, rows, rows.select(range(5)), callbacks=[self.counted])

    def of(self, name):
        """The calls of a method."""
        return [call for call in self.calls if call.name == name]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        seen = self.is_in_train, self.current_gradient_accumulation_steps, num_items_in_batch
        self.losses += [(loss.item(), *seen)] if torch.is_grad_enabled() else []
        return (loss, {"loss": loss}) if return_outputs else loss

    def _get_output_dir(self, trial):
        return self.aside or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        self.note("_save_checkpoint", model, trial)
        self.aside = str(Path(self.args.output_dir, "aside"))
        super()._save_checkpoint(model, trial)
        self.aside = None

    def _push_from_checkpoint(self, checkpoint_folder):
        self.note("_push_from_checkpoint", checkpoint_folder)

    def _prepare_for_training(self, *args, **kwargs):
        self.note("_prepare_for_training", *args, **kwargs)
        model, loader = super()._prepare_for_training(*args, **kwargs)
        self.prepared = model, loader if self.state.global_step else Passed(loader)  # resumed: some rows are skipped
        return self.prepared

    def evaluation_loop(self, *args, **kwargs):
        self.note("evaluation_loop", *args, **kwargs)
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_ours"] = 7.0
        return output

    def note(self, name, *args, **kwargs):
        self.calls.append(Call(name, args, kwargs, []))
        return self.calls[-1]


def _noted(name):
    def method(self, *args, **kwargs):
        call = self.note(name, *args, **kwargs)
        call.result.append(getattr(super(Watched, self), name)(*args, **kwargs))
        return call.result[0]

    return method


for _name in (
    "_get_train_sampler", "_get_eval_sampler", "_get_dataloader", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_init_training_state", "get_batch_samples",
    "_prepare_inputs", "training_step", "prediction_step", "save_model", "_save", "_load_best_model",
):  # fmt: skip
    setattr(Watched, _name, _noted(_name))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, of two micro-batches and of one, with evaluations, checkpoints and the best model."""
    trainer = Watched(tmp_path_factory.mktemp("run"))
    trainer.args.push_to_hub = True
    trainer.metrics = trainer.train().metrics
    trainer.args.push_to_hub = False
    return trainer


@pytest.fixture(scope="module")
def resumed(run):
    """A run that goes on from the other's first checkpoint, whose state has a key that is no callback."""
    checkpoint = Path(run.args.output_dir, "aside", "checkpoint-1")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["stateful_callbacks"]["launch"] = {"engine": "single", "files": {"a": 1}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    trainer = Watched(run.args.output_dir)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


OVERRIDDEN = [
    "_init_training_state", "_prepare_for_training", "_get_train_sampler", "_get_dataloader", "get_batch_samples",
    "prediction_step", "evaluation_loop", "_save_checkpoint", "_push_from_checkpoint", "save_model", "_save",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model",
]  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_our_override_can_be_called_as_trainer_calls_it(name, run, resumed):
    calls = [*run.of(name), *resumed.of(name)]
    assert calls
    for call in calls:
        assert accepts(getattr(hf_posttrain.SFTTrainer, name), run, *call.args, **call.kwargs)


@canary("transformers.PreTrainedModel._weight_conversions")
def _(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "_weight_conversions" in vars(loaded)
    del loaded._weight_conversions
    loaded.save_pretrained(tmp_path / "again")


@canary("transformers.utils.chat_template_utils._compile_jinja_template")
def _():
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tokenizer = byte_tokenizer("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": ""}]
    compiled = _compile_jinja_template(tokenizer.chat_template)
    text = compiled.render(messages=messages, tools=None, documents=None, **tokenizer.special_tokens_map)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)


@canary("transformers.ProcessorMixin._process_images", "transformers.ProcessorMixin._merge_kwargs")
def _():
    from PIL import Image
    from vision_for_tests import KINDS, processor_of

    from hf_posttrain.data.images import merged_options

    for kind in KINDS:
        processor = processor_of(kind)
        options = merged_options(processor)["images_kwargs"]
        sizes = [(40, 20), (16, 32)]
        images = [Image.new("RGB", size, (9, 99, 199)) for size in sizes]
        tensors, texts = processor._process_images(images, **options | {"return_tensors": "pt"})
        assert "pixel_values" in tensors
        assert len(texts) == 2
        [token] = processor.tokenizer.convert_ids_to_tokens([i for i in processor.image_token_ids if i is not None])
        assert all(text.count(token) for text in texts)


@canary("transformers.ProcessorMixin._get_arguments_from_pretrained")
def _(tmp_path):
    from vision_for_tests import processor_of

    processor = processor_of("idefics3")
    processor.save_pretrained(tmp_path)
    kind = type(processor)
    found = kind._get_arguments_from_pretrained(tmp_path, kind.get_processor_dict(tmp_path)[0])
    assert [type(part).__name__ for part in found] == ["Idefics3ImageProcessorPil", type(processor.tokenizer).__name__]
    assert kind.get_attributes() == ["image_processor", "tokenizer"]


@canary("transformers.Trainer.loss_is_scaled_for_ga")
def _(run):
    assert [call.result[0].item() for call in run.of("training_step")] == [loss for loss, *_ in run.losses]
    assert len(run.losses) == 3


@canary("transformers.Trainer.callback_handler.callbacks")
def _(run, tmp_path):
    kinds = [type(one) for one in run.callback_handler.callbacks]
    assert kinds == [transformers.DefaultFlowCallback, Counted, transformers.PrinterCallback]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=False)
    assert type(Trainer(tiny_model(), args).callback_handler.callbacks[-1]) is transformers.ProgressCallback
    assert run.counted.decided == [True, True]  # HF's flow has decided before ours is asked


@canary("transformers.Trainer._get_train_sampler")
def _(run, tmp_path):
    assert isinstance(run.of("_get_train_sampler")[0].result[0], torch.utils.data.RandomSampler)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], train_sampling_strategy="group_by_length")
    rows = datasets.Dataset.from_dict({"length": [3, 1, 2]})
    sampler = Trainer(tiny_model(), args, None, rows)._get_train_sampler()
    assert isinstance(sampler, transformers.trainer_pt_utils.LengthGroupedSampler)
    assert [*sampler.lengths] == [3, 1, 2]


@canary("transformers.Trainer._get_eval_sampler")
def _(run):
    assert isinstance(run.of("_get_eval_sampler")[0].result[0], torch.utils.data.SequentialSampler)
    loader = Trainer._get_dataloader(run, run.eval_dataset, "Evaluation", 4, sampler_fn=lambda rows: None)
    assert isinstance(loader.batch_sampler.sampler, torch.utils.data.SequentialSampler)


@canary("transformers.Trainer._get_dataloader")
def _(run):
    training, *evaluations = (
        inspect.signature(Trainer._get_dataloader).bind(run, *call.args, **call.kwargs).arguments
        for call in run.of("_get_dataloader")
    )
    assert training["is_training"] is True
    assert not any(given.get("is_training") for given in evaluations)
    own, run.data_collator = run.data_collator, lambda rows: {"ours": rows}
    loader = Trainer._get_dataloader(run, run.eval_dataset, "Evaluation", 4, sampler_fn=None, dataloader_key=None)
    run.data_collator = own
    assert next(iter(loader))["ours"] == [run.eval_dataset[n] for n in range(4)]  # in order without a sampler
    assert loader.dataset is run.eval_dataset or len(loader.dataset) == len(run.eval_dataset)


@canary("transformers.Trainer._init_training_state")
def _(run, resumed, tmp_path):
    [fresh], [again] = run.of("_init_training_state"), resumed.of("_init_training_state")
    assert (len(fresh.args), fresh.args[3], fresh.result) == (5, None, [(0, 0)])
    assert Path(again.args[3]).name == "checkpoint-1"
    assert again.result == [(0, 2)]
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"input_ids": [5, 6], "labels": [5, 6]}] * 3))
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=1, max_steps=5,
        save_strategy="no", bf16=False,
    )  # fmt: skip
    trainer = Trainer(tiny_model(), args, None, rows)
    trainer.train()
    assert trainer.state.epoch == 1 + 2 / 5


@canary("transformers.Trainer._prepare_for_training")
def _(run):
    [call] = run.of("_prepare_for_training")
    assert call.args == (2, call.args[1], None)
    assert not call.kwargs
    model, loader = run.prepared
    assert run.model_wrapped is model
    assert loader.iterated == 1
    assert [one.name for one in run.calls].index("get_batch_samples") > run.calls.index(call)


@canary("transformers.Trainer._maybe_log_save_evaluate")
def _(run, monkeypatch):
    assert "_evaluate" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    monkeypatch.setattr(run.args, "metric_for_best_model", "eval_nothing")
    with pytest.raises(KeyError, match=r"`metric_for_best_model` .*'eval_nothing', which is not found"):
        run._determine_best_metric({"eval_loss": 1.0}, None)


@canary("transformers.Trainer._load_optimizer_and_scheduler")
def _(resumed):
    first = resumed.of("_load_optimizer_and_scheduler")[0]
    assert first.args == resumed.of("_load_from_checkpoint")[0].args


@canary("transformers.Trainer._load_from_checkpoint")
def _(run, resumed):
    assert not run.of("_load_from_checkpoint")
    first = resumed.of("_load_from_checkpoint")[0]
    assert first.args == (str(Path(run.args.output_dir, "aside", "checkpoint-1")),)
    assert resumed.calls.index(first) < [one.name for one in resumed.calls].index("training_step")


@canary("transformers.Trainer.get_batch_samples")
def _(run, tmp_path):
    calls = run.of("get_batch_samples")
    assert [call.args[1:] for call in calls] == [(2, torch.device("cpu")), (1, torch.device("cpu"))]
    items = [int(call.result[0][1]) for call in calls]
    assert [int(items) for *_, items in run.losses] == [items[0], items[0], items[1]]  # what it gives reaches the loss

    class Nothing(Watched):
        def get_batch_samples(self, *args):
            return [], None

    nothing = Nothing(tmp_path, eval_on_start=False)
    nothing.train()
    assert nothing.state.global_step == 0
    assert not nothing.of("training_step")


@canary("transformers.Trainer.current_gradient_accumulation_steps")
def _(run):
    assert [count for _, _, count, _ in run.losses] == [2, 2, 1]


@canary("transformers.Trainer._prepare_inputs")
def _(run):
    assert run.of("_prepare_inputs")[0].args[0].keys() == {"input_ids", "labels"}


@canary("transformers.Trainer.is_in_train")
def _(run):
    assert all(inside for _, inside, *_ in run.losses)
    assert run.is_in_train is False


@canary("transformers.Trainer.log")
def _(run):
    for logs, last in run.counted.logged:
        assert last == logs | {"step": last["step"], "epoch": last["epoch"]}
    assert [last["step"] for logs, last in run.counted.logged if "loss" in logs] == [1, 2]


@canary("transformers.Trainer.evaluation_loop")
def _(run):
    assert all(call.kwargs["metric_key_prefix"] == "eval" and len(call.args) == 1 for call in run.of("evaluation_loop"))
    assert run.evaluate()["eval_ours"] == 7.0
    assert all(log["eval_ours"] == 7.0 for log in run.state.log_history if "eval_loss" in log)


@canary("transformers.Trainer._save_checkpoint", "transformers.Trainer._get_output_dir")
def _(run):
    assert len(run.of("_save_checkpoint")) == 2
    aside = Path(run.args.output_dir, "aside")
    assert {path.name for path in aside.iterdir()} == {"checkpoint-1", "checkpoint-2"}
    files = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert files <= {path.name for path in (aside / "checkpoint-2").iterdir()}


@canary("transformers.Trainer.save_model(_internal_call)")
def _(run):
    checkpoints = [str(Path(run.args.output_dir, "aside", f"checkpoint-{n}")) for n in (1, 2)]
    assert [(call.args, call.kwargs) for call in run.of("save_model")] == [
        ((folder,), {"_internal_call": True}) for folder in checkpoints
    ]
    assert "self.save_model(_internal_call=True)" in source(Trainer.push_to_hub)


@canary("transformers.Trainer._save")
def _(run, tmp_path):
    from safetensors.torch import load_file

    given = {name: torch.full_like(tensor, 3.0) for name, tensor in run.model.state_dict().items()}
    Trainer._save(run, str(tmp_path), given)
    assert all((tensor == 3.0).all() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert (tmp_path / "training_args.bin").exists()


@canary("transformers.Trainer._push_from_checkpoint")
def _(run):
    calls = run.of("_push_from_checkpoint")
    assert [call.args for call in calls] == [(call.args[0],) for call in run.of("save_model")]


@canary("transformers.Trainer._load_best_model")
def _(run):
    [call] = run.of("_load_best_model")
    assert (call.args, call.kwargs) == ((), {})
    assert Path(run.state.best_model_checkpoint).is_dir()


@canary("transformers.Trainer.create_model_card")
def _(run, tmp_path):
    run.args.output_dir, own = str(tmp_path), run.args.output_dir
    Trainer.create_model_card(run)
    run.args.output_dir = own
    draft = " ".join((tmp_path / "README.md").read_text().split())
    assert NEEDS["transformers.Trainer.create_model_card"].word in draft


@canary("transformers.Trainer.get_total_train_batch_size")
def _(run):
    assert run.get_total_train_batch_size(run.args) == 4


@canary("transformers.TrainerState.stateful_callbacks")
def _(run, resumed):
    folder = Path(run.args.output_dir, "aside", "checkpoint-2")
    state = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]  # the resumed run wrote it
    kept = state["Counted"][-1] if isinstance(state["Counted"], list) else state["Counted"]
    assert kept["attributes"]["seen"] > 0
    assert state["launch"] == {"engine": "single", "files": {"a": 1}}
    assert resumed.state.global_step == 2


# ---- transformers: the rest


@canary("transformers.TrainingArguments._n_gpu")
def _(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    args._n_gpu = 5
    assert args.n_gpu == 5


@canary("transformers.TrainingArguments.fsdp_plugin_args")
def _(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # restored: the arguments set it
    config = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_offload": True}
    found = TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=config).fsdp_plugin_args
    assert found["fsdp_version"] == 2
    assert str(found["state_dict_type"]).upper() == "FULL_STATE_DICT"
    assert found["cpu_offload"]


@canary("transformers.TrainingArguments.deepspeed_plugin")
def _(tmp_path):
    assert TrainingArguments(str(tmp_path), use_cpu=True).deepspeed_plugin is None
    pytest.importorskip("deepspeed")
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.zero_stage == plugin.deepspeed_config["zero_optimization"]["stage"] == 3
    assert "self.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=" in source(TrainingArguments.__post_init__)


@canary("transformers.trainer_utils.has_length")
def _():
    rows = datasets.Dataset.from_dict({"a": [1]})
    found = [transformers.trainer_utils.has_length(one) for one in (rows, rows.to_iterable_dataset(), None)]
    assert found == [True, False, False]


@canary("transformers.trainer_utils.sort_checkpoints")
def _(tmp_path):
    for number in (10, 9, 11):
        (tmp_path / f"checkpoint-{number}").mkdir()
    found = transformers.trainer_utils.sort_checkpoints(str(tmp_path), use_mtime=True)
    assert [Path(path).name for path in found] == ["checkpoint-9", "checkpoint-10", "checkpoint-11"]
    best = str(tmp_path / "checkpoint-9")
    found = transformers.trainer_utils.sort_checkpoints(str(tmp_path), use_mtime=True, best_model_checkpoint=best)
    assert [Path(path).name for path in found] == ["checkpoint-10", "checkpoint-9", "checkpoint-11"]


@canary("transformers.trainer_pt_utils.LengthGroupedSampler")
def _():
    sampler = transformers.trainer_pt_utils.LengthGroupedSampler(2, lengths=[*range(40)])
    orders = []
    for seed in (0, 0, 1):
        sampler.generator = torch.Generator().manual_seed(seed)
        orders.append([*sampler])
    assert orders[0] == orders[1] != orders[2]
    assert vars(sampler).keys() == {"batch_size", "lengths", "generator"}


@canary("transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref")
def _():
    module = importlib.import_module("transformers.integrations.deepspeed")
    before, config = module._hf_deepspeed_config_weak_ref, type("Stage3", (), {"is_zero3": lambda self: True})()
    try:
        module.set_hf_deepspeed_config(config)
        kept = module._hf_deepspeed_config_weak_ref
        assert module.is_deepspeed_zero3_enabled()
        module.unset_hf_deepspeed_config()
        assert not module.is_deepspeed_zero3_enabled()
        module._hf_deepspeed_config_weak_ref = kept
        assert module.is_deepspeed_zero3_enabled()
    finally:
        module._hf_deepspeed_config_weak_ref = before


@canary(
    "transformers.AttentionInterface", "transformers.AttentionMaskInterface",
    "transformers.PreTrainedModel._can_set_attn_implementation", "transformers.PreTrainedConfig._attn_implementation",
)  # fmt: skip
def _():
    seen, given_along = [], {"sizes": [(4, 4)]}

    def ours(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.layer_idx, attention_mask))
        assert kwargs.get("segments") == (given_along if attention_mask is own else None)
        return query.transpose(1, 2), None

    whole, sliding, own = (torch.ones(1, 1, 4, 4, dtype=torch.bool) for _ in range(3))
    ids = torch.tensor([[5, 6, 7, 8]])
    kernels, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    with patch.dict(kernels._global_mapping), patch.dict(masks._global_mapping):  # others read these
        kernels.register("canary", ours)
        masks.register("canary", transformers.masking_utils.sdpa_mask)
        models = tiny_model(layer_types=["full_attention", "sliding_attention"], sliding_window=2), tiny_model()
        for model in models:
            assert model.config.get_text_config()._attn_implementation == "sdpa"
            assert model._can_set_attn_implementation()
            model.set_attn_implementation("canary")
            assert model.config.get_text_config()._attn_implementation == "canary"
            assert not any("canary" in str(value) for value in model.config.to_dict().values())  # nor in config.json
        models[0](ids, attention_mask={"full_attention": whole, "sliding_attention": sliding})
        models[1](ids, attention_mask=whole)
        models[1](ids, attention_mask=own, segments=given_along)
        models[1](ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    assert [number for number, _ in seen] == [0, 1, 0, 1, 0, 1, 0, 1]
    known = [whole, sliding, whole, whole, own, own]
    assert all(mask is given for (_, mask), given in zip(seen[:6], known, strict=True))
    assert seen[6][1].shape == (1, 1, 4, 4)


@canary("transformers.integrations.sdpa_attention.sdpa_attention_forward")
def _():
    forward = transformers.integrations.sdpa_attention.sdpa_attention_forward
    module = SimpleNamespace(training=False, is_causal=True)
    states = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))  # [R, heads, L, D]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    masked, weights = forward(module, states, states, states, mask[None, None], dropout=0.0, scaling=0.5)
    causal, _ = forward(module, states, states, states, None, dropout=0.0, scaling=0.5, is_causal=True)
    scores = (0.5 * states @ states.transpose(-1, -2)).masked_fill(~mask, -torch.inf).softmax(-1)
    assert weights is None
    torch.testing.assert_close(masked, (scores @ states).transpose(1, 2))
    torch.testing.assert_close(causal, masked)


@canary("transformers.PreTrainedConfig._name_or_path")
def _(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config._name_or_path == config.name_or_path == str(tmp_path)
    assert "_name_or_path" in config.to_dict()


@canary("transformers.PreTrainedModel._supports_sdpa", "transformers.PreTrainedModel._supports_flex_attn")
def _():
    model = tiny_model()
    assert model._supports_sdpa
    assert model._supports_flex_attn
    assert not getattr(transformers.MambaForCausalLM, "_supports_sdpa", False)
    assert not getattr(transformers.MambaForCausalLM, "_supports_flex_attn", False)


@canary("transformers.PreTrainedModel._no_split_modules")
def _():
    model = tiny_model()
    assert {*model._no_split_modules} == {type(layer).__name__ for layer in model.model.layers}


@canary("transformers.PreTrainedModel.base_model")
def _():
    ids, model = torch.tensor([[5, 6, 7]]), tiny_model("qwen3_moe")
    outputs = model.base_model(ids, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(model.get_output_embeddings()(outputs.last_hidden_state), model(ids).logits)
    assert [logits.shape for logits in outputs.router_logits] == [(3, 4)] * 2  # a layer: [R * L, experts]


@canary("transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func")
def _():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as loss

    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    twice = torch.cat([logits, logits[:1]])  # a token of weight 2 is two tokens, one of weight 0 is none
    expected = loss((twice,), 4, 2)
    padded = torch.cat([logits, torch.ones(1, 4)])
    torch.testing.assert_close(loss((padded,), 4, 2, torch.tensor([[2.0, 1.0, 1.0, 0.0]])), expected)


@canary("transformers.core_model_loading.revert_weight_conversion")
def _(tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    weights = dict(model.named_parameters())
    found = dict(transformers.core_model_loading.revert_weight_conversion(model, weights))
    assert found.keys() - {"lm_head.weight"} == load_file(tmp_path / "model.safetensors").keys() - {"lm_head.weight"}


@canary("transformers.GenerationMixin.prepare_inputs_for_generation")
def _():
    own = transformers.GenerationMixin.prepare_inputs_for_generation
    assert transformers.Qwen3ForCausalLM.prepare_inputs_for_generation is own
    assert transformers.MambaForCausalLM.prepare_inputs_for_generation is not own


@canary("transformers.cache_utils.DynamicLayer")
def _():
    states, layer = torch.randn(2, 1, 3, 4), transformers.cache_utils.DynamicLayer()
    assert layer.is_initialized is False
    assert layer.get_seq_length() == 0
    layer.lazy_initialization(states, states)
    assert layer.is_initialized
    assert {*vars(layer)} - {"dtype"} == {"keys", "values", "is_initialized", "device"}  # dtype: up to 5.23
    layer.keys, layer.values = states, states
    assert layer.get_seq_length() == 3
    assert layer.get_mask_sizes(2) == (5, 0)
    layer.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.keys, states[1:])
    assert accepts(transformers.cache_utils.DynamicLayer.update, layer, states, states, None)


@canary("transformers.DynamicCache.layers")
def _():
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config = tiny_model(layer_types=["full_attention", "sliding_attention"], sliding_window=2).config
    cache = transformers.DynamicCache(config=config)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    mine = type("Mine", (DynamicLayer,), {})()
    cache.layers = [mine, mine]
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 1)
    assert mine.get_seq_length() == cache.get_seq_length() == 3
    cache.batch_select_indices(torch.tensor([0, 0]))
    assert len(mine.keys) == 2


# ---- peft


def lora(**options):
    return peft.LoraConfig(target_modules=["q_proj"], r=2, **options)


@canary("peft.PeftModel.forward")
def _():
    model, seen = tiny_model(), []
    adapted = peft.get_peft_model(model, lora(task_type="CAUSAL_LM"))
    model.forward = lambda *args, **kwargs: seen.append(kwargs)
    adapted(input_ids=torch.tensor([[5]]), scorer="ours")
    [given] = seen
    assert given["scorer"] == "ours"
    assert given["labels"] is None  # all arguments, most of them None
    assert adapted.get_base_model() is model


@canary("peft.PeftModel.peft_config")
def _(tmp_path):
    model = peft.get_peft_model(tiny_model(), lora())
    for name in ("second", "third"):
        model.add_adapter(name, lora())
    third = model.peft_config.pop("third")
    model.save_pretrained(tmp_path)
    model.peft_config["third"] = third
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")) == [
        "adapter_model.safetensors", "second/adapter_model.safetensors",
    ]  # fmt: skip
    assert model.active_adapter == "default"
    assert model.active_peft_config is model.peft_config["default"]


@canary("peft.PeftModel.create_or_update_model_card")
def _(tmp_path):
    peft.get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path)
    assert NEEDS["peft.PeftModel.create_or_update_model_card"].word in (tmp_path / "README.md").read_text()


@canary("peft.get_peft_model_state_dict")
def _():
    model = peft.get_peft_model(tiny_model(), lora(init_lora_weights=False))
    model.add_adapter("copy", lora(init_lora_weights=False))
    state = peft.get_peft_model_state_dict(model, adapter_name="default")
    assert not any("default" in name for name in state)
    peft.set_peft_model_state_dict(model, {name: tensor.clone() for name, tensor in state.items()}, "copy")
    of_copy = peft.get_peft_model_state_dict(model, adapter_name="copy")
    assert all(torch.equal(of_copy[name], tensor) for name, tensor in state.items())
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
    of_shapes = peft.get_peft_model_state_dict(model, shapes, "default", save_embedding_layers=False)
    assert {name: tensor.shape for name, tensor in of_shapes.items()} == {n: t.shape for n, t in state.items()}


@canary("peft.utils.ModulesToSaveWrapper")
def _():
    base = tiny_model()
    model = peft.get_peft_model(base, lora(modules_to_save=["lm_head"]))
    wrapper = base.get_output_embeddings()
    assert isinstance(wrapper, peft.utils.ModulesToSaveWrapper)
    assert wrapper.active_adapters == ["default"]
    assert wrapper.disable_adapters is False
    copy = wrapper.modules_to_save["default"]
    assert copy.weight is not wrapper.original_module.weight
    with model.disable_adapter():
        assert wrapper.disable_adapters is True
    assert any(".modules_to_save." in name for name in model.state_dict())


@canary("peft.tuners.lora")
def _():
    base = tiny_model()
    plain = {*base.state_dict()}
    peft.get_peft_model(base, lora())
    ours = {re.sub(r"(\.base_layer)+\.", ".", name) for name in base.state_dict() if ".lora_" not in name}
    assert ours == plain


# ---- accelerate


def loader_of(count, sampler=None):
    """(accelerator, its loader of `count` numbers in batches of 2)."""
    accelerator = accelerate.Accelerator(cpu=True)
    rows = [*range(count)]
    return accelerator, accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler))


@canary("accelerate.Accelerator.is_fsdp2")
def _():
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.is_fsdp2 is False
    assert accelerator.state.deepspeed_plugin is None


@canary("accelerate.state.GradientState")
def _():
    accelerator, loader = loader_of(5)
    state, seen = accelerator.gradient_state, []
    for _batch in loader:
        seen.append((state.end_of_dataloader, state.remainder, state.active_dataloader is loader))
    assert seen == [(False, 1, True), (False, 1, True), (True, 1, True)]  # 5 % (2 * 1)


@canary("accelerate.data_loader.SkipBatchSampler")
def _():
    _, loader = loader_of(5)
    rest = accelerate.skip_first_batches(loader, 1)
    assert isinstance(rest.batch_sampler, accelerate.data_loader.SkipBatchSampler)
    assert rest.batch_sampler.batch_sampler is loader.batch_sampler
    shard = accelerate.data_loader.BatchSamplerShard(loader.batch_sampler, num_processes=3, process_index=0)
    assert shard.batch_sampler is loader.batch_sampler
    assert (len(loader.batch_sampler.sampler), loader.batch_sampler.drop_last) == (5, False)


@canary("accelerate.data_loader.DataLoaderShard.set_epoch")
def _():
    class Ours(torch.utils.data.SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Ours(range(5))
    loader_of(5, sampler)[1].set_epoch(3)
    assert sampler.epoch == 3


@canary("accelerate.utils.fsdp_utils.fsdp2_prepare_model")
def _(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    model = tiny_model()
    assert plugin.transformer_cls_names_to_wrap is None
    plugin.set_auto_wrap_policy(model)  # as it does first of all
    assert plugin.transformer_cls_names_to_wrap == [*model._no_split_modules]
    assert {"cpu_offload", "mixed_precision_policy", "reshard_after_forward", "state_dict_type"} <= {*vars(plugin)}
    prepare = accelerate.utils.fsdp_utils.fsdp2_prepare_model
    assert accepts(prepare, None, model)
    assert "plugin.set_auto_wrap_policy(model)" in source(prepare)


@canary("accelerate.utils.launch.prepare_multi_gpu_env")
def _():
    from accelerate.commands import launch

    line = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--fsdp_offload_params", "true"]
    line += ["--fsdp_state_dict_type", "FULL_STATE_DICT", "script.py"]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(line))
    found = accelerate.utils.launch.prepare_multi_gpu_env(args)
    assert (found["ACCELERATE_USE_FSDP"], found["FSDP_VERSION"], found["FSDP_OFFLOAD_PARAMS"]) == ("true", "2", "true")
    assert (found["FSDP_STATE_DICT_TYPE"], found["ACCELERATE_MIXED_PRECISION"]) == ("FULL_STATE_DICT", "no")
    assert '"ACCELERATE_USE_PARALLELISM_CONFIG"' in source(accelerate.utils.launch)


@canary("accelerate.ParallelismConfig.sp_handler")
def _():
    pytest.importorskip("deepspeed")
    config = accelerate.ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_shard_size=1)
    config.sp_handler.sp_attn_implementation = "sdpa"
    assert "core_attn_implementation=sp_handler.sp_attn_implementation" in source(accelerate.Accelerator)
    assert (config.cp_size, config.data_parallel_size) == (1, 1)


# ---- deepspeed: by its source, since an engine wants processes (tests/engines run them)


@pytest.fixture
def deepspeed():
    return pytest.importorskip("deepspeed")


@canary("deepspeed.DeepSpeedEngine._zero3_consolidated_16bit_state_dict")
def _(deepspeed):
    engine = deepspeed.DeepSpeedEngine
    assert accepts(engine._zero3_consolidated_16bit_state_dict, None, exclude_frozen_parameters=True)


@canary("deepspeed.DeepSpeedEngine.empty_partition_cache")
def _(deepspeed):
    assert accepts(deepspeed.DeepSpeedEngine.empty_partition_cache, None)


@canary("deepspeed.utils.safe_get_full_fp32_param")
def _(deepspeed):
    assert accepts(deepspeed.utils.safe_get_full_fp32_param, None)


@canary("deepspeed.runtime.zero.stage3.unwrap_model_for_generation")
def _(deepspeed):
    stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")
    text = source(stage3.unwrap_model_for_generation)
    assert "with GatheredParameters(model.parameters())" in text
    assert "optimizer_offload.forward_hooks" in text
    assert "fwd_pre_hook" not in text  # else ours would be removed twice
    assert "parameter_offload" in attributes(stage3.DeepSpeedZeroOptimizer_Stage3)


@canary("deepspeed.DeepSpeedZeRoOffload.fwd_pre_hook")
def _(deepspeed):
    offload = deepspeed.zero.DeepSpeedZeRoOffload
    assert {"fwd_pre_hook", "get_param_coordinator"} <= attributes(offload)
    assert "self.fwd_pre_hook = self.module.register_forward_pre_hook" in source(offload)
    assert "self.get_param_coordinator().reset_step()" in source(offload)


@canary("deepspeed.zero.Init")
def _(deepspeed):
    partition = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    text = inspect.getsource(partition)
    assert all(f"param.{name} = " in text for name in ("ds_id", "ds_shape", "ds_numel"))
    assert accepts(deepspeed.zero.Init, nn.ParameterList(), config_dict_or_path={})
    assert accepts(deepspeed.zero.GatheredParameters, [])


@canary("deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter")
def _(deepspeed):
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    assert {"dl", "sp_group", "sp_rank", "sp_world_size"} <= attributes(ulysses.UlyssesSPDataLoaderAdapter)
    assert "not module.training and self.disable_in_eval" in source(ulysses)


@canary("deepspeed.ZeROOptimizer.sequence_parallel_size")
def _(deepspeed):
    for module, name in (("stage_1_and_2", "DeepSpeedZeroOptimizer"), ("stage3", "DeepSpeedZeroOptimizer_Stage3")):
        optimizer = getattr(importlib.import_module(f"deepspeed.runtime.zero.{module}"), name)
        assert "sequence_parallel_size" in attributes(optimizer)
        assert "/ float(self.sequence_parallel_size)" in source(optimizer)


# ---- torch


@pytest.fixture
def process_group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@canary("torch.distributed.distributed_c10d._get_default_store")
def _(process_group):
    store = torch.distributed.distributed_c10d._get_default_store()
    assert [store.add("count", n) for n in (1, 0, 2)] == [1, 1, 3]


@canary("torch.distributed.fsdp.FSDPModule")
def _(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    assert type(module).__bases__ == (FSDPModule, nn.Linear)
    assert type(module).__name__ == "FSDPLinear"
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    assert module.weight.shape == (2, 2)
    module.reshard()
    assert isinstance(module.weight, torch.distributed.tensor.DTensor)


@canary("torch.nn.Module._non_persistent_buffers_set")
def _():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("lost", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"lost"}


@canary("torch.nn.Module.forward")
def _():
    module, seen = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.forward = lambda given: seen.append(given)
    module("ours")
    assert seen == ["before", "ours", "after"]
    del module.forward
    assert module(torch.ones(1, 2)).shape == (1, 2)


@canary("torch.nn.Linear.forward")
def _():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func is nn.functional.linear, len(args), kwargs))
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.Linear(2, 2, bias=False)(torch.ones(1, 2))
    called = [each for each in seen if each[0]]
    assert called in ([(True, 3, None)], [(True, 3, {})])


# ---- datasets, evaluate, huggingface_hub, bitsandbytes


@canary("datasets.Dataset._fingerprint")
def _():
    rows = datasets.Dataset.from_list([{"n": 1}, {"n": 2}])
    names = [rows._fingerprint, rows.select([1])._fingerprint, rows.rename_column("n", "m")._fingerprint]
    assert len({*names}) == 3
    assert datasets.Dataset.from_list([{"n": 1}, {"n": 2}])._fingerprint == names[0]
    assert rows.map(dict, new_fingerprint="0" * 16)._fingerprint == "0" * 16


@canary("datasets.Dataset._indices")
def _():
    rows = datasets.Dataset.from_dict({"a": [10, 11, 12]})
    assert rows._indices is None
    assert rows.select([2, 0, 2])._indices.column(0).to_pylist() == [2, 0, 2]


@canary("datasets.IterableDataset._resolve_features")
def _():
    def rows():
        yield {"a": 1, "b": "x"}
        yield {"a": 2, "b": "y"}

    stream = datasets.IterableDataset.from_generator(rows)
    assert stream.column_names is None
    known = stream._resolve_features()
    assert known.column_names == ["a", "b"]
    assert [row["a"] for row in known] == [1, 2]  # the first row is not lost


@canary("torch.nn.Module._compiled_call_impl")
def _():
    module = nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


@canary("datasets.ReadInstruction.to_absolute")
def _():
    [first, second] = datasets.ReadInstruction.from_spec("train[:50%]+test").to_absolute({"train": 10, "test": 4})
    assert [(one.splitname, one.from_, one.to) for one in (first, second)] == [("train", 0, 5), ("test", 0, 4)]


@canary("datasets.features.features.register_feature", "datasets.ArrowBasedBuilder._split_generators",
        "datasets.ArrowBasedBuilder._generate_tables")  # fmt: skip
def _(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": {"b": null, "c": 1}}\n{"a": {"c": 0.5}}\n')
    rows = load(SimpleNamespace(path=str(tmp_path / "rows.jsonl"), name=None, split="train", columns=None, limit=None,
                                weight=1, streaming=False))  # fmt: skip
    assert [row["a"] for row in rows] == [{"b": None, "c": 1}, {"c": 0.5}]
    assert datasets.Features.from_dict(rows.features.to_dict()) == rows.features


@canary("evaluate.Metric._info", "evaluate.Metric._compute")
def _():
    class Ours(evaluate.Metric):
        def _info(self):
            features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

        def _compute(self, predictions, references):
            return {"equal": predictions == references}

    assert Ours().compute(predictions=["a"], references=["a"]) == {"equal": True}


@canary("huggingface_hub.constants.HF_HUB_CACHE")
def _():
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    assert repo_folder_name(repo_id="owner/name", repo_type="model") == "models--owner--name"
    assert constants.HF_HUB_OFFLINE is True  # conftest.py sets it in the environment
    assert Path(constants.HF_HUB_CACHE).is_relative_to(constants.HF_HOME)


@canary("bitsandbytes.nn.Linear4bit.support_avx512bf16_for_cpu")
def _():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert "support_avx512bf16_for_cpu" in vars(bitsandbytes.nn.Linear4bit(4, 4))
    assert "and self.support_avx512bf16_for_cpu" in source(bitsandbytes.nn.Linear4bit.forward)


@canary(*(f"trackio.context_vars.current_{name}" for name in ("run", "space_id", "server")))
def _():
    trackio = pytest.importorskip("trackio")
    for name in ("run", "space_id", "server"):
        assert f"context_vars.current_{name}.set(" in source(trackio.init)


@canary("torch.ops.mkl._mkl_reorder_linear_weight", "torch.ops.mkl._mkl_linear")
def _():
    if not torch.backends.mkl.is_available():
        pytest.skip("torch was built without MKL")
    weight, rows = torch.arange(12.0).view(3, 4), torch.eye(4)[:2]
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, len(rows))
    assert torch.equal(torch.ops.mkl._mkl_linear(rows, packed, weight, None, len(rows)), weight[:, :2].T)


# ---- our side


@functools.cache
def text_of(file):
    return (PACKAGE / file).read_text(encoding="utf-8")


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("symbol", NEEDS)
def test_our_files_use_what_the_table_says(symbol):
    need = NEEDS[symbol]
    word = need.word or symbol.rpartition(".")[2]
    users = [file for file in FILES if word in text_of(file)]
    absent = [file for file in need.files.split() if file not in users]
    assert not absent, f"{', '.join(absent)} have no {word!r}: correct NEEDS, it is in {', '.join(users) or 'no file'}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_parts(symbol):
    return {part for part in re.split(r"\W+", symbol) if is_private(part)}


LISTED = set().union(*map(private_parts, NEEDS))
OF_PYTHON = {"_replace"}
"""Private by its name, and documented: of a NamedTuple."""


def defined_in(tree):
    """Private names that our own code gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used_in(tree):
    """(private name, line) of every attribute, import, getattr and its kin, and entry of a __dict__."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            dotted = ".".join([getattr(node, "module", None) or "", *(alias.name for alias in node.names)])
            yield from ((part, node.lineno) for part in dotted.split("."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            yield from ((one.value, one.lineno) for one in node.args[1:2] if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(("__dict__", "vars()")):
            yield from ((one.value, one.lineno) for one in [node.slice] if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Constant) and node.value in OF_TRAINER:
            yield node.value, node.lineno


OF_TRAINER = {name for cls in (Trainer, TrainingArguments) for name in dir(cls) if is_private(name)}
"""Texts that name one of these are names too: what `type(name, bases, {...})` overrides."""


def test_no_private_name_is_used_that_the_table_lacks():
    trees = {file: ast.parse(text_of(file)) for file in FILES}
    ours = {name for tree in trees.values() for name in defined_in(tree)} - OF_TRAINER
    found = {
        f"{file}:{line}: {name}"
        for file, tree in trees.items()
        for name, line in used_in(tree)
        if isinstance(name, str) and is_private(name) and name not in ours | LISTED | OF_PYTHON
    }
    assert not found, f"private names of other packages: {sorted(found)}"


def test_the_scan_sees_every_way_to_use_a_private_name():
    lines = [
        "from torch._dynamo import config", "import torch.utils._pytree as tree", "trainer._one()",
        "getattr(model, '_two', None)", "args.__dict__['_three'] = 1", "super()._four()",
        "type('Stays', (Trainer,), {'_save': None})",
    ]  # fmt: skip
    found = {name for name, _ in used_in(ast.parse("\n".join(lines))) if is_private(name)}
    assert found == {"_dynamo", "_pytree", "_one", "_two", "_three", "_save", "_four"}


UPSTREAM = ("transformers", "accelerate", "peft", "datasets", "evaluate", "torch", "deepspeed")


def our_classes():
    """Every class of hf_posttrain."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "hf_posttrain."):
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                yield cls


def test_no_private_name_of_a_base_class_is_overridden_that_the_table_lacks():
    """On purpose or not: a helper of ours whose name a base class comes to use would take the place of that one."""
    found = set()
    for cls in our_classes():
        bases = [base for base in cls.__mro__[1:] if base.__module__.partition(".")[0] in UPSTREAM]
        ours = set(filter(is_private, defined_in(tree_of(cls)))) if bases else set()
        theirs = set().union(*map(attributes, bases))
        found |= {f"{cls.__module__}.{cls.__name__}.{name}" for name in ours & theirs - LISTED}
    assert not found, found
