"""OPD's rollouts by vLLM, against stand-ins that have vLLM's interface: weights on both sides, samples, refusals."""

import collections
import copy
import dataclasses
import importlib.util
import inspect
import itertools
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import vllm_for_tests
from models_for_tests import tiny_model
from processes_for_tests import engine_arguments, on_two
from training_for_tests import LORA, policy_of, token_rows, trainer_for
from transformers import AutoModelForCausalLM
from vllm_for_tests import Serving, sampled

from hf_posttrain import OPDConfig
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.generation.completions_client import ServerError
from hf_posttrain.losses.divergence import DIVERGENCES
from hf_posttrain.methods.rules import POLICY_GRADIENT
from hf_posttrain.models.hub_weights import hub_weights, named_weights
from hf_posttrain.rollouts import vllm as vllm_rollout
from hf_posttrain.rollouts.vllm_in_process import VLLMInProcessSampler
from hf_posttrain.trainer import saving

TRAINING = {
    "sampler": "vllm_colocate", "max_steps": 3, "learning_rate": 3e-3, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2, "num_generations": 2, "temperature": 0.8,
}  # fmt: skip


def untied(**changes):
    """A student that may be sent to a server."""
    return tiny_model(tie_word_embeddings=False, **changes)


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in for the package."""
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, None)
    vllm_for_tests.install()


@pytest.fixture
def sampler(request, vllm):
    """What a config needs for vLLM in the process or on a server, which has other weights, or the base for LoRA."""
    mode, lora = request.param
    if mode == "policy":
        yield {"sampler": mode}
        return
    if mode == "colocate":
        yield {"peft_config": peft.LoraConfig(**LORA) if lora else None}
        return
    with Serving(tiny_model() if lora else untied(seed=77)) as server:
        server_options = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        yield {"peft_config": peft.LoraConfig(**LORA) if lora else None, "server": server} | server_options


BOTH = [(mode, lora) for mode in ("colocate", "server") for lora in (False, True)]
NAMES = [f"{mode}-{'lora' if lora else 'full'}" for mode, lora in BOTH]
IN_TURNS = [case if case in (("colocate", False), ("server", True)) else pytest.param(case, marks=pytest.mark.slow)
            for case in BOTH]  # fmt: skip


def opd(setting, folder, model=None, second=None, **config):
    """(trainer, its server or None)"""
    given = TRAINING | setting | config
    server = given.pop("server", None)
    if model is None:
        served = isinstance(given["sampler"], dict) and given["sampler"]["kind"] == "vllm_server"
        model = untied() if served and not given.get("peft_config") else tiny_model()
    rows, second = token_rows("opd", 12), second or tiny_model(seed=9)
    return trainer_for("opd", model, rows, folder, second=second, eval_rows=token_rows("opd", 3), **given), server


def theirs(trainer, server):
    """The model that vLLM would sample with now."""
    sampler = trainer.sampler
    if sampler.lora is None:
        return server.model if server else sampler.llm.policy
    if server:
        [adapter] = server.adapters.values()
        return adapter
    return vllm_for_tests.with_adapter(sampler.llm.policy, sampler.adapter.lora_path)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def ids_of(groups):
    """The ids of all completions, one prompt after the other."""
    return [completion.ids for completions in groups for completion in completions]


def assert_equal_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


# ---- training


@pytest.mark.parametrize("sampler", IN_TURNS, ids=NAMES, indirect=True)
def test_each_step_samples_with_the_policys_own_weights(sampler, tmp_path):
    """After every synchronisation the weights are equal on both sides, and rollouts are what the policy would say."""
    trainer, server = opd(sampler, tmp_path)
    synchronise, sample, states = trainer.sampler.synchronize, trainer.sampler.sample, []

    def watched():
        synchronise()
        states.append(weights(trainer.model))
        assert_equal_weights(weights(theirs(trainer, server)), states[-1])

    def compared(prompts, n, max_new_tokens, seed):
        found = sample(prompts, n, max_new_tokens, seed)
        assert n == 2
        trainer.model.eval()
        for number, (prompt, completions) in enumerate(zip(prompts, found, strict=True)):
            seeded = {"n": n, "seed": rollout.mix_seed(*seed, number) >> 2, "max_tokens": max_new_tokens}
            how = trainer.sampler.sampling_parameters | seeded | {"logprobs": 0}
            rollouts, logps = sampled(trainer.model, prompt, **how)
            assert ids_of([completions]) == rollouts
            torch.testing.assert_close([completion.logps for completion in completions], logps)
        trainer.model.train()
        return found

    trainer.sampler.synchronize, trainer.sampler.sample = watched, compared
    trainer.train()
    assert len(states) == 3
    for before, after in itertools.pairwise(states):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(losses_of(trainer)) == 3


def losses_of(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("sampler", [("policy", False), *BOTH[::2]], ids=["own", *NAMES[::2]], indirect=True)
def test_a_teacher_equal_to_the_student_teaches_nothing_at_any_temperature(sampler, tmp_path):
    """Sampled, scored and compared at 0.7, by every loss: the divergence is 0 for each rollout."""
    student = untied()
    trainer, _ = opd(sampler, tmp_path, copy.deepcopy(student), student, temperature=0.7)
    for loss_type in (POLICY_GRADIENT, *DIVERGENCES):
        trainer.args.loss_type = loss_type
        metrics = trainer.evaluate()
        assert metrics["eval_distill/reverse_kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["eval_logprob/gap"] == pytest.approx(0, abs=1e-6)
        assert metrics["eval_loss"] == pytest.approx(0, abs=1e-6)
    trainer.args.temperature = 1.4  # seen: scores follow the option
    assert trainer.evaluate()["eval_logprob/student"] != metrics["eval_logprob/student"]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [BOTH[1], BOTH[3]], ids=[NAMES[1], NAMES[3]], indirect=True)
def test_a_hundred_transfers_of_an_adapter_leave_the_base_bit_for_bit(sampler, tmp_path, monkeypatch):
    """Nothing is merged into the policy, which in bfloat16 could not be undone."""
    trainer, _ = opd(sampler, tmp_path, tiny_model().to(torch.bfloat16))
    before = weights(trainer.model)
    for _ in range(100):
        trainer.sampler.synchronize()
    assert_equal_weights(weights(trainer.model), before)


@pytest.mark.parametrize("sampler", IN_TURNS, ids=NAMES, indirect=True)
def test_a_resumed_run_repeats_its_rollouts(sampler, tmp_path):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole, _ = opd(sampler, tmp_path / "whole", **config)
    whole.train()
    resumed, server = opd(sampler, tmp_path / "resumed", **config)
    if server:
        server.adapters = {}
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses_of(resumed) == losses_of(whole)


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_both_modes_train_the_same(lora, tmp_path, vllm):
    """What is sampled depends on the weights and on (seed, step, rank, number of the prompt) alone."""
    peft_config = {"peft_config": peft.LoraConfig(**LORA) if lora else None}
    student = tiny_model() if lora else untied()
    colocated, _ = opd(peft_config, tmp_path, copy.deepcopy(student))
    colocated.train()
    with Serving(tiny_model() if lora else untied(seed=77)) as server:
        served, _ = opd(peft_config, tmp_path, student, sampler={"kind": "vllm_server", "base_url": server.url})
        served.train()
    assert losses_of(served) == losses_of(colocated)


@pytest.mark.parametrize("sampler", IN_TURNS, ids=NAMES, indirect=True)
def test_weights_are_sent_once_a_step_and_whenever_they_may_have_changed(sampler, tmp_path):
    trainer, _ = opd(sampler, tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2)
    sent, synchronise = [], trainer.sampler.synchronize
    trainer.sampler.synchronize = lambda: (sent.append(trainer.state.global_step), synchronise())
    trainer.train()
    assert sent == [0, 1, 2]  # an evaluation and the window after it share them
    with torch.no_grad():
        next(p for p in trainer.model.parameters() if p.requires_grad).add_(1)
    trainer.evaluate()
    assert sent == [0, 1, 2, 2]
    trainer.train()
    assert sent == [0, 1, 2, 2, 0, 1, 2]


@pytest.mark.parametrize("sampler", IN_TURNS, ids=NAMES, indirect=True)
def test_what_was_written_is_removed(sampler, tmp_path):
    trainer, server = opd(sampler, tmp_path)
    trainer.train()
    left = {path.name for path in trainer.sampler.folder.iterdir()} - {"model"}
    assert left == ({"4"} if trainer.sampler.lora else set())  # vLLM may read the newest adapter again
    if server and trainer.sampler.lora:
        assert list(server.adapters) == [f"{trainer.sampler.folder.name}-4"]


@pytest.mark.parametrize("sampler", [("colocate", False), ("server", False)], ids=["colocate", "server"], indirect=True)
def test_padding_of_the_vocabulary_is_never_drawn(sampler, tmp_path, monkeypatch):
    """The student has 40 ids that stand for no token, or that the teacher lacks, and likes them."""
    student = untied()
    student.resize_token_embeddings(340, mean_resizing=False)
    with torch.no_grad():
        student.get_output_embeddings().weight[300:] = 3 * student.get_output_embeddings().weight[:40]
    trainer, server = opd(sampler, tmp_path, student, max_completion_length=3)
    if server:
        server.model = copy.deepcopy(student)  # started with a model of its size
    assert trainer.sampler.sampling_parameters["logit_bias"] == {token: -100.0 for token in range(300, 340)}
    trainer.sampler.synchronize()
    assert max(map(max, ids_of(trainer.sampler.sample([[1, 2, 3]] * 20, 2, 4, (0,))))) < 300
    monkeypatch.setitem(trainer.sampler.sampling_parameters, "logit_bias", None)
    with pytest.raises(RuntimeError, match="vLLM sampled an id of the vocabulary's padding"):
        trainer.sampler.sample([[1, 2, 3]] * 20, 2, 4, (0,))


@pytest.mark.parametrize("sampler", [("colocate", False)], ids=["colocate"], indirect=True)
def test_more_padding_than_vllm_can_be_kept_from_is_refused(sampler, tmp_path):
    student = tiny_model()
    student.resize_token_embeddings(1400, mean_resizing=False)
    with pytest.raises(InputError, match=r"1100 ids that represent no token, .* vLLM can exclude 1024 ids at most"):
        opd(sampler, tmp_path, student)


@pytest.mark.parametrize("sampler", BOTH[:2], ids=NAMES[:2], indirect=True)
def test_the_engine_is_asked_for_the_students_own_length_precision_and_adapter(sampler, tmp_path):
    trainer, _ = opd(sampler, tmp_path, max_length=48, sampler={"kind": "vllm_colocate", "gpu_memory_utilization": 0.2})
    state = torch.get_rng_state()
    trainer.sampler.synchronize()
    assert torch.equal(torch.get_rng_state(), state)  # whatever vLLM seeds
    lora = {"enable_lora": True, "max_lora_rank": 8} if trainer.sampler.lora else {}
    assert trainer.sampler.llm.fields == lora | {
        "load_format": "dummy", "generation_config": "vllm", "dtype": "float32", "max_model_len": 48,
        "gpu_memory_utilization": 0.2, "enable_prefix_caching": True, "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    trainer.sampler.synchronize()
    trainer.sampler.sample([[1, 2], [3]], 2, 4, (0,))
    # scrambled ones before all others, and a look at what arrived
    log = ["weights", "weights", *(["reset", ("generate", 4, 1)] if lora else [])]  # and a scrambled adapter
    log += ["reset", ("generate", 4, 2 if lora else None), *([] if lora else ["weights"]), "reset"]
    assert trainer.sampler.llm.log == [*log, ("generate", 2, 3 if lora else None)]
    assert trainer.sampler.sample([], 2, 4, (0,)) == []  # a rank whose prompts are all answered by the data


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe", "gemma3", "gpt2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_weights_in_memory_have_the_names_of_the_hubs_format(name, lora, tmp_path):
    """Fused experts too: exactly what save_pretrained writes, and a tied head under its own name."""
    from safetensors.torch import load_file

    model = tiny_model(name)
    copy.deepcopy(model).save_pretrained(tmp_path)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    inner = model.get_base_model() if lora else model
    found = hub_weights(inner, dict(named_weights(model)))
    expected = load_file(tmp_path / "model.safetensors")
    if model.config.tie_word_embeddings:  # the head too, which vLLM keeps by itself where it is told so
        expected["lm_head.weight"] = found["lm_head.weight"]
        assert torch.equal(found["lm_head.weight"], model.get_input_embeddings().weight)
    assert_equal_weights(found, expected)


# ---- one window ahead


def ahead(server, folder, prefetch=True, **config):
    """A trainer on 24 rows whose server has the base for LoRA or other weights."""
    options = TRAINING | {"sampler": {"kind": "vllm_server", "base_url": server.url, "prefetch": prefetch}} | config
    return trainer_for("opd", untied(), token_rows("opd", 24), folder, second=tiny_model(seed=9),
                       eval_rows=token_rows("opd", 3), **options)  # fmt: skip


def losses_ahead(folder, resume=None, process=None, **config):
    """The losses of a run of `ahead` with its own server. process: the start that the server reports."""
    with Serving(untied(seed=77)) as server:
        server.process = process or server.process
        trainer = ahead(server, folder, **config)
        trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer)


def test_the_next_windows_rollouts_are_of_weights_one_step_old(tmp_path):
    """Each window's rollouts are those of the policy before the last step, and its log-probabilities there are kept."""
    with Serving(untied(seed=77)) as server:
        trainer = ahead(server, tmp_path, max_steps=4)
        states, found, sample, send = [], [], trainer.sampler.sample, trainer.sampler._send

        def sent(*args):
            send(*args)
            states.append(copy.deepcopy(trainer.model).eval())

        def watched(prompts, n, max_new_tokens, seed):
            groups = sample(prompts, n, max_new_tokens, seed)
            found.append((prompts, n, max_new_tokens, seed, groups))
            return groups

        trainer.sampler._send, trainer.sampler.sample = sent, watched
        trainer.train()
    states = states[1:]  # the first were scrambled
    assert len(states) == len(found) == 4
    for step, (prompts, n, max_new_tokens, seed, groups) in enumerate(found):
        assert n == 2
        policy = states[max(step - 1, 0)]
        for number, (prompt, completions) in enumerate(zip(prompts, groups, strict=True)):
            seeded = {"seed": rollout.mix_seed(*seed, number) >> 2, "max_tokens": max_new_tokens, "logprobs": 0}
            expected, values = sampled(policy, prompt, n, **trainer.sampler.sampling_parameters | seeded)
            assert ids_of([completions]) == expected
            torch.testing.assert_close([completion.logps for completion in completions], values)
    staleness = [log["sampling/logp_difference"] for log in trainer.state.log_history if "sampling/kl" in log]
    assert staleness[0] < 1e-5 < min(staleness[1:])


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["reverse_kl", POLICY_GRADIENT])
def test_one_window_ahead_changes_nothing_where_weights_do_not_move(loss_type, tmp_path):
    config = {"max_steps": 5, "learning_rate": 0.0, "loss_type": loss_type, "eval_strategy": "steps", "eval_steps": 2}
    losses = [losses_ahead(tmp_path, prefetch=prefetch, **config) for prefetch in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5


@pytest.mark.slow
def test_a_run_ahead_is_resumed_with_the_rollouts_that_were_under_way(tmp_path):
    """Over an end of the rows as well, where the first window is sampled as it comes."""
    config = {"max_steps": 9, "save_strategy": "steps", "save_steps": 2}
    whole = losses_ahead(tmp_path / "whole", **config)
    for step in (2, 6):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        assert losses_ahead(tmp_path / f"resumed-{step}", checkpoint, process="another", **config) == whole


@pytest.mark.slow
def test_an_error_within_a_step_keeps_the_rollouts_of_that_step(tmp_path):
    """As where the teacher's server is lost: the checkpoint is of the step before, which goes on with them."""
    config = {"max_steps": 6, "save_strategy": "steps", "save_steps": 100}
    whole = losses_ahead(tmp_path / "whole", **config)
    with Serving(untied(seed=77)) as server:
        broken = ahead(server, tmp_path / "broken", **config)
        distill = broken.distill

        def fail(*args):
            if broken.state.global_step == 3:
                raise ServerError("the teacher is gone")
            return distill(*args)

        broken.distill = fail
        with pytest.raises(ServerError, match=r"the teacher is gone\. checkpoint-3 is saved"):
            broken.train()
    assert losses_ahead(tmp_path / "resumed", str(tmp_path / "broken" / "checkpoint-3"), **config) == whole


def test_rollouts_of_a_server_that_has_started_again_are_sampled_anew(tmp_path):
    with Serving(untied(seed=77)) as server:
        trainer = ahead(server, tmp_path, max_steps=3)
        prefetch = trainer.sampler.prefetch

        def restarted(*args):
            prefetch(*args)
            trainer.sampler.prefetched.wait()
            server.process, server.model = f"{server.process}+", untied(seed=5)

        trainer.sampler.prefetch = restarted
        trainer.train()
    differences = [log["sampling/logp_difference"] for log in trainer.state.log_history if "sampling/kl" in log]
    assert max(differences) < 1e-5


def test_a_policy_gradient_ahead_weighs_tokens_by_how_much_likelier_they_are_now():
    from hf_posttrain.scoring.policy_gradient import importance_weight

    student, sampler = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.0, -0.5, -3.0, float("nan")])
    torch.testing.assert_close(importance_weight(student, sampler), torch.tensor([1.0, 0.6065307, 2.0, 1.0]))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_server_that_ignores_what_it_gets_is_found_before_the_first_step(lora, tmp_path, monkeypatch):
    """A new adapter changes nothing before it has been trained, and little after a step: a scrambled one does."""
    with Serving(tiny_model() if lora else untied(seed=77)) as server:
        base = copy.deepcopy(server.model)
        ignored = (lambda **_: "Success") if lora else (lambda *_, **__: {"results": [None]})
        monkeypatch.setattr(server, "load_lora_adapter" if lora else "collective_rpc", ignored)
        server.adapters = collections.defaultdict(lambda: base)
        options = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        trainer, _ = opd(options | {"peft_config": peft.LoraConfig(**LORA) if lora else None}, tmp_path)
        problem = "ignores the student's adapter" if lora else "samples from another model than the student"
        with pytest.raises(InputError, match=problem):
            trainer.train()
        assert trainer.state.global_step == 0


def test_a_student_in_bf16_may_have_a_server_in_float32(tmp_path):
    with Serving(untied(seed=77)) as server:
        trainer, _ = opd({"sampler": {"kind": "vllm_server", "base_url": server.url}}, tmp_path, bf16=True, max_steps=1)
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize("part", ["max_model_len", "model_config"])
def test_a_server_that_says_less_of_itself(part, tmp_path, monkeypatch):
    with Serving(untied(seed=77)) as server:
        told = server.models() if part == "max_model_len" else server.server_info()
        (told["data"][0] if part == "max_model_len" else told["vllm_config"]).pop(part)
        monkeypatch.setattr(server, "models" if part == "max_model_len" else "server_info", lambda **_: told)
        options = {"sampler": {"kind": "vllm_server", "base_url": f"{server.url}/v1/"}}
        if part == "max_model_len":  # others than vLLM may not say it
            opd(options, tmp_path)
            return
        with pytest.raises(
            InputError, match=r"the response of a server is not that of vLLM \(KeyError: 'model_config'"
        ):
            opd(options, tmp_path)


def test_what_waits_for_a_server_does_not_keep_a_process_alive():
    """An executor's threads would: a run that has failed would wait for its rollouts, and other ranks for it."""
    lines = [
        "import time; from hf_posttrain.generation.completions_client import run_concurrently, run_in_background",
        "run_in_background(lambda: run_concurrently(time.sleep, [600, 600]))",
        "time.sleep(0.5); raise SystemExit(7)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=120).returncode == 7


def test_at_once_keeps_order_and_ends_after_an_error():
    from hf_posttrain.generation.completions_client import run_concurrently

    assert run_concurrently(lambda n: n * n, range(1000)) == [n * n for n in range(1000)]
    assert run_concurrently(len, []) == []
    begun = []

    def fail(number):
        begun.append(number)
        time.sleep(0.01)
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        run_concurrently(fail, range(10_000))
    assert len(begun) < 1000


# ---- several processes


def trained(rank, engine, folder, lora, options):
    """(weights that each synchronisation gave this rank's engine, whole weights, rollouts of each window)"""
    vllm_for_tests.install()
    peft_config = peft.LoraConfig(**LORA) if lora else None
    trainer, _ = opd({"peft_config": peft_config}, folder, max_steps=2, **options, **engine_arguments(engine))
    synchronise, sample = trainer.sampler.synchronize, trainer.sampler.sample
    states, wholes, rollouts = [], [], []

    def watched():
        synchronise()
        if hasattr(trainer.sampler, "llm"):
            states.append(weights(theirs(trainer, None)))
        whole = saving.full_state_dict(trainer, adapter_only=False) or policy_of(trainer).state_dict()
        wholes.append({name: tensor.clone() for name, tensor in whole.items()})

    def drawn(*args):
        groups = sample(*args)
        rollouts.append(ids_of(groups))
        return groups

    trainer.sampler.synchronize, trainer.sampler.sample = watched, drawn
    trainer.train()
    return states, wholes, rollouts


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "lora"),
    [("ddp", False)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("zero3", True), ("fsdp2", False), ("fsdp2", True), ("zero3", False))
    ],
)
def test_each_rank_gives_its_engine_the_whole_weights(engine, lora, tmp_path):
    first, second = on_two(trained, engine, engine, str(tmp_path), lora, {})
    (states, wholes, rollouts), (other_states, _, other_rollouts) = first, second
    assert len(states) == len(other_states) == len(wholes) == 2
    for found, found_by_other, expected in zip(states, other_states, wholes, strict=True):
        assert_equal_weights(found, expected)
        assert_equal_weights(found_by_other, expected)
    assert rollouts[0] != other_rollouts[0]


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(("engine", "lora"), [("zero3", False), ("fsdp2", True)])
def test_the_first_rank_sends_and_all_ranks_ask(engine, lora, tmp_path):
    with Serving(tiny_model() if lora else untied(seed=77)) as server:
        options = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        (_, wholes, rollouts), (_, _, other) = on_two(trained, engine, engine, str(tmp_path), lora, options)
    sent = [path for path, body in server.log if path == "/v1/load_lora_adapter" or "reload" in str(body)]
    assert len(sent) == len(wholes) + 1 == 3  # scrambled ones before all
    [model] = server.adapters.values() if lora else [server.model]
    assert_equal_weights(weights(model), wholes[-1])
    asked = [
        body for path, body in server.log if path == "/v1/completions" and body["seed"] >= vllm_rollout.PROBE_PROMPTS
    ]
    assert len({body["seed"] for body in asked}) == len(asked) == sum(map(len, rollouts + other)) // 2


# ---- refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sampler": "sglang"}, "sampler='sglang' is not one of policy, vllm_colocate, vllm_server"),
        ({"sampler": {"gpu_memory_utilization": 0.3}}, "of kind policy, the default. Set sampler.kind: vllm_colocate"),
        ({"sampler": "vllm_server"}, "sampler requires sampler.base_url of kind vllm_server"),
        ({"sampler": {"kind": "vllm_colocate", "base_url": "http://a:1"}}, "Set sampler.kind: vllm_server"),
        ({"sampler": {"kind": "vllm_server", "base_url": "a:1"}}, "sampler.base_url='a:1' must be a URL"),
        (
            {"sampler": {"kind": "vllm_server", "base_url": "http://a:1", "gpu_memory_utilization": 0.5}},
            "sampler.gpu_memory_utilization is not an option of kind vllm_server",
        ),
        (
            {"sampler": {"kind": "vllm_colocate", "gpu_memory_utilization": 1.5}},
            "gpu_memory_utilization=1.5 must be in",
        ),
        ({"sampler": {"kind": "vllm_colocate", "batch_size": 8}}, "Set sampler.kind: policy"),
        ({"sampler": {"kind": "vllm_server", "base_url": 3}}, "sampler.base_url must be a text, not 3"),
        ({"sampler": {"kind": "vllm_server", "base_url": "http://a:1", "prefetch": "x"}}, "true or false, not 'x'"),
        ({"temperature": 3.0}, "must be from 0.01 to 2 for vLLM"),
    ],
)
def test_contradictions_are_refused(config, message, vllm, tmp_path):
    with pytest.raises(InputError, match=message):
        OPDConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "sampler": "vllm_colocate"} | config)


def test_a_missing_package_is_refused(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "vllm" else find(name, *args))
    with pytest.raises(InputError, match=r"requires the package vllm\. Install it with pip install"):
        OPDConfig(output_dir=str(tmp_path), use_cpu=True, sampler="vllm_colocate")
    config = {"sampler": {"kind": "vllm_server", "base_url": "http://a:1"}}
    OPDConfig(output_dir=str(tmp_path), use_cpu=True, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(use_dora=True), "LoRA with use_dora=True"),
        (peft.LoraConfig(modules_to_save=["lm_head"]), "LoRA with modules_to_save="),
        (peft.LoraConfig(target_parameters=["down_proj"]), "Name target_modules without experts"),
        (peft.LoraConfig(bias="all"), "LoRA with bias='all'"),
        (peft.LoraConfig(init_lora_weights="pissa"), "LoRA with init_lora_weights='pissa'"),
        (peft.LoraConfig(r=8, rank_pattern={"q_proj": 600}), "up to rank 512, not 600"),
        (peft.IA3Config(), "serves LoRA, not IA3"),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        vllm_rollout.max_lora_rank(config)


def test_the_rank_is_rounded_up_to_one_that_vllm_has():
    found = [vllm_rollout.max_lora_rank(peft.LoraConfig(r=r)) for r in (1, 4, 8, 12, 300, 512)]
    assert found == [1, 8, 8, 16, 320, 512]


@pytest.mark.parametrize("sampler", [("colocate", False)], ids=["colocate"], indirect=True)
def test_a_quantised_student_is_refused(sampler, tmp_path):
    trainer, _ = opd(sampler, tmp_path)
    trainer.model.is_quantized = True
    with pytest.raises(InputError, match="a vLLM sampler cannot be combined with a quantized student"):
        VLLMInProcessSampler(trainer)


@pytest.mark.parametrize(
    ("lora", "without", "message"),
    [
        (False, "/collective_rpc", "answered 404 .*Set VLLM_SERVER_DEV_MODE=1"),
        (False, "/reset_prefix_cache", "answered 404 .*Set VLLM_SERVER_DEV_MODE=1"),
        (True, "/v1/load_lora_adapter", "answered 404 .*Start the server with --enable-lora and VLLM_ALLOW_RUNTIME"),
        (False, "/v1/completions", "/v1/completions answered 404"),
        (False, "/v1/models", "/v1/models answered 404"),
    ],
)
def test_a_server_without_an_endpoint_is_refused(lora, without, message, tmp_path):
    with Serving(tiny_model(), without=(without,)) as server:
        config = {"sampler": {"kind": "vllm_server", "base_url": f"{server.url}/"}}
        with pytest.raises(InputError, match=message):
            opd(config | {"peft_config": peft.LoraConfig(**LORA) if lora else None}, tmp_path)[0].train()


def test_a_server_of_another_base_is_told(tmp_path, caplog):
    """With LoRA the base is not sent."""
    student = tiny_model()
    with Serving(tiny_model()) as server:
        config = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        for name, told in (("served", False), ("another", True)):
            student.config._name_or_path = student.name_or_path = name
            caplog.clear()
            opd(config | {"peft_config": peft.LoraConfig(**LORA)}, tmp_path, copy.deepcopy(student))
            assert ("serves served, and the student's base is another" in caplog.text) == told


def test_a_server_that_keeps_an_old_head_ends_the_run(tmp_path):
    """As vLLM 0.32 does on CPU with a head that is the embedding too."""
    with Serving(untied(seed=77)) as server:
        config = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        server.keeps = ("lm_head.weight",)
        with pytest.raises(InputError, match=r"samples from another model .* --hf-overrides"):
            opd(config, tmp_path, tiny_model())[0].train()
        server.keeps = ()
        opd(config, tmp_path, tiny_model())[0].train()


def test_other_trouble_with_a_server_is_told(tmp_path):
    with Serving(tiny_model(), max_model_len=100) as server:
        config = {"sampler": {"kind": "vllm_server", "base_url": server.url}}
        with pytest.raises(InputError, match="max_length=200 is more than the vLLM server's --max-model-len 100"):
            opd(config, tmp_path, max_length=200)
        trainer, _ = opd(config, tmp_path, max_length=64)
        server.busy = True
        with pytest.raises(InputError, match="has requests of other clients"):
            trainer.train()
        server.busy, server.model = False, None
        with pytest.raises(InputError, match=r"completions answered 500 .*NoneType"):
            trainer.sampler.sample([[1]], 2, 4, (0,))
    with pytest.raises(InputError, match=rf"no server answers at {server.url}/v1/models .*refused"):
        opd(config, tmp_path)


def test_the_command_refuses_before_weights_are_loaded(tmp_path, monkeypatch, capsys, vllm):
    """Server out of reach, unsuitable LoRA, quantised student, TRL's name."""
    from tokenizers_for_tests import byte_tokenizer
    from transformers import Qwen3Config

    from hf_posttrain import run
    from hf_posttrain.models import load as models

    monkeypatch.setattr(models, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    Qwen3Config(**shape, tie_word_embeddings=False).save_pretrained("tiny")
    byte_tokenizer().save_pretrained("tiny")
    Path("tiny/model.safetensors").touch()  # never read
    Path("rows.jsonl").write_text('{"prompt": "1+1="}\n')
    Path("opd.yaml").write_text(
        "method: opd\nmodel: {name_or_path: tiny}\nteacher: {name_or_path: tiny}\ndata: {train: {path: rows.jsonl}}\n"
        "train: {output_dir: out, max_steps: 1, use_cpu: true, max_completion_length: 8, sampler: vllm_colocate}\n"
    )

    def line(*overrides):
        assert run.main(["opd.yaml", *overrides]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    server = "train.sampler={kind: vllm_server, base_url: http://127.0.0.1:9}"
    assert "command line: sampler.base_url: no server answers at" in line(server)
    assert "no server answers" in line(server, "model.lora={r: 8}")
    assert "opd.yaml:5: vLLM cannot serve LoRA with use_dora=True" in line("model.lora={use_dora: true}")
    quantized = line("model.lora={r: 8}", "model.quantization=4bit")
    assert "a vLLM sampler cannot be combined with a quantized student" in quantized
    assert "train.use_vllm does not exist: use sampler: vllm_colocate or vllm_server" in line("train.use_vllm=true")


# ---- vLLM itself


def test_the_stand_ins_have_vllms_names():
    """Where vLLM is installed: its signatures against those that the tests above rely on."""
    pytest.importorskip("vllm")
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.lora.request import LoRARequest

    for name in ("__init__", "generate", "collective_rpc", "reset_prefix_cache"):
        ours = inspect.signature(getattr(vllm_for_tests.LLM, name)).parameters
        real = inspect.signature(getattr(LLM, name)).parameters
        assert ours.keys() <= real.keys()
    assert {field.name for field in dataclasses.fields(EngineArgs)} >= vllm_for_tests.ENGINE_FIELDS
    assert {f.name for f in dataclasses.fields(vllm_for_tests.SamplingParams)} <= {*SamplingParams.__struct_fields__}
    assert {f.name for f in dataclasses.fields(vllm_for_tests.LoRARequest)} <= {*LoRARequest.__struct_fields__}
    assert CompletionRequest.model_fields.keys() >= vllm_for_tests.COMPLETION_FIELDS


@pytest.mark.gpu
def test_vllm_itself_samples_with_the_policys_weights(tmp_path):
    """Colocated, on a GPU: greedy answers of vLLM are the policy's own before and after training."""
    vllm = pytest.importorskip("vllm")
    model = AutoModelForCausalLM.from_config(tiny_model(head_dim=64).config)
    sampler = {"kind": "vllm_colocate", "gpu_memory_utilization": 0.1}
    trainer, _ = opd({"use_cpu": False}, tmp_path, model, bf16=False, sampler=sampler)
    for _ in range(2):
        trainer.sampler.synchronize()
        greedy = vllm.SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        [found] = trainer.sampler.llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy, use_tqdm=False)
        ids = torch.tensor([[1, 2, 3]], device=trainer.args.device)
        own = trainer.model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert list(found.outputs[0].token_ids) == own[0, 3:].tolist()
        trainer.train()
