"""Whole steps of every method and layout on the meta device, as a GPU would take them: in bf16, with its attention, its
tiles and its products. What mixes devices, or reads a value on the host, raises there."""

import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers.masking_utils
from golden_cases import TEACHERS, Case, trainer_of
from meta_for_tests import allow_meta
from models_for_tests import tiny_model
from torch.utils.data._utils.pin_memory import pin_memory
from training_for_tests import METHODS, fix_rollouts, second_model, token_rows, trainer_for
from vllm_for_tests import Serving

from hf_posttrain import SFTConfig
from hf_posttrain.scoring import attention, attention_selection, forward
from hf_posttrain.trainer.loss_output import MetricAverager

META = torch.device("meta")
LAYOUTS = {method: ["shared", "packed", "padded"] for method in METHODS}
OPTIONS = [("opd", {"loss_type": "policy_gradient"}), ("opd", {"loss_type": "jsd"}), ("kto", {"loss_type": "bco"}),
           ("sft", {"neftune_noise_alpha": 5.0}), ("dpo", {"activation_checkpointing": False})]  # fmt: skip


def on_meta(trainer, dtype):
    """Everything that a step uses, moved there: models, their attention, what the trainer prepares and unwraps with."""
    models = [trainer.model] + ([trainer.second_models[0].model] if trainer.second_models else [])
    for model in models:
        model.to(META, dtype)
        causal = forward.causal_lm(model)
        if trainer.data_collator.layout != "padded":
            causal.set_attn_implementation("sdpa")
            attention_selection.choose_attention(causal, torch.device("cuda"))
    trainer.model_wrapped, trainer.scoring_checked = trainer.model, True
    trainer.args.__dict__["_setup_devices"] = META
    trainer.accelerator.state.device = META
    trainer.accelerator.state.distributed_type = trainer.accelerator.distributed_type
    if trainer.second_models:
        trainer.second_models[0].on_device = True
    trainer.current_gradient_accumulation_steps = 2
    if hasattr(trainer, "ends"):
        trainer.ends = trainer.ends.to(META)
    if reference := getattr(trainer, "reference", None):
        reference.checked = True  # before the first step alone it looks whether policy and reference are equal
    trainer.use_layout(trainer.data_collator.layout)


@pytest.fixture
def calls(monkeypatch):
    """How often a step calls the varlen kernel."""
    found, kernel = SimpleNamespace(varlen=0), attention.varlen_attn

    @functools.wraps(kernel)
    def counted(*args, **kwargs):
        found.varlen += 1
        return kernel(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bf16", "float32"]
)
@pytest.mark.parametrize(
    ("method", "options"),
    [(method, {"layout": layout}) for method in METHODS for layout in LAYOUTS[method]] + OPTIONS,
    ids=str,
)
def test_a_step_reads_no_value_and_mixes_no_devices(method, options, dtype, calls, tmp_path, monkeypatch):
    allow_meta(monkeypatch)
    fix_rollouts(monkeypatch)
    # transformers asks, once a forward and before the layers, whether a mask of padding has any
    monkeypatch.setattr(transformers.masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False)
    monkeypatch.setattr(MetricAverager, "averages", lambda *_: {})  # read at a log, and by what the first step says
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 8), tmp_path, second_model(method, seed=9),
        per_device_train_batch_size=4, **options,
    )  # fmt: skip
    device = trainer.accelerator.state.device
    try:
        on_meta(trainer, dtype)
        rows = [trainer.train_dataset[n] for n in range(4)]
        batches = trainer.prepare_window([trainer._prepare_inputs(trainer.data_collator(rows)) for _ in range(2)])
        trainer.model.train()
        for batch in batches:
            loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.ones((), device=META))
            loss.backward()
            assert loss.device == META
    finally:
        trainer.accelerator.state.device = device
    gradients = [weight.grad for weight in trainer.model.parameters() if weight.requires_grad]
    assert all(gradient is not None and gradient.device == META for gradient in gradients)
    padded = trainer.data_collator.layout == "padded"
    assert bool(calls.varlen) == (dtype == torch.bfloat16 and not padded)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_survives_the_way_to_a_device(method, layout, tmp_path, monkeypatch):
    rows = token_rows(method, 8)
    trainer = trainer_for(method, tiny_model(), rows, tmp_path, second_model(method, seed=9), layout=layout)
    assert_copies_are_equal(trainer, monkeypatch)


@pytest.mark.parametrize("teacher", TEACHERS[1:])
def test_what_a_teacher_reads_survives_the_way_to_a_device(teacher, tmp_path, monkeypatch):
    """It is a batch within the batch."""
    with Serving(tiny_model(seed=5)) as server:
        case = Case("kd", {"teacher": {"top_k": 8}} if teacher in ("mixed", "served") else {}, teacher)
        assert_copies_are_equal(trainer_of(case, server.url, str(tmp_path)), monkeypatch)


def assert_copies_are_equal(trainer, monkeypatch):
    """A batch is pinned by a data loader, sent by one of its workers, and moved to a device."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    for copy in (pin_memory(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert_same_values(copy, batch)
    assert {tensor.device for tensor in tensors_of(batch.to("meta"))} == {META}


def tensors_of(value):
    """All tensors within a value, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from tensors_of(part)


@pytest.mark.parametrize(("given", "waits"), [
    ({}, False), ({"dataloader_pin_memory": False}, True), ({"accelerator_config": {"even_batches": True}}, True),
])  # fmt: skip
def test_batches_are_copied_to_a_gpu_without_waiting_by_default(given, waits, tmp_path, monkeypatch):
    setup = SFTConfig.device.fget

    def device(config):
        setup(config)
        return torch.device("cuda")

    monkeypatch.setattr(SFTConfig, "device", property(device))
    assert SFTConfig(output_dir=str(tmp_path), **given).accelerator_config.non_blocking is not waits


def assert_same_values(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_values(found[name], value)
    elif isinstance(expected, list | tuple):
        for pair in zip(found, expected, strict=True):
            assert_same_values(*pair)
    else:
        assert found == expected
