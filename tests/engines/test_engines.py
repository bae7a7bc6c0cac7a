"""The same numbers on one process and on two: DDP, FSDP2 and ZeRO-1, 2 and 3, for every method, fully trained and LoRA.

Each case trains past the end of an odd-sized epoch with rows of unequal lengths and accumulation 2, evaluates on the
way, and is compared with one process that sees the same rows in each step.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from processes_for_tests import ENGINES, engine_arguments, on_two
from tokenizers_for_tests import byte_tokenizer
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from training_for_tests import (
    LORA,
    METHODS,
    assert_same_run,
    fake_generate,
    logs_and_weights,
    policy_of,
    quick,
    second_model,
    token_rows,
    trainer_for,
)
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_posttrain import DPOConfig, DPOTrainer, KDConfig, KDTrainer, SFTConfig
from hf_posttrain.engines import engine as engines
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.models import load as models
from hf_posttrain.models.config import ModelSection
from hf_posttrain.scoring import attention
from hf_posttrain.scoring import forward as scoring

pytestmark = pytest.mark.engines


def second_for(method, end=None):
    """The teacher of KD and OPD; end: the id that it ends with, not the student's."""
    second = second_model(method, seed=5)
    if end is not None:
        second.generation_config.eos_token_id = end
    return second


def trained(rank, method, engine, lora, end=None, **config):
    """(engine that really ran, processes, logs, weights) of six steps of four or eight rows. end: the teacher's."""
    rollout.generate = fake_generate
    peft_config = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    torch.manual_seed(0)
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 13), tempfile.mkdtemp(), second_for(method, end),
        eval_rows=token_rows(method, 7, seed=3), max_steps=6, learning_rate=1e-3, max_grad_norm=1.0,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, train_sampling_strategy="random",
        **engine_arguments(engine), **peft_config, **config,
    )  # fmt: skip
    trainer.train()
    name, count = engines.engine_name(trainer.accelerator), trainer.accelerator.num_processes
    return name, count, *logs_and_weights(trainer, lora)


def losses_of(trainer):
    """The loss of each step."""
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@functools.cache
def on_one(method, lora):
    """The run of one process, made once."""
    return on_two(trained_case, "single", method, "single", lora, 4, world=1)[0]


def trained_case(rank, method, engine, lora, size):
    return trained(rank, method, engine, lora, per_device_train_batch_size=size, per_device_eval_batch_size=size)


IN_CI = [("ddp", False), ("fsdp2", True), ("zero2", False), ("zero3", True)]
"""One of them for each method, in turns."""
CASES = [
    pytest.param(
        *case, method, id=f"{case[0]}-{('full', 'lora')[case[1]]}-{method}",
        marks=[] if case == IN_CI[number % len(IN_CI)] else pytest.mark.slow,
    )
    for case in itertools.product((*ENGINES, "zero1"), (False, True)) for number, method in enumerate(METHODS)
]  # fmt: skip


@pytest.mark.parametrize(("engine", "lora", "method"), CASES)
def test_two_processes_give_the_numbers_of_one(engine, method, lora):
    _, _, logs, weights = on_one(method, lora)
    (name, count, found, weights_found), (*_, found_by_other, _) = on_two(trained_case, engine, method, engine, lora, 2)
    assert (name, count) == (engine, 2)
    assert found == found_by_other  # metrics are global, not rank 0's
    assert len(found) == len(logs) > 6
    assert_same_run((found, weights_found), (logs, weights))


OF_OPD = {
    "frozen": {"rollouts": "frozen", "teacher": {"top_k": 5, "precompute": True}},
    "weights": {
        "token_weights": "top_share", "rollouts": {"train_max_tokens": {"from": 2, "to": 6, "steps": 4}}, "end": 256,
    },
    "residual": {"teacher": {"top_k": 5, "top_k_remainder": "residual"}, "temperature": 0.8},
    "reward": {"loss_type": "policy_gradient", "num_generations": 2, "token_weights": "cumulative",
               "reward": {"function": "exact_match"}},
}  # fmt: skip
IN_CI_OF_OPD = {("reward", "ddp", True)}


@functools.cache
def opd_on_one(options, lora):
    return on_two(opd_case, "single", options, "single", lora, 4, world=1)[0]


def opd_case(rank, options, engine, lora, size):
    return trained(rank, "opd", engine, lora, per_device_train_batch_size=size, per_device_eval_batch_size=size,
                   **OF_OPD[options])  # fmt: skip


@pytest.mark.parametrize(
    ("options", "engine", "lora"),
    [pytest.param(*case, marks=[] if case in IN_CI_OF_OPD else pytest.mark.slow)
     for case in itertools.product(OF_OPD, ENGINES, (False, True))],
)  # fmt: skip
def test_options_of_opd_give_the_numbers_of_one(options, engine, lora):
    _, _, logs, weights = opd_on_one(options, lora)
    (name, count, found, weights_found), _ = on_two(opd_case, engine, options, engine, lora, 2)
    assert (name, count, len(found)) == (engine, 2, len(logs))
    assert_same_run((found, weights_found), (logs, weights))


# ---- generation


def collectives():
    """How many this rank has called, in any of its groups."""
    return sum(group._get_sequence_number_for_group() for group in torch.distributed.distributed_c10d._world.pg_map)


def sampled(rank, engine, lora):
    """Rollouts really sampled, of unequal number, length and end on the two ranks.

    (collectives inside each generation, in the whole training; rollouts; losses)
    """
    real, inside, rollouts = rollout.generate, [], []

    def watched(*args, **kwargs):
        before = collectives()
        rollouts.append(real(*args, **kwargs))
        inside.append(collectives() - before)
        return rollouts[-1]

    rollout.generate = watched
    rows = datasets.Dataset.from_list([{"prompt_ids": [1, 2, 3], "completion_ids": [5]}] * 13)
    peft_config = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    trainer = trainer_for(
        "opd", tiny_model(), rows, tempfile.mkdtemp(), second_for("opd"), eval_rows=token_rows("opd", 5, seed=3),
        eval_strategy="steps", eval_steps=2, eval_exact_match=True, eval_max_completion_length=4 + rank, max_steps=4,
        learning_rate=1e-3, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_completion_length=20,
        sampler={"batch_size": 1 + 3 * rank}, lmbda=0.6, **engine_arguments(engine), **peft_config,
    )  # fmt: skip
    trainer.terminal_ids = list(range(0, 300, 10 + 20 * rank))  # one rank stops much earlier
    before = collectives()
    trainer.train()
    return (inside, collectives() - before), rollouts, losses_of(trainer)


@pytest.mark.parametrize(
    ("engine", "lora"),
    [("fsdp2", False)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("ddp", False), ("fsdp2", True), ("zero2", False), ("zero3", False), ("zero3", True))
    ],
)
def test_ranks_generate_alone_after_one_gather(engine, lora):
    results = on_two(sampled, engine, engine, lora, timeout=120)
    ((inside, all_in), first, losses), ((inside_other, all_in_other), second, _) = results
    assert set(inside + inside_other) == {0}  # whole weights: no token waits for another rank
    assert len(inside) == len(inside_other) >= 8
    assert all_in == all_in_other > 20
    assert len({len(part) for part in (*first, *second)}) > 1  # lmbda: the ranks sample different numbers of prompts
    assert not {tuple(ids) for ids in first[0]} & {tuple(ids) for ids in second[0]}  # of one prompt, by one seed
    assert len(losses) == 4


def drawn_by_own_sampler(rank, drawn, folder, checkpoint=None):
    """[(row, its weight)] of each batch of this rank, where the user's sampler draws so many of nine rows."""
    trainer, seen = trainer_for(
        "sft", tiny_model(), token_rows("sft", 9), folder, max_steps=-1, num_train_epochs=1, save_strategy="steps",
        per_device_train_batch_size=2, save_steps=1,
    ), []  # fmt: skip
    trainer._get_train_sampler = lambda rows=None: [n % 9 for n in range(drawn)]
    losses = trainer.losses
    trainer.losses = lambda model, batch: seen.append(batch) or losses(model, batch)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [[*zip(batch["index"].tolist(), batch["row_weights"].tolist(), strict=True)] for batch in seen]


@pytest.mark.parametrize("drawn", [6, pytest.param(11, marks=pytest.mark.slow)])
def test_rows_that_fill_up_a_batch_count_once_whatever_the_sampler_draws(drawn, tmp_path):
    for checkpoint, skipped in ((None, 0), (str(tmp_path / "checkpoint-1"), 4)):
        found = on_two(drawn_by_own_sampler, "ddp", drawn, str(tmp_path), checkpoint)
        rows = [row for batches in zip(*found, strict=True) for batch in batches for row in batch]
        assert [row for row, weight in rows if weight] == [n % 9 for n in range(skipped, drawn)]
        assert len(rows) == -(-drawn // 4) * 4 - skipped


@pytest.mark.slow
def test_rollouts_do_not_hang_on_the_engine():
    """Sampled tokens and losses are the same, whatever holds the weights."""
    results = [on_two(sampled, engine, engine, False, timeout=120) for engine in ENGINES]
    for other in results[1:]:
        for (_, rollouts, losses), (_, expected, expected_losses) in zip(other, results[0], strict=True):
            assert rollouts[:2] == expected[:2]
            assert losses == pytest.approx(expected_losses, rel=1e-3)


# ---- streams


def streamed(rank, engine, shards):
    """((step, rows) of each micro-batch that was trained, losses) over a stream that ends within a window."""
    rows = token_rows("sft", 13).to_iterable_dataset(num_shards=shards)
    trainer = trainer_for(
        "sft", tiny_model(), rows, tempfile.mkdtemp(), max_steps=4, learning_rate=1e-3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, **engine_arguments(engine),
    )  # fmt: skip
    trained, step = [], trainer.training_step

    def watched(model, inputs, *args):
        trained.append((trainer.state.global_step, len(inputs["index"])))
        return step(model, inputs, *args)

    trainer.training_step = watched
    trainer.train()
    return trained, losses_of(trainer)


@pytest.mark.parametrize("shards", quick(2, among=(1, 2)))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_stream_trains_whole_windows_on_two_processes(engine, shards):
    (trained, losses), (trained_by_other, losses_of_other) = on_two(streamed, engine, engine, shards, timeout=60)
    assert trained == trained_by_other == [(step, 2) for step in range(4) for _ in range(2)]
    assert losses == losses_of_other
    assert len(losses) == 4


def test_the_partial_window_at_the_end_of_a_stream_is_left_out(tmp_path):
    """13 rows are three windows of four and one row, which the next pass does not begin with."""
    rows, settings = token_rows("sft", 13), {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    settings |= {"max_steps": 8, "learning_rate": 1e-3, "disable_dropout": True}
    stream = trainer_for("sft", tiny_model(), rows.to_iterable_dataset(), tmp_path, **settings)
    whole = trainer_for("sft", tiny_model(), rows.select(range(12)), tmp_path, **settings)
    stream.train()
    whole.train()
    assert len(losses_of(stream)) == 8
    assert losses_of(stream) == pytest.approx(losses_of(whole), rel=1e-6)


# ---- precision


def hidden_dtypes(rank, method, engine, lora):
    """The dtypes of a hidden activation of policy and second model, and of the trained weights."""
    rollout.generate = fake_generate
    peft_config = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    second = second_model(method, seed=5, teachers_only=False)
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 8), tempfile.mkdtemp(), second, bf16=True, max_steps=1,
        learning_rate=1e-3, activation_checkpointing=True, per_device_train_batch_size=2,
        **engine_arguments(engine), **peft_config,
    )  # fmt: skip
    seen = {}

    def watch(name):
        return lambda module, args, output: seen.setdefault(name, set()).add(output.dtype)

    models = zip(("policy", "second"), [trainer.model, *(each.model for each in trainer.second_models)], strict=False)
    for name, model in models:
        scoring.causal_lm(model).model.layers[1].mlp.down_proj.register_forward_hook(watch(name))
    # the check before the first batch is in float32
    trainer.add_callback(type("Forget", (TrainerCallback,), {"on_train_begin": lambda *args, **kwargs: seen.clear()}))
    trainer.train()
    weights = {p.dtype for p in policy_of(trainer).parameters() if p.requires_grad}
    return {name: [str(d) for d in found] for name, found in seen.items()}, [str(d) for d in weights]


@pytest.mark.parametrize("method", quick("kto", among=METHODS))
@pytest.mark.parametrize("engine", quick("fsdp2", "zero3", among=ENGINES))
def test_bf16_is_on_in_both_models_with_activation_checkpointing(engine, method):
    lora = METHODS.index(method) % 2 == 0
    for seen, weights in on_two(hidden_dtypes, engine, method, engine, lora):
        models = ["policy", "second"] if TABLE[method].second else ["policy"]
        assert seen == {name: ["torch.bfloat16"] for name in models}
        assert weights == ["torch.bfloat16" if engine.startswith("zero") else "torch.float32"]


def checked(rank, engine, wrong):
    """What the check before the first batch leaves of a deep model in bf16: its layout, and whether its own logits."""
    if wrong:  # packed documents then see each other
        attention.arguments = lambda model, batch: {"attention_mask": batch.attention_mask}
    model = tiny_model(num_hidden_layers=26, layer_types=["full_attention"] * 26)
    trainer = trainer_for(
        "sft", model, token_rows("sft", 8), tempfile.mkdtemp(), bf16=True, learning_rate=1e-3,
        per_device_train_batch_size=2, **engine_arguments(engine),
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.state.fsdp_plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    return trainer.data_collator.layout, getattr(scoring.causal_lm(trainer.model), scoring.USES_OWN_LOGITS, False)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "expected"), [(False, "shared"), (True, "padded")])
def test_rounding_of_a_deep_model_under_fsdp2_hides_no_fault_and_is_none(wrong, expected):
    """Differences of bf16 grow with depth: the check is in float32, whatever FSDP2 casts to."""
    assert on_two(checked, "fsdp2", "fsdp2", wrong) == [(expected, False)] * 2


def compiled(rank, engine, lora):
    """Losses of four steps of rows of every length, as written and with compiled layers; how many graphs there were."""
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        trainer = trainer_for(
            "dpo", tiny_model(), token_rows("dpo", 16), tempfile.mkdtemp(), max_steps=4, learning_rate=1e-3,
            per_device_train_batch_size=2, activation_checkpointing=False, precompute_ref_log_probs=False,
            **({"torch_compile": True, "torch_compile_backend": "aot_eager"} if compile else {}),
            **({"peft_config": peft.LoraConfig(**LORA)} if lora else {}), **engine_arguments(engine),
        )  # fmt: skip
        trainer.train()
        found.append(losses_of(trainer))
    return *found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_compiled_layers_train_as_they_are_written(engine, lora):
    for written, compiled_, graphs in on_two(compiled, engine, engine, lora, timeout=600):  # C++ is compiled
        assert compiled_ == pytest.approx(written, rel=1e-4)
        assert 0 < graphs <= 24  # on CPU attention breaks each layer's graph


def cached_scores(rank, engine):
    """(cached scores of the reference as the rows hold them, as the loss gets them) under bf16."""
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo", 4), tempfile.mkdtemp(), bf16=True, max_steps=1,
        per_device_train_batch_size=2, precompute_ref_log_probs=True, **engine_arguments(engine),
    )  # fmt: skip
    seen, losses = [], trainer.losses
    trainer.losses = lambda model, batch: seen.append(batch["ref_logps"]) or losses(model, batch)
    trainer.train()
    rows = trainer.train_dataset.select(range(2 * rank, 2 * rank + 2))
    return torch.tensor(rows["ref_logps"]), seen[0]


@pytest.mark.parametrize("engine", ["zero2"])
def test_cached_scores_are_not_rounded_by_a_bf16_engine(engine):
    """Accelerate and HF's Trainer cast floating point inputs to DeepSpeed's dtype."""
    for kept, given in on_two(cached_scores, engine, engine):
        assert given.dtype == torch.float32
        assert sorted(given.flatten().tolist()) == sorted(kept.flatten().tolist())


# ---- frozen models


def held(parameter):
    """(numbers of it on this rank, all its numbers)."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel(), parameter.ds_numel
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel(), parameter.numel()


def cut(rank, method, engine, offload):
    """Of the layers of a trained run's frozen model: (share of their numbers on this rank, do these wait on CPU?)"""
    config = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    config |= {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True} | engine_arguments(engine)
    method_config, method_trainer = {"kd": (KDConfig, KDTrainer), "dpo": (DPOConfig, DPOTrainer)}[method]
    second = {"teacher_model": tiny_model(seed=5), "teacher_offload": offload} if method == "kd" else {}
    trainer = method_trainer(
        tiny_model(), method_config(**config), None, token_rows(method), None, byte_tokenizer(), **second
    )  # fmt: skip
    trainer.train()
    model = trainer.second_models[0].model
    layers = scoring.causal_lm(model).model.layers
    here, whole = map(sum, zip(*map(held, layers.parameters()), strict=True))
    if engine == "zero3":
        offloaded = model.config["zero_optimization"].get("offload_param", {})
        waits = offloaded.get("device") == "cpu"
    else:
        groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
        waits = all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    return here / whole, waits


@pytest.mark.parametrize(
    ("engine", "method", "offload"),
    [pytest.param(*case, marks=[] if case in (("fsdp2", "kd", True), ("zero3", "dpo", False)) else pytest.mark.slow)
     for case in itertools.product(("fsdp2", "zero3"), ("kd", "dpo"), (True, False)) if case[1:] != ("dpo", True)],
)  # fmt: skip
def test_frozen_models_are_cut_over_the_ranks(engine, method, offload):
    for share, waits in on_two(cut, engine, method, engine, offload):
        assert 0.4 < share < 0.6
        assert waits == offload


@pytest.mark.parametrize("offload", [True, False])
def test_a_teacher_that_is_not_cut_leaves_the_device_after_each_use(offload, tmp_path):
    teacher, moves = tiny_model(seed=5), []
    teacher.to = lambda *where: moves.append(where) or teacher
    config = KDConfig(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", max_steps=3)
    KDTrainer(
        tiny_model(),
        config,
        train_dataset=token_rows("kd"),
        processing_class=byte_tokenizer(),
        teacher_model=teacher,
        teacher_offload=offload,
    ).train()
    use, away = (config.device, None), ("cpu",)
    assert moves == ([use, away] * 4 if offload else [use]) + [away]  # a check of its scores and three steps


def alongside(rank, method, engine, dropout, size):
    """(losses of a run whose frozen model came in training mode, what of that model is still trained)."""
    second = tiny_model(seed=5, attention_dropout=dropout).train()
    trainer = trainer_for(
        method, tiny_model(), token_rows(method), tempfile.mkdtemp(), second, max_steps=4, learning_rate=1e-3,
        per_device_train_batch_size=size, disable_dropout=False, **engine_arguments(engine),
    )  # fmt: skip
    trainer.train()
    model = scoring.unwrap_model(trainer.second_models[0].model)
    trained = [name for name, module in model.named_modules() if module.training]
    trained += [name for name, p in model.named_parameters() if p.requires_grad or p.grad is not None]
    return losses_of(trainer), trained


@pytest.mark.parametrize("method", ["kd", "dpo"])
@pytest.mark.parametrize("engine", quick("single", among=("single", *ENGINES)))
def test_frozen_models_have_no_dropout_and_no_gradients(engine, method):
    expected, _ = alongside(None, method, "single", 0.0, 4)
    assert len(expected) == 4
    world = 1 if engine == "single" else 2
    for losses, trained in on_two(alongside, engine, method, engine, 0.5, 4 // world, world=world):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert not trained


# ---- models that DeepSpeed cut while they were loaded


def with_reference(rank, method, precompute, folder):
    """The losses of a run whose policy was loaded under zero.Init, with a reference copied from it in memory."""
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    engine = engine_arguments("zero3") if rank is not None else {}
    config = {"output_dir": f"{folder}/out", "use_cpu": True, "report_to": "none"}
    kept = SFTConfig(**config, **engine)  # from here on from_pretrained cuts what it loads
    policy = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    assert hasattr(next(policy.parameters()), "ds_id") == (rank is not None)
    trainer = trainer_for(
        method, policy, token_rows(method, 13), f"{folder}/out", max_steps=5, learning_rate=1e-3,
        per_device_train_batch_size=4 if rank is not None else 8, precompute_ref_log_probs=precompute, **engine,
    )  # fmt: skip
    trainer.train()
    assert kept is not None
    return losses_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_of_a_policy_loaded_in_pieces(method, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    alone = with_reference(None, method, False, str(tmp_path))
    for precompute in (False, True):
        first, second = on_two(with_reference, "zero3", method, precompute, str(tmp_path))
        assert first == second == pytest.approx(alone, rel=1e-4)


def drawn(rank, folder):
    """The weights of a model from scratch, which the engine has not cut yet or is told here not to have."""
    kept = SFTConfig(f"{folder}/out", use_cpu=True, report_to="none", **engine_arguments("zero3"))
    torch.manual_seed(0)
    model = models.load_model(ModelSection(name_or_path=f"{folder}/model", from_scratch=True))
    assert kept.deepspeed_plugin.zero_stage == 3
    assert is_deepspeed_zero3_enabled()  # as it was
    return model.state_dict()


def test_random_weights_are_the_same_under_zero3(tmp_path):
    tiny_model().config.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    alone = models.load_model(ModelSection(name_or_path=f"{tmp_path}/model", from_scratch=True)).state_dict()
    for found in on_two(drawn, "zero3", str(tmp_path)):
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())


def out_of_order(rank, engine):
    """What evaluate() before train() and a second train() say."""
    rows, said = token_rows("sft", 8), []
    trainer = trainer_for("sft", tiny_model(), rows, tempfile.mkdtemp(), eval_rows=rows, **engine_arguments(engine))
    for step in (trainer.evaluate, trainer.train, trainer.evaluate, trainer.train):
        try:
            step()
            said.append(None)
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("engine", quick("fsdp2", among=("fsdp2", "zero2", "zero3")))
def test_evaluation_before_training_and_a_second_training_are_refused(engine):
    for before, first, after, second in on_two(out_of_order, engine, engine):
        assert (first, after) == (None, None)
        assert before == "FSDP2 and DeepSpeed cannot evaluate before train(). Set eval_on_start: true instead"
        assert second == "train() can be called only once under FSDP2 and DeepSpeed. Build another trainer"


# ---- what two processes cannot do


def refused_on_two(rank, folder):
    """What a stream given to `evaluate`, one given as eval_dataset, and even_batches: false are answered with."""
    stream = datasets.IterableDataset.from_generator(lambda: iter(token_rows("sft", 5)))
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), folder)
    tries = (
        lambda: trainer.evaluate(stream),
        lambda: trainer_for("sft", tiny_model(), token_rows("sft"), folder, eval_rows=stream),
        lambda: trainer_for("sft", tiny_model(), token_rows("sft"), folder, accelerator_config={"even_batches": False}),
    )
    said = []
    for attempt in tries:
        with pytest.raises(InputError) as raised:
            attempt()
        said.append(str(raised.value))
    return said


def test_uneven_batches_and_streams_to_evaluate_are_refused_on_several_processes(tmp_path):
    for said in on_two(refused_on_two, "ddp", str(tmp_path)):
        assert said[0] == said[1]
        reason = "ranks would evaluate different numbers of rows"
        assert said[0] == f"eval: a stream is not supported on several processes: {reason}. Set streaming: false"
        assert said[2].startswith("accelerator_config: even_batches: false is not supported, because ranks would wait")
    # alone both are as good as any
    stream = datasets.IterableDataset.from_generator(lambda: iter(token_rows("sft", 5)))
    config = {"accelerator_config": {"even_batches": False}}
    trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, eval_rows=stream, **config).evaluate()


# ---- models that transformers has sharded while it loaded them

AT_LOAD_TIME = ({"tp_plan": "auto"}, {"tp_size": 2}, {"fsdp_size": 2}, {"pp_size": 2})


def sharded_at_load_time(rank, folder):
    """The error of each role and each kind of sharding, and of a trainer that loads the model itself."""
    torch.distributed.init_process_group("gloo")
    said = []
    for options in AT_LOAD_TIME:
        given = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**options))
        for method, policy, second in (
            ("sft", given, None), ("kd", tiny_model("llama"), given), ("dpo", tiny_model("llama"), given)
        ):  # fmt: skip
            with pytest.raises(InputError) as caught:
                trainer_for(method, policy, token_rows(method), tempfile.mkdtemp(), second)
            said.append(str(caught.value))
    return said


def test_a_model_that_is_sharded_at_load_time_is_refused(tmp_path):
    """As policy, teacher and reference, before the first collective of the trainer."""
    tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    said, said_by_other = on_two(sharded_at_load_time, "ddp", str(tmp_path), timeout=90)
    assert said == said_by_other
    assert len(said) == 3 * len(AT_LOAD_TIME)
    assert set(said) == {
        "weights of the model are distributed already (tp_plan, distributed_config or fully_shard). Load it without "
        "these. To shard it, use FSDP2 or ZeRO-3 (accelerate_configs/)"
    }
