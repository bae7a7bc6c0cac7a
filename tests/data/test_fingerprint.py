"""The cache of prepared rows: which changes make other rows, and what its fingerprint costs."""

from types import SimpleNamespace

import datasets
import pytest
from datasets.fingerprint import Hasher
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers_for_tests import QWEN3, byte_tokenizer, gpt2_tokenizer
from transformers import AutoTokenizer
from vision_for_tests import processor_of

from hf_posttrain.data.fingerprint import tokenizer_state
from hf_posttrain.data.images import attach_image_reader, get_image_reader
from hf_posttrain.data.prepare import null_filled_columns, tokenize_dataset
from hf_posttrain.methods import METHODS
from hf_posttrain.teachers.options import TEACHER

ROWS = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4"}])


def prepared(tokenizer=None, rows=ROWS, **options):
    """The fingerprint of prepared rows."""
    if "teacher" in options:
        options["teacher"] = TEACHER.build("teacher", options["teacher"])
    config = SimpleNamespace(**options)
    return tokenize_dataset(rows, METHODS["kd"], tokenizer or byte_tokenizer(), config)._fingerprint


def with_token(tokenizer):
    tokenizer.add_tokens(["<new>"])
    return tokenizer


def with_bos(tokenizer):
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


CHANGES = {
    "template": lambda folder: prepared(byte_tokenizer(QWEN3)),
    "added token": lambda folder: prepared(with_token(byte_tokenizer())),
    "BOS": lambda folder: prepared(with_bos(byte_tokenizer())),
    "tokenizer": lambda folder: prepared(gpt2_tokenizer()),
    "option": lambda folder: prepared(max_length=7),
    "row": lambda folder: prepared(rows=datasets.Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 5"}])),
    "teacher's tokenizer": lambda folder: prepared(teacher={"tokenizer": saved(gpt2_tokenizer(), folder / "one")}),
    "teacher's token": lambda folder: prepared(
        teacher={"tokenizer": saved(with_token(gpt2_tokenizer()), folder / "two")}
    ),
}


def saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_each_change_makes_other_rows(tmp_path):
    found = [prepared(), *(change(tmp_path) for change in CHANGES.values())]
    assert len({*found}) == len(found)


def test_a_tokenizer_that_was_used_is_the_same(caplog):
    tokenizer = byte_tokenizer()
    before = Hasher.hash(tokenizer_state(tokenizer))
    tokenizer.model_max_length, length = 4, tokenizer.model_max_length
    tokenizer("longer than the model takes")  # which is warned of once
    tokenizer.model_max_length = length
    tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert "longer than the specified maximum" in caplog.text
    again = [Hasher.hash(tokenizer_state(each)) for each in (tokenizer, byte_tokenizer())]
    assert again == [before, before]


class Vocabulary:
    """Of a tokenizer: it must not be pickled."""

    def __reduce__(self):
        raise AssertionError("a vocabulary is pickled")


def with_vocabulary(tokenizer):
    tokenizer._vocab = Vocabulary()
    return tokenizer


def test_no_vocabulary_is_pickled(monkeypatch):
    """The pickle of `datasets` is in Python: 9 seconds for a tokenizer of 262,144 tokens, whose JSON takes one."""
    tokenizer = with_vocabulary(byte_tokenizer())
    with pytest.raises(AssertionError, match="is pickled"):
        Hasher.hash(tokenizer)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: with_vocabulary(gpt2_tokenizer()))
    assert prepared(tokenizer) != prepared(tokenizer, teacher={"tokenizer": "another"})


def test_what_a_processor_makes_of_an_image_is_part_of_it():
    tokenizer = attach_image_reader(processor_of("qwen3_vl"))
    keys = [Hasher.hash(tokenizer_state(tokenizer))]
    assert keys == [Hasher.hash(tokenizer_state(attach_image_reader(processor_of("qwen3_vl"))))]
    reader = get_image_reader(tokenizer)
    reader.processor.image_token = "<other>"  # an attribute that its config does not have
    keys.append(Hasher.hash(tokenizer_state(tokenizer)))
    reader.processor.image_processor.size = {"shortest_edge": 4, "longest_edge": 8}
    keys.append(Hasher.hash(tokenizer_state(tokenizer)))
    assert len({*keys}) == 3


def test_a_tokenizer_with_a_part_of_the_users_own_is_prepared():
    class Whole:
        def pre_tokenize(self, text):
            pass

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())
    with pytest.raises(Exception, match="cannot be serialized"):
        tokenizer_state(tokenizer)
    assert prepared(tokenizer)


def test_methods_and_data_sets_with_the_same_columns_use_the_same_rows():
    tokenizer = byte_tokenizer()
    config = SimpleNamespace(max_length=64, seed=1, per_device_train_batch_size=2)
    other = SimpleNamespace(max_length=64, seed=2, per_device_train_batch_size=8)
    first = tokenize_dataset(ROWS, METHODS["sft"], tokenizer, config, "train")
    assert tokenize_dataset(ROWS, METHODS["kd"], tokenizer, other, "eval")._fingerprint == first._fingerprint
    pairs = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}])
    of_pairs = [tokenize_dataset(pairs, METHODS[name], tokenizer, config)._fingerprint for name in ("dpo", "cpo", "rm")]
    assert of_pairs[0] == of_pairs[1] != of_pairs[2]  # rows of RM have a margin


def test_columns_that_arrow_has_filled_are_those_with_nulls_or_json_inside():
    turn = {"role": "user", "content": "1"}
    weighted = turn | {"weight": 1}
    of_json = datasets.Features({"m": datasets.List({"role": datasets.Value("string"), "x": datasets.Json()})})
    columns = {
        "complete": datasets.Dataset.from_dict({"m": [[turn], [turn, turn]]}),
        "filled": datasets.Dataset.from_dict({"m": [[turn], [weighted]]}),
        "deep": datasets.Dataset.from_dict({"m": [[turn | {"f": {"a": 1}}], [turn | {"f": {"b": 1}}]]}),
        "missing": datasets.Dataset.from_dict({"m": [[turn], None]}),
        "json": datasets.Dataset.from_dict({"m": [[{"role": "user", "x": {"a": None}}]]}, features=of_json),
        "text": datasets.Dataset.from_dict({"m": ["a", None]}),
    }
    found = {name: null_filled_columns(rows) for name, rows in columns.items()}
    assert found == {name: ["m"] if name in ("filled", "deep", "missing", "json") else [] for name in columns}
    assert null_filled_columns(columns["complete"].to_iterable_dataset()) == ["m"]
