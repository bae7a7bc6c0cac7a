"""Layers that keep a state, in one row of pieces: each answer's values and gradients are those of it alone."""

import copy
import logging

import pytest
import torch
from architectures import drop_pieces, tiny
from hunt_architectures import examples, scored_alone
from peft import LoraConfig
from plain_for_tests import token_logps
from training_for_tests import LORA, METHODS, TABLE, assert_same_step, fix_rollouts, one_step, quick, token_rows
from transformers import CONFIG_MAPPING

from hf_posttrain.check.saved_tensors import SavedTensorCounter
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.scoring import forward, recurrent_segments
from hf_posttrain.scoring.attention_selection import choose_attention, row_multiple
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layout_selection import choose_layout, supported_layouts, verified_layout
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.scoring.recurrent_segments import SegmentTables, stateful_layers

HYBRIDS = ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_linear", "olmo_hybrid", "falcon_h1",
           "bamba", "qwen3_5_moe_text", "zamba2", "bailing_hybrid"]  # fmt: skip
if "lfm3" in CONFIG_MAPPING:  # before, decoder layers of LFM2 do not pass on the arguments of a model's forward
    HYBRIDS += ["lfm2_moe", "lfm2", "lfm3"]
CPU = torch.device("cpu")
ROWS = [*examples(), Example([7], [Branch([9, 8, 7]), Branch([5])]), Example([7, 9], [Branch([9])])]
"""Prompts with several answers, of one token and none shared, answers of one token and with masked ends."""
ROWS.append(Example([7, 9, 11, 12], [Branch([9, 6, 5], [1, 0, 0]), Branch([8, 8], [0, 0]), Branch([8, 5, 5, 6])]))


def build(name, **changes):
    """A tiny hybrid as a trainer has it."""
    model = tiny(name, scale=1.0, **changes)
    forward.enable_scoring(model)
    choose_attention(model, CPU)
    return model


def gradient(model):
    """All gradients in one vector; they are cleared."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def together(model, layout, rows=ROWS):
    """Values of the tokens, branch by branch, and the gradient of their sum."""
    batch = collate(rows, layout, row_multiple=row_multiple([model]))
    values = forward.score(model, batch, LogProb(batch.targets)).value
    values.sum().backward()
    return values.detach()[batch["owner"].argsort(stable=True)], gradient(model)


def alone(model, rows=ROWS):
    """The same, each answer by the model's own forward."""
    found = []
    for row in rows:
        for branch in row.branches:
            table = token_logps(model, row.prompt, list(branch.ids))
            trained = torch.tensor(branch.mask or [1] * len(branch.ids)).bool()
            found.append(table[torch.arange(len(branch.ids)), branch.ids][trained])
    torch.cat(found).sum().backward()
    return torch.cat(found).detach(), gradient(model)


def assert_equal(found, expected):
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


@pytest.mark.parametrize("name", quick("qwen3_5_text", "granitemoehybrid", "lfm2_moe", among=HYBRIDS))
def test_values_and_gradients_are_those_of_each_answer_alone(name):
    model = build(name)
    assert stateful_layers(model)
    assert supported_layouts([model])[0] == ["shared", "packed", "padded"]
    assert choose_layout([model], "auto") == "shared"
    expected = alone(model)
    for layout in ("shared", "packed", "padded"):
        assert_equal(together(model, layout), expected)


def test_without_the_pieces_documents_run_into_each_other(monkeypatch):
    model = build("qwen3_5_text")
    expected = alone(model)
    monkeypatch.setattr(model, "has_recurrent_layers", False)
    assert (together(model, "packed")[0] - expected[0]).abs().max() > 1e-3
    assert verified_layout([model], "packed", explicit=False) == "padded"


@pytest.mark.parametrize("explicit", [False, True])
def test_beside_an_attention_that_turns_out_to_want_a_mask_rows_are_padded(explicit, caplog):
    models = [build("granitemoehybrid"), drop_pieces(build("qwen3"))]
    said = "because a model with recurrent layers requires rows in segments"
    if explicit:
        with pytest.raises(InputError, match=f"layout='shared' is not supported, {said}"):
            verified_layout(models, "shared", explicit)
    else:
        assert verified_layout(models, "shared", explicit) == "padded"
        assert f"layout shared is not supported, {said}" in caplog.text


def test_no_state_is_left_from_a_batch_before():
    model, longer = build("qwen3_5_text"), [Example(list(range(5, 105)), [Branch(list(range(9, 99)))])]
    first = together(model, "shared")
    together(model, "shared", longer)
    again = together(model, "shared")
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_checkpointed_layers_have_the_same_gradient():
    model = build("qwen3_5_text").train()
    expected = together(model, "shared")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(together(model, "shared"), expected)


@pytest.mark.parametrize("name", quick("lfm2_moe", among=HYBRIDS))
def test_answers_to_prompts_of_unequal_length_are_those_of_each_alone(name):
    model = build(name)
    prompts = [[7, 8, 9], [5], list(range(5, 40)), [6, 5]]
    found = rollout.generate(model, prompts, 8, [299], 0)
    assert found == [rollout.generate(model, [prompt], 8, [299], 0)[0] for prompt in prompts]
    for prompt, answer in zip(prompts, found, strict=True):
        assert token_logps(model, prompt, answer).argmax(-1).tolist() == answer


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", quick("dpo", among=METHODS))
def test_a_step_is_the_same_in_all_layouts(method, lora, tmp_path, monkeypatch):
    """Qwen3.5: the loss and the gradient of each weight, without and with an adapter on all its linear layers."""
    fix_rollouts(monkeypatch)
    options = {"peft_config": LoraConfig(**LORA)} if lora else {}
    if TABLE[method].second == "teacher":
        options["second"] = tiny("qwen3_5_text", seed=9, scale=1.0)
    model, rows = tiny("qwen3_5_text", scale=1.0), token_rows(method)
    expected = one_step(method, model, rows, tmp_path, layout="padded", **options)
    for layout in ("packed", "shared"):
        assert_same_step(one_step(method, model, rows, tmp_path, layout=layout, **options), expected)


def test_a_layer_that_is_not_told_of_pieces_ends_in_the_padded_layout(caplog):
    """Jamba's decoder layers do not hand on what the model was called with."""
    model = build("jamba")
    with caplog.at_level(logging.WARNING):
        assert verified_layout([model], "shared", explicit=False) == "padded"
    assert "differ from its own forward in layout shared. Using padded" in caplog.text
    problem = "not supported for JambaForCausalLM, because its scores differ from its own forward"
    with pytest.raises(InputError, match=problem):
        verified_layout([copy.deepcopy(model)], "shared", explicit=True)


def test_other_attention_leaves_such_layers_padded():
    model = tiny("qwen3_5_text", scale=1.0)
    model.set_attn_implementation("eager")
    fitting, why = supported_layouts([model])
    assert fitting == ["padded"]
    assert "require sdpa for rows in segments, not eager" in why


def test_a_second_model_with_another_attention_leaves_such_layers_padded(tmp_path):
    """It would get rows with a mask, in which states run from one document into the next."""
    teacher = tiny("gpt_oss", seed=9, scale=3.0)
    hybrid, rows = tiny("qwen3_5_text", scale=3.0), token_rows("kd")
    expected = one_step("kd", hybrid, rows, tmp_path, second=teacher, layout="padded")
    assert_same_step(one_step("kd", hybrid, rows, tmp_path, second=teacher), expected)
    with pytest.raises(InputError, match="requires rows in segments, which the attention of another does not support"):
        one_step("kd", hybrid, rows, tmp_path, second=teacher, layout="packed")
    models = [build("qwen3_5_text"), teacher]
    assert verified_layout(models, "packed", explicit=False) == "padded"


# a prompt of 3 with branches of 2 and 1, one without a prompt, a prompt of 1 with a branch, padding
SIZES = [(3, 3), (2, 5), (1, 4), (4, 4), (1, 1), (2, 3), (3, 3)]


@pytest.mark.parametrize("alike", [1, 32])
def test_pieces_go_on_where_their_prompt_ended(alike, monkeypatch):
    monkeypatch.setattr(recurrent_segments, "MIN_GROUP_LENGTH", alike)
    pieces = SegmentTables.from_sizes(SIZES, CPU)
    branches, begins = ([each[part].tolist() for each in pieces.branches] for part in (0, 1))
    if alike == 1:
        assert [table.tolist() for table in pieces.prompts] == [[[0, 1, 2]], [[-1, 10]]]
        assert branches == [[[6, 7, 8, 9], [13, 14, 15, -1], [3, 4, -1, -1], [11, 12, -1, -1]], [[5, -1]]]
        assert begins == [[2, 2, 0, 1], [0]]
    else:
        assert [table.tolist() for table in pieces.prompts] == [[[0, 1, 2], [-1, -1, 10]]]
        assert branches == [[[6, 7, 8, 9], [13, 14, 15, -1], [3, 4, -1, -1], [11, 12, -1, -1], [5, -1, -1, -1]]]
        assert begins == [[2, 2, 0, 1, 0]]
    flat = torch.cat([table.flatten() for table in (*pieces.prompts, *(table for table, _ in pieces.branches))])
    assert flat[pieces.back].tolist() == list(range(16))


@pytest.mark.parametrize("name", quick("qwen3_5_text", among=HYBRIDS))
def test_pieces_of_unequal_length_are_computed_apart(name, monkeypatch):
    """With the numbers of each answer alone, and without the memory of padding."""
    monkeypatch.setattr(recurrent_segments, "MIN_GROUP_LENGTH", 1)
    model = build(name)
    assert_equal(together(model, "shared"), alone(model))
    assert len(SegmentTables.from_sizes([(1, 1), (40, 40)], CPU).branches) == 2


def test_one_long_document_among_short_ones_costs_no_padding():
    model, kept = build("qwen3_5_text"), {}
    for lengths in ((512,), (32,) * 16, (512, *(32,) * 16)):
        batch = collate([Example([5], [Branch([7] * n)]) for n in lengths], "packed", row_multiple=1)
        counted = SavedTensorCounter((*model.parameters(), *model.buffers()))
        with counted.counting():
            forward.score(model, batch, LogProb(batch.targets))
        kept[len(lengths)] = counted.bytes
    assert kept[17] < 1.2 * (kept[1] + kept[16])


def test_scores_of_tokens_are_those_of_the_plain_version():
    """The two slow versions of these tests agree."""
    model = build("lfm2_moe")
    assert (scored_alone(model, ROWS[:2]) - alone(model, ROWS[:2])[0]).abs().max() < 1e-6
