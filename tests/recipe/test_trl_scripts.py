"""Scripts of TRL after their imports were changed: their command line, and what they pass to trainers."""

import json
import os

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import token_rows, trainer_for
from transformers import HfArgumentParser
from vision_for_tests import pictures, processor_of, seeing

import hf_posttrain
from hf_posttrain import (
    CPOConfig,
    DatasetMixtureConfig,
    DPOConfig,
    DPOTrainer,
    KDConfig,
    KDTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    OPDConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from hf_posttrain.data.column_inference import image_problem
from hf_posttrain.errors import InputError

SCRIPT = (ScriptArguments, SFTConfig, ModelConfig)


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer, saved."""
    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def options(tmp_path):
    """Options of any Config."""
    return {"output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none", "max_steps": 1}


# ---- the command line


def test_options_come_from_the_file_and_the_command_line_wins(tmp_path, monkeypatch):
    monkeypatch.delenv("OF_SCRIPT", raising=False)
    file = tmp_path / "run.yaml"
    content = {"env": {"OF_SCRIPT": 3}, "learning_rate": 0.5, "output_dir": str(tmp_path), "lora_r": 7}
    file.write_text(json.dumps(content))
    for given in (["--config", str(file)], [f"--config={file}"]):
        given += ["--lora_r", "9", "--use_cpu", "--dataset_name", "rows", "--no_remove_unused_columns"]
        script, training, model = TrlParser(SCRIPT).parse_args_and_config(given)
        assert (training.learning_rate, model.lora_r, script.dataset_name) == (0.5, 9, "rows")
        assert training.remove_unused_columns is False
        assert os.environ["OF_SCRIPT"] == "3"
    monkeypatch.delenv("OF_SCRIPT")


def test_the_file_turns_off_what_is_on_by_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\ndataset_name: rows\ndataloader_pin_memory: false\n")
    _, training, _ = TrlParser(SCRIPT).parse_args_and_config(["--config", str(file)])
    assert training.dataloader_pin_memory is False
    file.write_text(file.read_text().replace("pin_memory: false", "pin_memory: true"))
    line = ["--config", str(file), "--no_dataloader_pin_memory"]
    assert TrlParser(SCRIPT).parse_args_and_config(line)[1].dataloader_pin_memory is False


def test_unknown_keys_of_the_file_are_rejected_returned_or_logged(tmp_path, caplog):
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nlerning_rate: 1\n")
    given = ["--config", str(file), "--use_cpu"]
    with pytest.raises(InputError, match=r"lerning_rate is not an option of this script; did you mean 'learning_rate'"):
        TrlParser(SCRIPT).parse_args_and_config(given)
    *_, left = TrlParser(SCRIPT).parse_args_and_config([*given, "--other", "2"], return_remaining_strings=True)
    assert left == ["--lerning_rate", "1", "--other", "2"]
    with caplog.at_level("WARNING"):
        TrlParser(SCRIPT).parse_args_and_config(given, fail_with_unknown_args=False)
    assert "lerning_rate is not an option" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1", "must be a mapping of options"), ("env: 3", "env must be a mapping"), ("a: [", "run.yaml: "),
     (None, "No such file")],
)  # fmt: skip
def test_a_file_that_is_none_is_rejected(content, message, tmp_path):
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        TrlParser(SCRIPT).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, KTOConfig, CPOConfig, OPDConfig, KDConfig])
def test_every_config_is_parsed_next_to_the_dataclasses(config, tmp_path):
    parser = HfArgumentParser((ScriptArguments, config, ModelConfig))
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--no_remove_unused_columns", "--dtype", "bfloat16"]
    _, training, model = parser.parse_args_into_dataclasses(given)
    assert (training.no_remove_unused_columns, training.remove_unused_columns) == (True, False)
    assert model.dtype == "bfloat16"


def test_an_adapter_has_the_options_of_the_script():
    assert get_peft_config(ModelConfig()) is None
    given = ModelConfig(
        use_peft=True, lora_r=3, lora_alpha=5, lora_dropout=0.25, lora_target_modules=["all-linear"], use_rslora=True,
        lora_modules_to_save=["lm_head"], use_dora=True, lora_target_parameters=["experts.down_proj"],
    )  # fmt: skip
    found = get_peft_config(given)
    assert (found.r, found.lora_alpha, found.lora_dropout, found.target_modules) == (3, 5, 0.25, "all-linear")
    assert (found.use_rslora, found.use_dora, found.modules_to_save) == (True, True, ["lm_head"])
    assert found.target_parameters == ["experts.down_proj"]
    one = ModelConfig(use_peft=True, lora_target_modules=["q_proj"])
    assert get_peft_config(one).target_modules == {"q_proj"}


def test_quantization_has_the_options_of_the_script():
    assert get_quantization_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    four = ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True, bnb_4bit_quant_type="fp4")
    found = get_quantization_config(four)
    assert (found.load_in_4bit, found.bnb_4bit_quant_type) == (True, "fp4")
    assert found.bnb_4bit_compute_dtype == torch.bfloat16
    assert found.bnb_4bit_use_double_quant
    with pytest.raises(InputError, match="cannot be combined with load_in_4bit"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)
    assert torch.cuda.is_available() or get_kbit_device_map() is None


def test_a_mixture_is_concatenated_and_split(tmp_path):
    for name in ("a", "b"):
        rows = datasets.Dataset.from_list([{"text": f"{name}{n}", "other": n} for n in range(4)])
        rows.to_json(tmp_path / f"{name}.jsonl")
    listed = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl"), "columns": ["text"]} for name in "ab"]
    (tmp_path / "run.yaml").write_text(json.dumps({"datasets": listed}))
    [mixture] = TrlParser((DatasetMixtureConfig,)).parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    found = get_dataset(mixture)
    assert found["train"]["text"] == [f"{name}{n}" for name in "ab" for n in range(4)]
    assert found["train"].column_names == ["text"]
    split = get_dataset(DatasetMixtureConfig(datasets=listed, test_split_size=0.25))
    assert {name: len(part) for name, part in split.items()} == {"train": 6, "test": 2}
    stream = get_dataset(DatasetMixtureConfig(datasets=listed, streaming=True))
    assert next(iter(stream["train"])) == {"text": "a0"}


def test_the_datasets_of_a_mixture_may_have_shares(tmp_path):
    """The first rows of each, as in TRL; no dataset gives more than it has."""
    for name, count in (("a", 4), ("b", 12)):
        datasets.Dataset.from_list([{"text": f"{name}{n}"} for n in range(count)]).to_json(tmp_path / f"{name}.jsonl")
    listed = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in "ab"]

    def found(*fractions, **options):
        shared = [one | {"fraction": share} for one, share in zip(listed, fractions, strict=True)]
        return get_dataset(DatasetMixtureConfig(datasets=shared, **options))["train"]["text"]

    assert found(1, 1) == [f"{name}{n}" for name in "ab" for n in range(4)]
    assert found(0.2, 0.4) == [*(f"a{n}" for n in range(4)), *(f"b{n}" for n in range(8))]
    assert found(0, 1.0) == [f"b{n}" for n in range(12)]
    for fractions, options, message in (
        ((0.5, None), {}, "some have none"), ((1, 1), {"streaming": True}, "cannot be combined with streaming"),
        ((-1, 2), {}, "must be positive"), ((0, 0), {}, "must be positive"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            found(*fractions, **options)


def test_a_mixture_that_cannot_be_made_is_rejected():
    with pytest.raises(InputError, match="must not be empty"):
        get_dataset(DatasetMixtureConfig())
    with pytest.raises(InputError, match="must be a mapping with `path`"):
        DatasetMixtureConfig(datasets=["rows"])
    with pytest.raises(InputError, match="rows cannot have 'splitt'; did you mean 'split'"):
        DatasetMixtureConfig(datasets=[{"path": "rows", "splitt": "x"}])
    with pytest.raises(InputError, match="cannot be combined with streaming"):
        get_dataset(DatasetMixtureConfig(datasets=[{"path": "x"}], streaming=True, test_split_size=0.1))


@pytest.mark.parametrize("name", ["ORPOConfig", "ORPOTrainer"])
def test_orpo_says_which_loss_to_name(name):
    with pytest.raises(ImportError, match=r"DPOConfig\(loss_type='orpo'\).* without it DPO trains sigmoid"):
        getattr(hf_posttrain, name)


@pytest.mark.parametrize("name", ["GKDConfig", "GKDTrainer", "LogCompletionsCallback"])
def test_other_names_of_scripts_get_an_answer(name):
    with pytest.raises(ImportError, match=f"hf_posttrain has no {name}: (use|remove)"):
        getattr(hf_posttrain, name)


# ---- what scripts pass to trainers


def test_model_init_kwargs_of_a_script_are_those_of_the_config_too(folder, options):
    args = SFTConfig(**options)
    script = {"revision": "main", "trust_remote_code": False, "attn_implementation": None, "dtype": "float32"}
    args.model_init_kwargs = script | {"use_cache": False, "quantization_config": None}
    trainer = SFTTrainer(folder, args, train_dataset=token_rows("sft"), quantization_config=None)
    assert trainer.model.config.use_cache is False
    assert trainer.model.dtype == torch.float32
    args.model_init_kwargs = {"revision": "v2"}
    with pytest.raises(InputError, match=r"model_init_kwargs: revision='v2' cannot be loaded by name. Download it"):
        SFTTrainer(folder, args, train_dataset=token_rows("sft"))


@pytest.mark.parametrize(
    ("trainer", "config", "method"), [(KTOTrainer, KTOConfig, "kto"), (DPOTrainer, DPOConfig, "dpo")]
)
def test_the_reference_may_be_the_second_argument(trainer, config, method, options):
    reference, rows = tiny_model(seed=3), token_rows(method)
    given = {"args": config(**options), "train_dataset": rows, "processing_class": byte_tokenizer()}
    built = trainer(tiny_model(), reference, **given)
    assert built.ref_model is reference
    assert trainer(tiny_model(), None, **given).ref_model is not reference
    with pytest.raises(InputError, match="Name all arguments after the model"):
        trainer(tiny_model(), reference, None, **given)
    with pytest.raises(InputError, match="Name all arguments after the model"):
        trainer(tiny_model(), reference, ref_model=reference, **given)


def test_the_teacher_may_be_the_second_argument(options):
    teacher = tiny_model(seed=3)
    given = {"train_dataset": token_rows("kd"), "processing_class": byte_tokenizer()}
    assert KDTrainer(tiny_model(), teacher, args=KDConfig(**options), **given).teacher_model is teacher
    with pytest.raises(InputError, match="SFTTrainer: the second positional argument is args, which is also a keyword"):
        SFTTrainer(tiny_model(), teacher, args=SFTConfig(**options), train_dataset=token_rows("sft"))


def test_options_of_the_teacher_are_read(folder, options):
    given = {"train_dataset": token_rows("kd"), "processing_class": byte_tokenizer()}
    args = KDConfig(**options, teacher_model_name_or_path=folder, teacher_model_revision="main")
    args.teacher_model_init_kwargs = {"dtype": "bfloat16", "attn_implementation": "eager", "revision": None}
    for teacher in ({}, {"teacher_model": folder}):
        trainer = KDTrainer(tiny_model(), args=args, **teacher, **given)
        assert trainer.teacher_model.dtype == torch.bfloat16
        assert trainer.teacher_model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match=r"the trainer is given another teacher_model\. Remove one of the two"):
        KDTrainer(tiny_model(), args=args, teacher_model=tiny_model(seed=3), **given)
    args = KDConfig(**options, teacher_model_init_kwargs={"dtype": "bfloat16"})
    with pytest.raises(InputError, match="is only valid with a teacher that is given by name"):
        KDTrainer(tiny_model(), args=args, teacher_model=tiny_model(seed=3), **given)
    with pytest.raises(InputError, match="teacher_model_revision='v2' cannot be loaded by name"):
        KDConfig(**options, teacher_model_revision="v2")


@pytest.mark.parametrize("streamed", ["train", "eval", "one of eval"])
def test_references_of_streams_are_not_scored_beforehand(streamed, tmp_path):
    rows = token_rows("dpo")
    stream = rows.to_iterable_dataset()
    train = stream if streamed == "train" else rows
    evaluated = {"train": None, "eval": stream, "one of eval": {"a": rows, "b": stream}}[streamed]
    config = {"max_steps": 5, "precompute_ref_log_probs": None}  # 5 steps of 4 rows are more than a pass over 8
    trainer = trainer_for("dpo", tiny_model(), train, tmp_path, eval_rows=evaluated, **config)
    assert trainer.ref_model is not None
    trainer.train()
    assert trainer.state.global_step == 5
    assert evaluated is None or trainer.evaluate()
    with pytest.raises(InputError, match="precompute_ref_log_probs cannot be combined with a stream of rows"):
        trainer_for("dpo", tiny_model(), train, tmp_path, eval_rows=evaluated, precompute_ref_log_probs=True)


@pytest.mark.parametrize("kind", ["rows", "stream", "list"])
def test_a_formatting_function_makes_the_text(kind, options):
    rows = datasets.Dataset.from_list([{"question": f"What is {n}?", "answer": str(n)} for n in range(4)])
    given = {"rows": rows, "stream": rows.to_iterable_dataset(), "list": [*rows]}[kind]
    written = lambda row: f"{row['question']} {row['answer']}"  # noqa: E731
    shared = {"args": SFTConfig(**options), "processing_class": byte_tokenizer()}
    plain = SFTTrainer(tiny_model(), train_dataset=[{"text": written(row)} for row in rows], **shared)
    trainer = SFTTrainer(tiny_model(), train_dataset=given, eval_dataset={"a": rows}, formatting_func=written, **shared)
    expected = [row["completion_ids"] for row in plain.train_dataset]
    assert [row["completion_ids"] for row in trainer.train_dataset] == expected
    assert [row["completion_ids"] for row in trainer.eval_dataset["a"]] == expected
    with pytest.raises(InputError, match="formatting_func must return a string for each row, not a list"):
        SFTTrainer(tiny_model(), train_dataset=[*rows], formatting_func=lambda row: ["a"], **shared)
    with pytest.raises(InputError, match="formatting_func requires datasets that are passed by name"):
        SFTTrainer(tiny_model(), shared["args"], None, rows, formatting_func=written)


def test_a_model_and_its_card_have_tags(options, tmp_path):
    given = {"args": CPOConfig(**options), "train_dataset": token_rows("cpo"), "processing_class": byte_tokenizer()}
    trainer = hf_posttrain.CPOTrainer(tiny_model(), **given)
    assert {"hf_posttrain", "cpo"} <= {*trainer.model.model_tags}
    for tags, expected in ((None, ["hf_posttrain", "cpo"]), ("mine", ["mine", "hf_posttrain", "cpo"])):
        trainer.create_model_card(model_name="model", tags=tags)
        card = (tmp_path / "out" / "README.md").read_text()
        assert all(f"- {tag}\n" in card for tag in expected)


# ---- vision-language models


def with_images(column):
    """Two rows with an image, in a column or as a part of a content."""
    rows = []
    for path in pictures():
        image = {"type": "image"} if column else {"type": "image", "path": str(path)}
        parts = [image, {"type": "text", "text": "What is it?"}]
        row = {"prompt": [{"role": "user", "content": parts}], "completion": [{"role": "assistant", "content": "It."}]}
        rows.append(row | ({"images": [str(path)]} if column else {}))
    return rows


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_rows_with_images_bring_the_processor(kind, by_name, column, options, tmp_path):
    """The config of either kind is one of causal LMs too: its architecture says that it has a vision encoder."""
    model, folder = seeing(kind)[0], str(tmp_path / "model")
    model.save_pretrained(folder)
    processor_of(kind).save_pretrained(folder)
    model.config._name_or_path = folder
    given = folder if by_name else model
    trainer = SFTTrainer(given, SFTConfig(**options), train_dataset=with_images(column))
    assert trainer.data_collator.vision_inputs
    assert type(trainer.model) is type(model)
    trainer.train()
    trainer = SFTTrainer(given, SFTConfig(**options), train_dataset=[{"text": "no image"}] * 2)
    assert trainer.data_collator.vision_inputs is None


def test_rows_with_images_for_a_text_model_say_that_it_cannot():
    problem = image_problem([{"images": ["a.png"]}], {"images"})
    assert "a text model cannot" in problem
