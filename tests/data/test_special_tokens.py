"""Layouts of special tokens: no false warning, and nothing is trained that a server would not generate.

Each layout of `special_tokens_for_tests.LAYOUTS` goes through `data`, --check, SFT, DPO, generation and saving. The
expected tokens come from transformers alone: the prompt that its `apply_chat_template` renders, and the text of `said`.
"""

import gc
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers as tf
from special_tokens_for_tests import ANSWER, ANSWERS, LAYOUTS, QUESTIONS, Layout, prompt_of, write_layout
from training_for_tests import every_other

from hf_posttrain import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, run
from hf_posttrain.commands.inference import InferenceModel
from hf_posttrain.data import chat
from hf_posttrain.errors import InputError
from hf_posttrain.models.config import ModelSection

RECIPE = """\
method: sft
model: {name_or_path: model}
data: {train: {path: rows.jsonl}}
train: {output_dir: out, max_steps: 1, per_device_train_batch_size: 2, use_cpu: true}
"""
LONGEST = 24
"""Tokens that a model which does not stop generates."""
TRAINED = [name for name, layout in LAYOUTS.items() if not layout.refused]
REFUSED = [name for name, layout in LAYOUTS.items() if layout.refused]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """Keep what is imported out of the collections of garbage that each trainer asks for."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return tmp_path


class Heard(logging.Handler):
    """Keep the messages of warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Yield a list of the warnings that this package and transformers log meanwhile."""
    heard = Heard()
    loggers = [logging.getLogger(name) for name in ("hf_posttrain", "transformers")]
    for logger in loggers:
        logger.addHandler(heard)
    tf.utils.logging.warning_once.cache_clear()  # or another layout may have heard it
    try:
        yield heard.said
    finally:
        for logger in loggers:
            logger.removeHandler(heard)


def rows_of(layout: Layout) -> SimpleNamespace:
    """Return rows of SFT and DPO, and the pairs (prompt, text of the answer) that SFT trains, in their order."""
    if layout.template is None:
        answers = [f" {answer}" for answer in ANSWERS]
        pairs = list(zip(QUESTIONS, answers, strict=True))
        sft = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
        dpo = {"prompt": QUESTIONS[1], "chosen": answers[1], "rejected": answers[0]}
        return SimpleNamespace(sft=sft, dpo=dpo, pairs=pairs)
    turns = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rejected = [{"role": "assistant", "content": ANSWERS[0]}]
    return SimpleNamespace(
        sft=[{"messages": turns}, {"messages": turns[2:]}],
        dpo={"prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected},
        pairs=[(turns[:1], ANSWERS[0]), (turns[:3], ANSWERS[1]), (turns[2:3], ANSWERS[1])],
    )


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def served(tokenizer, prompt, said):
    """Return the ids of a prompt, and those that a server generates after it."""
    asked = prompt_of(tokenizer, prompt)
    before = plain_ids(tokenizer, asked)
    whole = plain_ids(tokenizer, asked + said)
    assert whole[: len(before)] == before
    return before, whole[len(before) :]


def trained_runs(batch):
    """Return the ids of a batch that have a loss, in runs of consecutive ones."""
    targets = batch["shift_labels"].flatten().tolist()
    runs = itertools.groupby(targets, lambda target: target != -100)
    return [[*run] for trained, run in runs if trained]


def options(rows):
    return {
        "output_dir": "out", "max_steps": 1, "per_device_train_batch_size": rows, "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-4, "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip


# ---- the stages


def undeserved(layout, said):
    """Return the warnings that a layout should not have."""
    return [line for line in said if not any(part in line for part in layout.deserved)]


def check_commands(layout, capsys):
    """`data` and --check exit with 0 and give no warning but those that the layout deserves."""
    with hearing() as heard:
        code = run.main(["data", "rows.jsonl", "--model", "model"])
        assert code == 0, capsys.readouterr()
        capsys.readouterr()
        turns = ["train.train_on=assistant"] if layout.template else []
        code = run.main(["recipe.yaml", "--check", *turns])
    page = capsys.readouterr().out.splitlines()
    warned = [line for line in page if line.startswith("warning: ")]
    told = heard + [line for line in page if line.startswith("note: ")] + warned
    assert code == (1 if warned else 0), page
    assert undeserved(layout, told) == []
    assert all(any(part in line for line in told) for part in layout.deserved)


def check_sft(layout, rows):
    """Return a trainer that has taken a step; each answer is trained with the end of its turn, and nothing else is."""
    plain = tf.AutoTokenizer.from_pretrained("model")
    config = SFTConfig(assistant_only_loss=layout.template is not None, **options(2))
    trainer = SFTTrainer("model", config, train_dataset=datasets.Dataset.from_list(rows.sft))
    found = trained_runs(trainer.data_collator([trainer.train_dataset[n] for n in range(2)]))

    said = [layout.said] + [layout.last or layout.said] * (len(rows.pairs) - 1)
    wanted = [
        served(plain, prompt, form.format(answer))[1]
        for (prompt, answer), form in zip(rows.pairs, said, strict=True)
    ]  # fmt: skip
    assert found == wanted, [plain.convert_ids_to_tokens(ids) for ids in found]

    stops = {*plain.convert_tokens_to_ids(layout.stops.split())}
    assert {*trainer.terminal_ids} == stops
    assert found[-1][-1] in stops
    assert all(stops.isdisjoint(ids[:-1]) for ids in found)
    others = {plain.bos_token_id, plain.pad_token_id} - stops - {plain.unk_token_id}
    assert all(others.isdisjoint(ids) for ids in found)
    trainer.train()
    return trainer


def check_dpo(layout, rows):
    """The prompt is that of a server, and the answers end as in SFT; returns the trainer."""
    plain = tf.AutoTokenizer.from_pretrained("model")
    trainer = DPOTrainer("model", DPOConfig(**options(1)), train_dataset=datasets.Dataset.from_list([rows.dpo]))
    row = trainer.train_dataset[0]
    _, text = rows.pairs[1]
    form = layout.last or layout.said
    prompt, chosen = served(plain, rows.dpo["prompt"], form.format(text))
    adds = layout.bos_not_served or layout.template is None
    before = plain.convert_tokens_to_ids(layout.before.split()) if adds else []
    assert row["prompt_ids"] == before + prompt, plain.convert_ids_to_tokens(row["prompt_ids"])
    assert row["chosen_ids"] == chosen, plain.convert_ids_to_tokens(row["chosen_ids"])
    assert row["rejected_ids"] == served(plain, rows.dpo["prompt"], form.format(rows.pairs[0][1]))[1]
    return trainer


def questions(layout):
    """Two prompts of unequal lengths."""
    texts = [QUESTIONS[0], QUESTIONS[0] * 3]
    return [[{"role": "user", "content": text}] for text in texts] if layout.template else texts


def check_answers(layout):
    """Answers of a padded batch stop at the end of the turn, which is not in their text."""
    answerer = InferenceModel(ModelSection("model"))
    tokenizer = answerer.tokenizer
    prompts = chat.encode(tokenizer, [prompt_of(tokenizer, asked) for asked in questions(layout)])
    [first, second] = answerer.generate(prompts, LONGEST)
    assert first == second
    assert first[-1] == tokenizer.convert_tokens_to_ids(layout.end)
    assert answerer.text(first).strip().endswith(ANSWER), answerer.text(first)


def check_saved(layout, trainer, folder):
    """What is saved answers in the same way from another folder, with transformers alone."""
    trainer.save_model("out")
    (folder / "out").rename(folder / "moved")
    tokenizer = tf.AutoTokenizer.from_pretrained("moved")
    model = tf.AutoModelForCausalLM.from_pretrained("moved")
    before = tf.AutoTokenizer.from_pretrained("model")
    assert tokenizer.chat_template == before.chat_template
    for text in (layout.end, f" a {layout.end} b", *layout.special.split()):
        assert tokenizer(text)["input_ids"] == before(text)["input_ids"]
    prompt = torch.tensor([plain_ids(tokenizer, prompt_of(tokenizer, questions(layout)[0]))])
    with hearing() as heard:
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LONGEST, do_sample=False)
    assert heard == []
    answer = ids[0, prompt.shape[1] :].tolist()
    assert answer[-1] == tokenizer.convert_tokens_to_ids(layout.end)
    assert tokenizer.decode(answer, skip_special_tokens=True).strip().endswith(ANSWER)
    ends = model.generation_config.eos_token_id
    assert {*(ends if isinstance(ends, list) else [ends])} == {*trainer.terminal_ids}
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def write_files(layout, folder):
    write_layout(layout, folder / "model")
    rows = rows_of(layout)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows.sft)))
    return rows


@pytest.mark.parametrize("name", every_other(TRAINED))
def test_what_is_trained_is_what_a_server_generates(name, folder, capsys):
    layout = LAYOUTS[name]
    rows = write_files(layout, folder)
    check_commands(layout, capsys)
    with hearing() as heard:
        trainer = check_sft(layout, rows)
        check_dpo(layout, rows)
        check_answers(layout)
        check_saved(layout, trainer, folder)
    assert undeserved(layout, heard) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_dpo(name, folder):
    layout = LAYOUTS[name]
    trainer = check_dpo(layout, write_files(layout, folder))
    with hearing() as heard:
        trainer.train()
        check_saved(layout, trainer, folder)
    assert undeserved(layout, heard) == []


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_the_model_lacks_are_refused_in_one_line(name, folder, capsys):
    layout = LAYOUTS[name]
    rows = write_files(layout, folder)
    assert run.main(["recipe.yaml", "--check", "train.train_on=assistant"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert layout.refused in line
    with pytest.raises(InputError, match=layout.refused):
        SFTTrainer("model", SFTConfig(**options(2)), train_dataset=datasets.Dataset.from_list(rows.sft))
    with pytest.raises(InputError, match=layout.refused):
        InferenceModel(ModelSection("model"))


def test_forty_layouts():
    assert len(LAYOUTS) >= 40
    assert len({layout.imitates for layout in LAYOUTS.values()}) == len(LAYOUTS)
