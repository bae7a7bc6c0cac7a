"""Models that see, through all methods: each layout gives what the model's own forward gives of each answer alone."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
import yaml
from models_for_tests import tiny_model
from peft import LoraConfig
from PIL import Image
from training_for_tests import (
    LORA,
    METHODS,
    TABLE,
    assert_same_step,
    one_step,
    policy_of,
    quick,
    train_with_report,
    trainer_for,
)
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
)
from vision_for_tests import KINDS, config_of, pictures, processor_of, seeing

from hf_posttrain import RewardConfig, RewardTrainer
from hf_posttrain.data.images import get_image_reader, image_size, to_stored_image
from hf_posttrain.errors import InputError
from hf_posttrain.methods import config_class, trainer_class
from hf_posttrain.models.adapters import add_adapter
from hf_posttrain.models.config import ModelSection, RewardModelSection
from hf_posttrain.models.load import load_model, load_tokenizer
from hf_posttrain.run import main
from hf_posttrain.scoring import forward
from hf_posttrain.scoring.attention_selection import choose_attention, row_multiple
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layout_selection import supported_layouts
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.scoring.vision_inputs import VisionInputs
from hf_posttrain.trainer.run_fingerprint import describe_rows

PHOTO, LOGO = pictures()
CPU = torch.device("cpu")
LAYOUTS = ("shared", "packed", "padded")
VIDEOS = {"qwen3_vl": "Qwen3VLProcessor", "qwen3_5": "Qwen3VLProcessor", "gemma4": "Gemma4Processor",
          "smolvlm": "SmolVLMProcessor"}  # fmt: skip
"""Kinds whose processors read videos too, with torchvision."""
CLASSIFIED = [kind for kind in KINDS if type(config_of(kind)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING]
"""Kinds that transformers has a sequence classifier for."""


def image():
    return {"type": "image"}


def text(said):
    return {"type": "text", "text": said}


def examples(tokenizer):
    """Two pictures among text with two answers, none, and one at the end of a prompt."""
    reader, found = get_image_reader(tokenizer), []
    for parts, paths in (([image(), text("What?"), image()], [PHOTO, LOGO]), ([text("hello")], []),
                         ([text("see "), image()], [LOGO])):  # fmt: skip
        seen = [to_stored_image(path) for path in paths]
        written = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False,
                                                add_generation_prompt=True).split(reader.image_token)  # fmt: skip
        whole = written[0] + "".join(map("".join, zip(map(reader.expansion, seen), written[1:], strict=True)))
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        found.append(Example(ids, [Branch(list(b"answer one")), Branch(list(b"no"))], images=seen))
    return found


def own_inputs(kind, ids, reader, seen):
    """What the model's own forward takes, as its processor gives it."""
    if not seen:
        return {}
    named = {"gemma3": "token_type_ids", "idefics3": None, "smolvlm": None}.get(kind, "mm_token_type_ids")
    kinds = torch.isin(ids, torch.tensor(reader.token_ids)).long()
    return reader.tensors(seen) | ({named: kinds} if named else {})


def alone(kind, model, reader, rows):
    """(values of all answers' tokens, gradient), each answer by the model's own forward with its own pictures."""
    found = []
    for row in rows:
        for branch in row.branches:
            ids = torch.tensor([[*row.prompt, *branch.ids]])
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
                           **own_inputs(kind, ids, reader, row.images))  # fmt: skip
            logps = output.logits[0, len(row.prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logps.gather(-1, torch.tensor(branch.ids)[:, None])[:, 0])
    return with_gradient(model, torch.cat(found))


def with_gradient(model, values):
    values.sum().backward()
    grad = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return values.detach(), grad


def together(model, rows, layout, seen, change=None):
    batch = collate(rows, layout, row_multiple=row_multiple([model]), vision_inputs=seen)
    batch = change(batch) if change else batch
    values = forward.score(model, batch, LogProb(batch.targets)).value
    return with_gradient(model, values[batch["owner"].argsort(stable=True)])


def ready(kind):
    model, tokenizer = seeing(kind, scale=2.0)
    return model, tokenizer, get_image_reader(tokenizer), examples(tokenizer)


def as_in_training(model, reader):
    forward.enable_scoring(model)
    choose_attention(model, CPU)
    return VisionInputs.from_model(model, reader)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layout_scores_as_the_models_own_forward(kind):
    """Values and gradients, of tower and language model, M-RoPE and tokens of a picture that see each other too."""
    model, _, reader, rows = ready(kind)
    expected = alone(kind, model, reader, rows)
    seen = as_in_training(model, reader)
    assert supported_layouts([model])[0] == list(LAYOUTS)
    for layout in LAYOUTS:
        found = together(model, rows, layout, seen)
        assert (found[0] - expected[0]).abs().max() < 1e-5
        assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
    setattr(model, forward.USES_OWN_LOGITS, True)
    found = together(model, rows, "shared", seen)
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


@pytest.mark.parametrize(
    ("kind", "part"), [("qwen3_vl", "rope_positions"), ("qwen3_5", "rope_positions"), ("gemma3", "image_numbers")]
)
def test_what_a_batch_has_of_pictures_makes_a_difference(kind, part):
    """Or the test above would show nothing."""
    model, _, reader, rows = ready(kind)
    expected = alone(kind, model, reader, rows)[0]
    seen = as_in_training(model, reader)
    without = lambda batch: batch.replace(**{part: None})  # noqa: E731
    for layout in LAYOUTS:
        assert (together(model, rows, layout, seen, without)[0] - expected).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_other_pictures_give_other_scores_and_a_gradient_to_the_tower(kind):
    model, _, reader, rows = ready(kind)
    expected, seen = alone(kind, model, reader, rows[:1])[0], as_in_training(model, reader)
    black = [to_stored_image(Image.new("RGB", image_size(picture))) for picture in rows[0].images]
    other = [dataclasses.replace(rows[0], images=black)]
    assert (together(model, other, "shared", seen)[0] - expected).abs().max() > 1e-4
    if kind == "gemma3":  # whose pictures are all of one size, so that only their order tells them apart
        swapped = [dataclasses.replace(rows[0], images=rows[0].images[::-1])]
        assert (together(model, swapped, "shared", seen)[0] - expected).abs().max() > 1e-4
    batch = collate(rows[:1], "shared", row_multiple=row_multiple([model]), vision_inputs=seen)
    forward.score(model, batch, LogProb(batch.targets)).value.sum().backward()
    of_tower = [p.grad for name, p in model.named_parameters() if forward.is_vision_parameter(model, name)]
    assert sum(grad.abs().sum() for grad in of_tower if grad is not None) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_read_once_for_all_answers(kind):
    model, _, reader, rows = ready(kind)
    seen, sizes = as_in_training(model, reader), {}
    for layout in LAYOUTS:
        batch = collate(rows, layout, row_multiple=row_multiple([model]), vision_inputs=seen)
        sizes[layout] = batch["vision_inputs"]["pixel_values"].numel()
    assert sizes["shared"] <= 0.5 * sizes["packed"] == 0.5 * sizes["padded"]


def conversations(method, count=6):
    """Rows with no, one and two pictures."""
    rows = []
    for n in range(count):
        parts = [image()] * (n % 3) + [text(f"What is {n}?")]
        row = {"prompt": [{"role": "user", "content": parts}], "images": [PHOTO, LOGO][: n % 3]}
        said = lambda words: [{"role": "assistant", "content": words}]  # noqa: E731
        if TABLE[method].rows.paired:
            row |= {"chosen": said(f"good {n}"), "rejected": said("bad")}
        else:
            row |= {"completion": said(f"answer {n}"), "label": n % 2 == 0}
        rows.append(row)
    return rows


def options(kind, method):
    """A model, and what its trainer is given."""
    model, tokenizer = seeing(kind)
    second = seeing(kind, seed=9)[0] if TABLE[method].second == "teacher" else None
    return model, {"tokenizer": get_image_reader(tokenizer).processor, "second": second}


FIRST = [("qwen3_vl", "dpo"), ("qwen3_5", "sft"), ("idefics3", "opd")]


@pytest.mark.parametrize(("kind", "method"), [
    pytest.param(kind, method, marks=[] if (kind, method) in FIRST else pytest.mark.slow)
    for kind in KINDS for method in METHODS if kind in CLASSIFIED or TABLE[method].head == "language"
])  # fmt: skip
def test_a_step_is_the_same_in_all_layouts(kind, method, tmp_path):
    model, given = options(kind, method)
    rows = conversations(method)
    steps = {layout: one_step(method, model, rows, tmp_path / layout, layout=layout, **given) for layout in LAYOUTS}
    for layout in ("shared", "packed"):
        assert_same_step(steps[layout], steps["padded"], relative=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_adapter_is_on_the_tower_whatever_it_is_asked_for(kind):
    """Names that a tower has too, and an expression of the user's own for what is left out."""
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        for left_out in (None, ["layers.1.self_attn.q_proj"], r".*layers\.1\.self_attn\.q_proj"):
            config = LoraConfig(r=2, target_modules=targets, exclude_modules=left_out)
            model = add_adapter(seeing(kind)[0], config)
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            assert any(".q_proj.lora_A" in name or "in_proj" in name for name in trained)
            assert not any(
                forward.is_vision_parameter(model, name.removeprefix("base_model.model.")) for name in trained
            )
            first = [name for name in trained if "layers.1.self_attn.q_proj" in name]
            assert bool(first) == (left_out is None)


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm"])
def test_a_tower_that_is_not_trained_keeps_nothing(kind, tmp_path):
    """Also where the inputs of checkpointed layers are made to require a gradient."""
    model, given = options(kind, "sft")
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path, peft_config=LoraConfig(**LORA),
                          activation_checkpointing=True, **given)  # fmt: skip
    seen, inner = [], forward.causal_lm(trainer.model)
    reading = inner.base_model.get_image_features
    inner.base_model.get_image_features = lambda *args, **more: seen.append(reading(*args, **more)) or seen[-1]
    trainer.train()
    assert seen
    assert not any(found.pooler_output[0].requires_grad for found in seen)


@pytest.mark.parametrize("kind", quick("qwen3_vl", among=KINDS))
def test_pictures_in_turns_that_are_trained_or_left_out(kind, tmp_path):
    """All turns are trained; and a picture behind the last trained token is not shown."""
    turns = [{"role": "user", "content": [image(), text("What is it?")]}, {"role": "assistant", "content": "A face."}]
    asked, answer = {"role": "user", "content": [text("And"), image()]}, {"role": "assistant", "content": "A logo."}
    one = {"messages": turns, "images": [PHOTO]}
    two = {"messages": [*turns, asked, answer], "images": [PHOTO, LOGO]}
    left_out = {"messages": [*turns, asked, answer | {"weight": 0}], "images": [PHOTO, LOGO]}
    model, given = options(kind, "sft")

    def step(rows, train_on, layout="padded"):
        return one_step("sft", model, rows, tmp_path, layout=layout, train_on=train_on, **given)

    for rows, train_on in (([one, two], "all"), ([one, left_out], "assistant")):
        expected = step(rows, train_on)
        for layout in ("shared", "packed"):
            assert_same_step(step(rows, train_on, layout), expected, relative=1e-4)
    assert_same_step(expected, step([one, one], "assistant"), relative=1e-4)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", quick("qwen3_vl", among=KINDS))
def test_the_tower_stays_as_it_is_unless_it_is_asked_for(kind, lora, tmp_path):
    adapter = {"peft_config": LoraConfig(**LORA)} if lora else {}
    for wanted in (False, True):
        model, given = options(kind, "sft")
        before = {name: p.clone() for name, p in model.named_parameters() if forward.is_vision_parameter(model, name)}
        assert before
        trainer = trainer_for("sft", model, conversations("sft"), tmp_path, learning_rate=1e-2, train_vision=wanted,
                              **given, **adapter)  # fmt: skip
        trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        inner = forward.causal_lm(trainer.model)
        names = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in trained]
        assert any(forward.is_vision_parameter(inner, name) for name in names) == wanted
        assert any(not forward.is_vision_parameter(inner, name) for name in names)
        trainer.train()
        if not wanted:
            kept = {name.replace(".base_layer", ""): p for name, p in inner.named_parameters()}
            assert all(torch.equal(kept[name], p) for name, p in before.items())


@pytest.mark.parametrize("kind", quick("qwen3_vl", "gemma3", among=KINDS))
def test_what_is_saved_sees_as_before(kind, tmp_path):
    """Model and processor, loaded by transformers alone, answer a picture as the trained policy does."""
    model, given = options(kind, "sft")
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path, learning_rate=1e-2, **given)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    known = type(given["tokenizer"])
    processor = (known if kind in VIDEOS else AutoProcessor).from_pretrained(tmp_path / "saved")
    reader, rows = get_image_reader(trainer.tokenizer), examples(trainer.tokenizer)
    ids = torch.tensor([rows[0].prompt])
    inputs = own_inputs(kind, ids, reader, rows[0].images)
    with torch.no_grad():
        mine = policy_of(trainer).eval()(input_ids=ids, use_cache=False, **inputs).logits
        theirs = loaded(input_ids=ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(mine, theirs)
    assert processor.chat_template == given["tokenizer"].chat_template
    answers = loaded.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
                              **inputs)  # fmt: skip
    assert answers.shape[1] > ids.shape[1]
    assert known.__name__ == VIDEOS.get(kind, known.__name__)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_to_pictures_are_those_of_whole_forwards(kind, tmp_path):
    """Of prompts with and without pictures in one batch, padded on the left."""
    from hf_posttrain.scoring.layouts import Prompt

    model, given = options(kind, "sft")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path, **given)
    reader, prompts = get_image_reader(trainer.tokenizer), []
    for row in examples(trainer.tokenizer):
        prompts.append(Prompt(row.prompt))
        prompts[-1].images = row.images
    found = trainer.generate(prompts, 5)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **own_inputs(kind, ids, reader, prompt.images)).logits
        behind = logits[0, len(prompt) - 1 : -1]
        chosen = behind.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert (behind.amax(-1) - chosen).max() < 1e-3


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_answers_have_no_token_of_pictures(temperature, tmp_path):
    """Also where it is by far the likeliest: with pictures in the prompt by transformers, without by our decoding."""
    from hf_posttrain.scoring.layouts import Prompt

    model, given = options("qwen3_vl", "sft")
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path, **given)
    [place] = get_image_reader(trainer.tokenizer).token_ids
    with torch.no_grad():
        model.lm_head.weight.zero_()
        bias = torch.zeros(model.lm_head.out_features).index_fill(0, torch.tensor([place]), 50.0)
        model.lm_head.bias = torch.nn.Parameter(bias)
    prompts = [Prompt.from_row(row) for row in trainer.train_dataset]
    assert len({len(prompt.images) for prompt in prompts}) > 1
    for some in (prompts, [prompt for prompt in prompts if not prompt.images]):
        answers = trainer.generate(some, 4, temperature=temperature)
        assert answers
        assert not any(place in answer for answer in answers)


def test_exact_match_shows_the_pictures_of_the_question_alone(tmp_path):
    """Of a conversation whose later turns have more."""
    asked, again = ({"role": "user", "content": parts} for parts in ([image(), text("What?")], [text("And"), image()]))
    answers = [{"role": "assistant", "content": f"A {what}."} for what in ("face", "logo")]
    rows = [{"messages": [asked, answers[0], again, answers[1]], "images": [PHOTO, LOGO]}] * 2
    model, given = options("qwen3_vl", "sft")
    trainer = trainer_for("sft", model, rows, tmp_path, eval_rows=rows, train_on="assistant", eval_exact_match=True,
                          eval_max_completion_length=4, **given)  # fmt: skip
    assert 0 <= trainer.evaluate()["eval_exact_match"] <= 1


def test_cached_scores_are_of_the_pictures_that_are_there(tmp_path, monkeypatch):
    """Another picture under the same name, of the same size."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, given = options("qwen3_vl", "dpo")
    rows = [row | {"images": [str(tmp_path / "a.png")] * len(row["images"])} for row in conversations("dpo")]
    found = []
    for seed in (0, 1):
        Image.effect_noise((40, 40), 30 + 90 * seed).convert("RGB").save(tmp_path / "a.png")
        trainer = trainer_for("dpo", copy.deepcopy(model), rows, tmp_path, precompute_ref_log_probs=True, **given)
        trainer.train()
        found.append(
            (
                trainer.train_dataset["ref_logps"][:],
                describe_rows(trainer.train_dataset, trainer.data_method.rows.columns),
            )
        )
        assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_what_workers_of_a_loader_are_given_can_be_pickled(tmp_path):
    model, given = options("smolvlm", "sft")
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path, **given)
    rows = [trainer.train_dataset[n] for n in range(3)]
    copied = pickle.loads(pickle.dumps(trainer.data_collator))
    one, two = trainer.data_collator(rows), copied(rows)
    torch.testing.assert_close(one["vision_inputs"], two["vision_inputs"])
    assert torch.equal(one["input_ids"], two["input_ids"])


def saved_model(kind, folder):
    """A folder with a language model that sees, and its processor."""
    seeing(kind)[0].save_pretrained(folder)
    processor_of(kind).save_pretrained(folder)
    return str(folder)


def test_kinds_with_a_classifier():
    assert CLASSIFIED == ["qwen3_5", "gemma3"]


@pytest.mark.parametrize(("kind", "lora"), [
    pytest.param(kind, lora, marks=[] if (kind, lora) == ("gemma3", True) else pytest.mark.slow)
    for kind in CLASSIFIED for lora in (False, True)
])  # fmt: skip
def test_a_reward_model_sees(kind, lora, tmp_path, capsys):
    """A language model by name, trained on rows with pictures: what is saved gives each answer alone the same reward,
    loaded by transformers, in evaluation of all layouts, in `eval` and in a run that goes on from it."""
    rows = conversations("rm")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    adapter = LoraConfig(**LORA) if lora else None
    given = {"output_dir": str(tmp_path / "out"), "max_steps": 2, "learning_rate": 1e-2, "use_cpu": True,
             "report_to": "none", "save_strategy": "no", "merge_lora": lora}  # fmt: skip
    trainer = RewardTrainer(saved_model(kind, tmp_path / "model"), RewardConfig(**given), None, rows,
                            peft_config=adapter)  # fmt: skip
    trainer.train()
    trainer.save_model()

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1).eval()
    assert forward.is_vision_language_model(loaded)
    reader = get_image_reader(trainer.tokenizer)
    expected = []
    for row in trainer.train_dataset:
        for name in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[name]])
            with torch.no_grad():
                inputs = own_inputs(kind, ids, reader, row["images"])
                expected.append(loaded(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, 0])
    expected = torch.stack(expected).view(-1, 2)
    assert (expected[:, 0] - expected[:, 1]).abs().min() > 1e-4
    for layout in LAYOUTS:
        again = RewardTrainer(
            str(tmp_path / "out"), RewardConfig(**given | {"layout": layout, "merge_lora": False}), None, rows
        )
        assert get_image_reader(again.tokenizer)
        found = torch.tensor(again.predict(again.train_dataset).predictions)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    assert main(["eval", str(tmp_path / "out"), "--data", str(tmp_path / "rows.jsonl"), "--images", "--json"]) == 0
    printed = capsys.readouterr().out
    [evaluation] = json.loads(printed[printed.index("[\n") :])
    assert evaluation["metrics"]["mean_reward"] == pytest.approx(expected.mean().item(), rel=1e-3, abs=1e-5)
    assert evaluation["metrics"]["pair_accuracy"] == (expected[:, 0] > expected[:, 1]).double().mean().item()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CLASSIFIED])
def test_a_kind_without_a_classifier_is_told_before_it_is_loaded(kind, tmp_path):
    config_of(kind).save_pretrained(tmp_path)  # without weights
    processor_of(kind).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no sequence classifier in transformers. Use another model as a reward"):
        load_model(RewardModelSection(str(tmp_path), images=True))


def test_a_reward_model_that_reads_text_alone_is_told(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"images: .* \(qwen3\) does not support images. Set images: false"):
        load_model(RewardModelSection(str(tmp_path), images=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [*FIRST, ("smolvlm", "cpo")])
def test_a_recipe_trains_saves_and_answers(kind, method, tmp_path, capsys):
    """20 steps, evaluated and saved; what is loaded again answers a prompt with a picture."""
    for seed, name in ((0, "model"), (9, "teacher")):
        seeing(kind, seed)[0].save_pretrained(tmp_path / name)
        processor_of(kind).save_pretrained(tmp_path / name)
    section, teacher = ({"name_or_path": str(tmp_path / name), "images": True} for name in ("model", "teacher"))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in conversations(method, 12)))
    source = {"path": str(tmp_path / "rows.jsonl")}
    train = {"output_dir": str(tmp_path / "out"), "max_steps": 20, "use_cpu": True, "report_to": "none",
             "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "eval_strategy": "steps",
             "eval_steps": 10, "save_strategy": "no"}  # fmt: skip
    train |= {"max_completion_length": 8} if TABLE[method].rows.sampled else {}
    recipe = {"method": method, "model": section, "data": {"train": source, "eval": source}, "train": train}
    recipe |= {"teacher": teacher} if TABLE[method].second == "teacher" else {}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    logged = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    assert len(losses) == 20
    if method in ("sft", "dpo", "cpo"):
        assert losses[-1] < losses[0]
    saved = ModelSection(str(tmp_path / "out"), images=True)
    model, tokenizer = load_model(saved, trainable=False), load_tokenizer(saved)
    before = load_model(ModelSection(str(tmp_path / "model"), images=True)).state_dict()
    same = {name: torch.equal(weight, before[name]) for name, weight in model.state_dict().items()}
    assert all(kept for name, kept in same.items() if forward.is_vision_parameter(model, name))
    assert not any(
        kept for name, kept in same.items() if "q_proj" in name and not forward.is_vision_parameter(model, name)
    )
    reader, row = get_image_reader(tokenizer), examples(tokenizer)[0]
    ids = torch.tensor([row.prompt])
    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
                            **own_inputs(kind, ids, reader, row.images))  # fmt: skip
    assert answer.shape[1] > ids.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_code_on_the_card_answers_a_picture(lora, tmp_path, monkeypatch, capsys):
    model, given = options("gemma3", "sft")
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")
    adapter = {"peft_config": LoraConfig(**LORA, task_type="CAUSAL_LM")} if lora else {}
    trainer = trainer_for("sft", model, conversations("sft"), tmp_path / "run", **given, **adapter)
    card = train_with_report(trainer)
    assert "pipeline_tag: image-text-to-text" in card
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.jpg").symlink_to(PHOTO)
    exec(card.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out


def test_what_reads_videos_is_saved_as_it_was(tmp_path):
    """Without torchvision it cannot be made, and a saved processor without it could not be loaded with that."""
    model, _ = seeing("qwen3_vl")
    model.save_pretrained(tmp_path / "base")
    processor_of("qwen3_vl").save_pretrained(tmp_path / "base")
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 4, "temporal_patch_size": 2}
    (tmp_path / "base" / "video_preprocessor_config.json").write_text(json.dumps(videos))
    for source, target in (("base", "first"), ("first", "second")):
        model.save_pretrained(tmp_path / target)
        tokenizer = load_tokenizer(ModelSection(str(tmp_path / source), images=True))
        get_image_reader(tokenizer).processor.save_pretrained(tmp_path / target)
        saved = json.loads((tmp_path / target / "processor_config.json").read_text())
        assert videos.items() <= saved["video_processor"].items()


def test_a_model_by_name_brings_its_processor(tmp_path):
    seeing("qwen3_vl")[0].save_pretrained(tmp_path / "model")
    processor_of("qwen3_vl").save_pretrained(tmp_path / "model")
    args = config_class(TABLE["sft"])(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", max_steps=1)
    trainer = trainer_class(TABLE["sft"])(str(tmp_path / "model"), args, train_dataset=conversations("sft"))
    assert trainer.data_collator.vision_inputs
    with pytest.raises(InputError, match=r"is a vision-language model\. Set images: true"):
        load_model(ModelSection(str(tmp_path / "model")))


def test_a_picture_that_has_changed_is_told(tmp_path):
    import shutil

    model, given = options("qwen3_vl", "sft")
    shutil.copy(PHOTO, tmp_path / "a.jpg")
    row = {"messages": [{"role": "user", "content": [image(), text("What?")]},
                        {"role": "assistant", "content": "yes"}], "images": [str(tmp_path / "a.jpg")]}  # fmt: skip
    trainer = trainer_for("sft", model, [row] * 4, tmp_path / "out", **given)
    Image.new("RGB", (40, 900)).save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="images have changed since their rows were prepared"):
        trainer.train()


def test_a_model_that_sees_nothing_is_told(tmp_path):
    from models_for_tests import tiny_model

    _, given = options("qwen3_vl", "sft")
    with pytest.raises(
        InputError, match=r"Qwen3ForCausalLM does not support images\. Load it with AutoModelForImageTextToText"
    ):
        trainer_for("sft", tiny_model(), conversations("sft"), tmp_path, **given)


def test_text_alone_trains_a_model_that_sees(tmp_path):
    """By its tokenizer or its processor: the same step."""
    model, given = options("qwen3_vl", "sft")
    said = {"completion": [{"role": "assistant", "content": "yes"}]}
    rows = [{"prompt": [{"role": "user", "content": "hello"}]} | said] * 4
    ways = {"processor": given, "tokenizer": given | {"tokenizer": seeing("qwen3_vl")[1]}}
    del ways["tokenizer"]["tokenizer"].image_reader
    steps = [one_step("sft", copy.deepcopy(model), rows, tmp_path / name, **way) for name, way in ways.items()]
    assert_same_step(*steps)


@pytest.mark.slow
def test_check_says_what_pictures_cost(tmp_path, monkeypatch, capsys):
    from hf_posttrain import run

    monkeypatch.chdir(tmp_path)
    model, given = options("qwen3_vl", "dpo")
    model.save_pretrained("model")
    given["tokenizer"].save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in conversations("dpo")))
    (tmp_path / "recipe.yaml").write_text(
        "method: dpo\nmodel: {name_or_path: model, images: true}\ndata: {train: {path: rows.jsonl}}\n"
        "train: {output_dir: out, max_steps: 1, report_to: none, use_cpu: true}\n"
    )
    assert run.main(["recipe.yaml", "--check"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "memory on each device" in page
    assert "not included: activations" not in page
    assert "images: 6 in 6 examples, 11 tokens each on average, from 8 of" in page
    assert "to 12 of 512 x 600" in page
    assert "12 x <|image_pad|>" in page
    assert run.main(["recipe.yaml"]) == 0
    for words, message in (
        (["model.images=false"], "model.images: true"),
        (["model.name_or_path=text"], "does not support images. Set images: false"),
    ):
        if words == ["model.name_or_path=text"]:
            from models_for_tests import tiny_model
            from tokenizers_for_tests import byte_tokenizer

            tiny_model().save_pretrained("text")
            byte_tokenizer().save_pretrained("text")
        assert run.main(["recipe.yaml", *words]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
