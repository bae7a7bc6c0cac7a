"""Data: sources, every format for every method, truncation, counts, caching, and one clear error per bad row.

`byte_tokenizer` makes one token per byte, so rows are compared as text and lengths can be counted by eye.
"""

import gzip
import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import tokenizers_for_tests as tok
from rows_for_tests import methods_of, raw_row
from tokenizers import Tokenizer, models, pre_tokenizers
from training_for_tests import names_where
from transformers import ByT5Tokenizer, GPT2Config, PreTrainedTokenizerFast

from hf_posttrain import OPDConfig
from hf_posttrain.data import prepare as prepare_module
from hf_posttrain.data.column_inference import misspelled_columns
from hf_posttrain.data.encode import VERSION, Plan
from hf_posttrain.data.formats import detect_format, read_format, unread_columns
from hf_posttrain.data.lengths import warn_if_too_long
from hf_posttrain.data.packing import pack
from hf_posttrain.data.prepare import collect_notes, columns_read
from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.methods.kto_pairing import find_partners
from hf_posttrain.methods.sft import supervised_examples
from hf_posttrain.scoring.layouts import Collator

USER, REPLY = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MORE, LAST = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}
WRONG = {"role": "assistant", "content": "5"}
TEXT_PART = {"type": "text", "text": "four"}
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
GOOD = {"prompt": "q", "completion": "a"}


def source(path, **options):
    defaults = {"name": None, "split": "train", "columns": None, "limit": None, "weight": 1.0, "streaming": False}
    return SimpleNamespace(path=str(path), **(defaults | options))


def config(**options):
    defaults = {"max_length": None, "dataset_num_proc": None, "chat_template_kwargs": None}
    return SimpleNamespace(**(defaults | options))


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(rows, method, tokenizer=None, name="train", **options):
    rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    return prepare_module.prepare(rows, METHODS[method], tokenizer or tok.byte_tokenizer(), config(**options), name)


def texts(rows, method, tokenizer=None, **options) -> list[tuple]:
    """Prepared rows without `index`, ids decoded; a mask becomes the text of its ones."""
    tokenizer = tokenizer or tok.byte_tokenizer()
    out = []
    for row in prepare(rows, method, tokenizer, **options):
        row.pop("index", None), row.pop("prompt_key", None)
        mask = row.pop("completion_mask", None)
        ones = [i for i, m in zip(row["completion_ids"], mask, strict=True) if m] if mask else None
        values = [tokenizer.decode(v) if isinstance(v, list) else v for v in row.values()]
        out.append((*values, *([] if ones is None else [tokenizer.decode(ones)])))
    return out


# ---- formats


@pytest.mark.parametrize("method", METHODS)
def test_columns_are_exactly_those_of_the_kind(method):
    kind = METHODS[method].rows
    columns = {
        SUPERVISED: ["prompt_ids", "completion_ids", "completion_mask", "index"],
        PREFERENCE: ["prompt_ids", "chosen_ids", "rejected_ids", "index"],
        REWARD_PAIRS: ["prompt_ids", "chosen_ids", "rejected_ids", "margin", "index"],
        UNPAIRED: ["prompt_ids", "completion_ids", "label", "prompt_key", "index"],
        PROMPTS: ["prompt_ids", "completion_ids", "index"],
    }
    assert prepare([{**raw_row(kind), "extra": 1}], method).column_names == columns[kind]


def test_ids_end_with_the_end():
    assert prepare([{"prompt": "q", "completion": "a"}], "sft")[0] == {
        "prompt_ids": [ord("q")], "completion_ids": [ord("a"), 258], "completion_mask": [1, 1], "index": 0
    }  # fmt: skip


SFT_ROWS = [
    ({"text": "abc"}, {}, ("a", "bc" + END, "bc" + END)),
    ({"prompt": "2+2=", "completion": "4"}, {}, ("2+2=", "4" + END, "4" + END)),
    ({"prompt": "", "completion": "abc"}, {}, ("a", "bc" + END, "bc" + END)),
    ({"prompt": "xy", "completion": "z"}, {"completion_only_loss": False}, ("x", "yz" + END, "yz" + END)),
    ({"prompt": [USER], "completion": [REPLY]}, {}, (ASKED, "4" + END, "4" + END)),
    ({"prompt": [USER, REPLY, MORE], "completion": [LAST]}, {}, (ASKED + "4" + END + "\n" + AGAIN, *["6" + END] * 2)),
    (
        {"messages": [USER, REPLY]},
        {},
        ("<|im_start|>", *[ASKED.removeprefix("<|im_start|>") + "4" + END] * 2),
    ),
    (
        {"messages": [USER, REPLY, MORE, LAST]},
        {"assistant_only_loss": True},
        (ASKED, "4" + END + "\n" + AGAIN + "6" + END, "4" + END + "6" + END),
    ),
    (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"assistant_only_loss": True},
        (ASKED, "4" + END, "4" + END),
    ),
    (  # of a completion with a tool's turn, only what the assistant wrote
        {"prompt": [USER], "completion": [REPLY, {"role": "tool", "content": "no"}, LAST]},
        {"assistant_only_loss": True},
        (ASKED, f"4{END}\n<|im_start|>tool\nno{END}\n<|im_start|>assistant\n6{END}", f"4{END}6{END}"),
    ),
    (  # the prompt's own assistant turn is context, unless completion_only_loss is False
        {"prompt": [USER, REPLY, MORE], "completion": [LAST]},
        {"assistant_only_loss": True},
        (ASKED + "4" + END + "\n" + AGAIN, "6" + END, "6" + END),
    ),
]


@pytest.mark.parametrize("method", methods_of(SUPERVISED))
@pytest.mark.parametrize(("row", "options", "expected"), SFT_ROWS)
def test_supervised_formats(row, options, expected, method):
    assert texts([row], method, **options) == [expected]


def test_text_field_and_system_turn_and_tools():
    assert texts([{"body": "abc"}], "sft", dataset_text_field="body")[0][0] == "a"
    system = {"role": "system", "content": "Short."}
    tools = json.dumps([{"name": "add"}])
    prompt, *_ = texts([{"prompt": [system, USER], "completion": [REPLY], "tools": tools}], "sft")[0]
    assert prompt == f'<|im_start|>system\nTools: [{{"name": "add"}}]{END}\n<|im_start|>system\nShort.{END}\n{ASKED}'
    rows = [{"messages": [USER, REPLY], "tools": None}, {"messages": [USER, REPLY], "tools": [{"name": "f"}]}]
    plain, with_tools = texts(rows, "sft", assistant_only_loss=True)
    assert plain[0] == ASKED
    assert with_tools[0] == f'<|im_start|>system\nTools: [{{"name": "f"}}]{END}\n{ASKED}'


PAIRS = [
    ({"prompt": "q:", "chosen": "yes", "rejected": "no"}, ("q:", "yes" + END, "no" + END)),
    ({"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]}, (ASKED, "4" + END, "5" + END)),
    ({"chosen": [USER, REPLY], "rejected": [USER, WRONG]}, (ASKED, "4" + END, "5" + END)),
    ({"prompt": "2+2?", "chosen": [USER, REPLY], "rejected": [USER, WRONG]}, (ASKED, "4" + END, "5" + END)),
    ({"chosen": "Human: hi\nBot: a cat", "rejected": "Human: hi\nBot: a cow"},
     ("Human: hi\nBot: a", " cat" + END, " cow" + END)),
    ({"chosen": "Q\nyes", "rejected": "Q\nno"}, ("Q\n", "yes" + END, "no" + END)),
    ({"chosen": "say it", "rejected": "say it twice"}, ("say", " it" + END, " it twice" + END)),
    ({"instruction": "Add", "input": "2, 2", "chosen": "4", "rejected": "5"}, ("Add\n2, 2", "4" + END, "5" + END)),
    ({"messages": [USER], "chosen": REPLY, "rejected": WRONG}, (ASKED, "4" + END, "5" + END)),
    ({"messages": [USER], "chosen": "4", "rejected": "5"}, (ASKED, "4" + END, "5" + END)),
    ({"messages": [USER], "chosen": [USER, REPLY], "rejected": [USER, WRONG]}, (ASKED, "4" + END, "5" + END)),
    ({"conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4"},
      "rejected": {"from": "gpt", "value": "5"}}, (ASKED, "4" + END, "5" + END)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), PAIRS)
def test_pairs_feed_methods_of_pairs_and_of_labels(row, expected):
    for method in methods_of(PREFERENCE):
        assert texts([row], method) == [expected]
    prompt, chosen, rejected = expected
    for method in methods_of(UNPAIRED):
        assert texts([row], method) == [(prompt, chosen, True), (prompt, rejected, False)]
        assert prepare([row, row], method)["index"][:] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", methods_of(UNPAIRED))
def test_unpaired_labels(method):
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False)]
    assert texts(rows, method) == [("q", "a" + END, True), ("q", "a" + END, False)]
    of_turns = [(ASKED, "4" + END, True), (ASKED, "4" + END, False)]
    rows = [{"prompt": [USER], "completion": [REPLY], "label": label} for label in (1, 0)]
    assert texts(rows, method) == of_turns
    assert texts([{"messages": [USER, REPLY], "label": label} for label in (1, 0)], method) == of_turns
    assert texts([{"messages": [USER, REPLY], "kto_tag": tag} for tag in (True, False)], method) == of_turns
    row = {"instruction": "q", "input": "", "output": "a", "kto_tag": True}
    assert texts([row], method) == [("q", "a" + END, True)]
    with pytest.raises(InputError, match="row 0: column 'messages': the last turn must be an assistant turn"):
        prepare([{"messages": [USER], "label": True}], method)


def test_alpacas_columns_are_a_prompt_and_its_answer():
    row = {"instruction": "Add", "input": "2, 2", "output": "4"}
    assert texts([row], "sft") == [("Add\n2, 2", "4" + END, "4" + END)]
    assert texts([{**row, "input": None}], "sft")[0][0] == "Add"
    asked = ASKED.replace("2+2?", "Add\n2, 2")
    assert texts([row], "sft", apply_chat_template=True)[0][0] == asked
    with_system = texts([{**row, "system": "Be short."}], "opd", apply_chat_template=True)[0][0]
    assert with_system == f"<|im_start|>system\nBe short.{END}\n{asked}"
    with pytest.raises(
        InputError, match=r"column 'history' seems to be a part of the prompt, but instruction \+ output"
    ):
        prepare([{**row, "history": [["1+1?", "2"]]}], "sft")


def test_messages_that_end_with_an_answer_are_no_prompt_of_two_others():
    with pytest.raises(InputError, match="'messages': the last turn cannot be an assistant turn, since 'chosen' and"):
        prepare([{"messages": [USER, REPLY], "chosen": REPLY, "rejected": WRONG}], "dpo")


@pytest.mark.parametrize("method", methods_of(PROMPTS))
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q"}, ("q", "")),
        ({"prompt": "q", "completion": "a"}, ("q", "a" + END)),
        ({"prompt": [USER]}, (ASKED, "")),
        ({"messages": [USER, REPLY, MORE, LAST]}, (ASKED + "4" + END + "\n" + AGAIN, "6" + END)),
        ({"messages": [USER, REPLY, MORE]}, (ASKED + "4" + END + "\n" + AGAIN, "")),
        ({"prompt": "2+2?", "messages": [USER, REPLY]}, (ASKED, "4" + END)),  # as for other methods
        ({"prompt_ids": [113]}, ("q", "")),
    ],
)
def test_formats_of_prompts(row, expected, method):
    assert texts([row], method) == [expected]


def test_completions_may_begin_late_and_in_another_batch():
    rows = [{"messages": [USER]}] * 1000 + [{"messages": [USER, REPLY]}]
    out = prepare(rows, "opd")
    assert (out[0]["completion_ids"], out[1000]["completion_ids"]) == ([], [ord("4"), 258])


def test_tokenised_columns_pass_through():
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [0, 1]}
    labelled = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
    split = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_mask": [1], "index": 0}
    for method in methods_of(SUPERVISED):
        assert prepare([row], method)[0] == {**row, "index": 0}
        assert prepare([labelled], method)[0] == split
        for name in ("completion_mask", "assistant_masks"):
            masked = {"input_ids": [1, 2, 3], name: [0, 0, 1], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]}
            assert prepare([masked], method)[0] == split
            assert prepare([{**masked, "labels": [1, 2, 3]}], method)[0] == split
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    for method in methods_of(PREFERENCE):
        assert prepare([pair], method)[0] == {**pair, "index": 0}
    single = {"prompt_ids": [1], "completion_ids": [2], "label": False}
    key = 17595444997414146897 - 2**63  # xxh64 of the bytes 01 00 00 00
    for method in methods_of(UNPAIRED):
        assert prepare([single], method)[0] == {**single, "prompt_key": key, "index": 0}


@pytest.mark.parametrize("method", METHODS)
def test_prepared_rows_pass_through(method, caplog):
    prepared = prepare([raw_row(METHODS[method].rows)] * 3, method)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        assert prepare(prepared, method, max_length=64) is prepared
        assert not caplog.messages
        assert len(prepare(prepared.remove_columns("index"), method)) == len(prepared)  # a user's own are looked at
        assert caplog.messages == [f"train: {len(prepared)} rows read, 0 truncated (max_length None), 0 dropped"]


def test_a_users_tokenised_rows_are_checked():
    with pytest.raises(InputError, match="row 0: column 'completion_mask': expected 1 values"):
        prepare([{"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1, 1]}], "sft")


def test_partner_has_another_prompt_even_where_truncation_cut_one_prompt_differently():
    rows = [{"prompt": "p" * 30, "completion": "c" * n, "label": True} for n in (2, 4, 6)]
    rows += [{"prompt": "q" * 30, "completion": "c" * n, "label": False} for n in (2, 4, 6)]
    out = prepare(rows, "kto", max_length=12)
    assert [len(ids) for ids in out["prompt_ids"]] == [9, 7, 6] * 2  # so the ids alone would be six prompts
    assert len(set(out["prompt_key"])) == 2
    for seed in range(20):
        assert all((partner < 3) != (row < 3) for row, partner in enumerate(find_partners(out, seed)))


def test_plain_strings_never_see_the_template():
    assert texts([{"prompt": "q", "completion": "a"}], "sft", tok.bos_tokenizer()) == [("<s>q", "a</s>", "a</s>")]


# ---- pains


def test_truncation_never_removes_the_whole_target():
    rows = [{"prompt": "p" * 50, "completion": "c" * n} for n in (3, 9, 50)]
    # 10 tokens: "ccc" + end leaves 6 of the prompt; half of the ten are the prompt's, however long the completion is
    expected = [("pppppp", "ccc" + END), ("ppppp", "ccccc"), ("ppppp", "ccccc")]
    assert [row[:2] for row in texts(rows, "sft", max_length=10)] == expected
    assert texts([{"text": "abcdef"}], "sft", max_length=4) == [("a", "bcd", "bcd")]


def test_an_answer_that_is_too_long_leaves_the_prompt_whole():
    """And one that is too long for its pair does not cut the prompt of the other."""
    long = "very " * 50
    assert texts([{"prompt": "2+2? ", "completion": long}], "sft", max_length=20)[0][:2] == ("2+2? ", long[:15])
    pair = [{"prompt": "2+2? ", "chosen": "four", "rejected": long}]
    assert texts(pair, "dpo", max_length=20) == [("2+2? ", "four" + END, long[:15])]
    chat = [USER, REPLY, {"role": "user", "content": "x" * 100}, LAST]
    cut = texts([{"messages": chat}], "sft", assistant_only_loss=True, max_length=80)[0]
    assert (cut[0], cut[2]) == (ASKED, "4" + END)  # the conversation loses its end, not what was asked first


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_is_cut_keeps_its_bos(method):
    row = raw_row(METHODS[method].rows, "0123456789", "a", "b")
    options = {"max_completion_length": 3} if METHODS[method].rows.sampled else {}
    kind = METHODS[method].rows
    for made in prepare([row], method, tok.bos_tokenizer(), max_length=8, **options):
        size = 5 if kind.sampled else 8 - max(len(made[name]) for name in kind.answers)
        assert made["prompt_ids"] == [256, *b"0123456789"[-size + 1 :]]
    assert prepare([row], method, tok.bos_tokenizer(), max_length=2 + len(options), **options)[0]["prompt_ids"] != [256]


def test_rows_without_target_are_dropped_and_counted(caplog):
    long = {"role": "user", "content": "x" * 300}
    rows = [{"messages": [USER, REPLY, long, LAST]}, {"messages": [USER, REPLY]}]
    kept = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [1, 1]}
    lost = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [0, 0, 1]}
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        out = prepare([kept, lost, kept, lost], "sft", max_length=3, name="mine")
    assert caplog.messages == [
        "mine: 4 rows read, 2 truncated (max_length 3), 2 dropped (no trained token left; first rows 1, 3)"
    ]
    assert out["index"][:] == [0, 1]
    assert [row["completion_mask"] for row in out] == [[1, 1]] * 2
    with pytest.raises(InputError, match="Increase max_length"):
        prepare([lost], "sft", max_length=3)
    assert [row[2] for row in texts(rows, "sft", assistant_only_loss=True, max_length=60)] == ["4" + END] * 2


BLANK = {"role": "assistant", "content": " "}


@pytest.mark.parametrize(
    ("method", "good", "empty", "options"),
    [
        *((method, raw_row(METHODS[method].rows), raw_row(METHODS[method].rows, answer=" "), {})
          for method in methods_of(SUPERVISED, PREFERENCE, UNPAIRED)),
        ("opd", GOOD, {**GOOD, "completion": ""}, {}),
        ("sft", {"text": "abc"}, {"text": " \n"}, {}),
        ("sft", {"text": "abc"}, {"text": END}, {}),
        ("sft", {"messages": [USER, REPLY]}, {"messages": [USER, BLANK]}, {}),
        ("sft", {"messages": [USER, REPLY]}, {"messages": [USER, BLANK]}, {"assistant_only_loss": True}),
        ("sft", {"prompt": [USER], "completion": [REPLY]}, {"prompt": [USER], "completion": [BLANK]}, {}),
        ("dpo", {"chosen": "Q a", "rejected": "Q b"}, {"chosen": "Q a", "rejected": ""}, {}),
        ("dpo", {"prompt": "2+2?", "chosen": [USER, REPLY], "rejected": [USER, WRONG]},
         {"prompt": "2+2?", "chosen": [USER, REPLY], "rejected": [USER, BLANK]}, {}),
        ("kto", {"messages": [USER, REPLY], "label": True}, {"messages": [USER, BLANK], "label": False}, {}),
    ],
)  # fmt: skip
def test_rows_with_an_empty_answer_are_dropped_and_counted(method, good, empty, options, caplog):
    with caplog.at_level(logging.WARNING, "hf_posttrain.data"):
        out = prepare([good, empty, good], method, **options)
    assert out[:] == prepare([good, good], method, **options)[:]
    assert "3 rows read, 0 truncated (max_length None), 1 dropped (no trained token left; first rows 1)" in caplog.text
    with pytest.raises(InputError, match=r"2 dropped .*: nothing to train on. .* or correct empty answers"):
        prepare([empty, empty], method, **options)


def test_of_a_pair_the_answer_that_says_something_is_kept():
    assert texts([{"prompt": "q", "chosen": "a", "rejected": ""}], "kto") == [("q", "a" + END, True)]


def test_rows_with_unknown_tokens_are_counted(caplog):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    rows = [{"prompt": p, "chosen": c, "rejected": "b"} for p, c in (("a", "a"), ("a x", "b"), ("a", "y y"))]
    for method in methods_of(PREFERENCE, UNPAIRED):  # labelled methods make two examples of a row
        caplog.clear()
        prepare(rows, method, tokenizer)
        assert caplog.messages == [
            "train: 2 rows hold the unknown token, for text outside the tokenizer's vocabulary (first rows 1, 2). "
            "Clean them, or use another tokenizer"
        ]
    caplog.clear()
    prepare(rows[:1], "dpo", tokenizer)
    tokenizer.unk_token = "</s>"  # as GPT-2's, which is no sign of an unknown text
    prepare([{"prompt": "a", "chosen": "x b", "rejected": "b"}], "dpo", tokenizer)
    assert caplog.messages == []
    tokenizer.unk_token = "<unk>"  # "xb" is as unknown as "x": what is learnt is "b" all the same
    assert prepare(rows[1:2], "dpo", tokenizer)[0]["chosen_ids"] == [3, 1]


@pytest.mark.parametrize("method", METHODS)
def test_rows_longer_than_the_models_positions(method, caplog):
    kind = METHODS[method].rows
    rows = [raw_row(kind, "p" * n, "aaa", "aaa") for n in (4, 5, 7)]  # and an end: 8, 9 and 11 tokens
    options = {"max_completion_length": 4} if kind.sampled else {}
    prepared = prepare(rows, method, **options)
    warn_if_too_long(prepared, GPT2Config(n_positions=11), config(**options))
    warn_if_too_long(prepared.to_iterable_dataset(), GPT2Config(n_positions=8), config(**options))
    assert caplog.messages == []
    warn_if_too_long(prepared, GPT2Config(n_positions=8), config(**options))
    are, remedy = "are", "Set train.max_length=8"
    if kind.sampled:  # its completions are yet to be sampled
        are, remedy = "may become", "Set train.max_length=8, and train.max_completion_length below it"
    assert caplog.messages == [
        f"train: 2 examples {are} longer than the model's 8 positions (max_position_embeddings), up to 11 tokens. "
        f"{remedy}"
    ]


def test_packed_examples_are_measured_one_by_one(caplog):
    packed = pack(prepare([{"prompt": "p" * n, "completion": "aaa"} for n in (4, 5, 7)], "sft"), 20)
    assert len(packed) == 2
    warn_if_too_long(packed, GPT2Config(n_positions=11), config())
    assert caplog.messages == []
    warn_if_too_long(packed, GPT2Config(n_positions=10), config())
    assert "1 example is longer than the model's 10 positions" in caplog.text


@pytest.mark.parametrize("method", names_where(lambda method: not method.rows.sampled))
def test_every_branch_keeps_a_token_to_train(method):
    kind = METHODS[method].rows
    for out in prepare([raw_row(kind, "p" * 50, "c" * 50)], method, max_length=2):
        assert [len(out[name]) for name in ("prompt_ids", *kind.answers)] == [1] * (1 + len(kind.answers))
        assert out.get("completion_mask", [1]) == [1]


def test_long_prompt_keeps_its_completions():
    row = {"prompt": "p" * 100, "chosen": "good", "rejected": "bad"}
    # 12 tokens, the longer branch has 4 + 1: 7 are left for the prompt of both
    for method in methods_of(PREFERENCE):
        assert texts([row], method, max_length=12) == [("p" * 7, "good" + END, "bad" + END)]
        assert texts([row], method, max_length=3) == [("p", "go", "ba")]
    for method in methods_of(UNPAIRED):
        assert texts([row], method, max_length=12) == [("p" * 7, "good" + END, True), ("p" * 8, "bad" + END, False)]


def test_prompt_leaves_room_for_the_rollout():
    row = {"prompt": "0123456789", "completion": "a long answer"}
    options = {"max_length": 10, "max_completion_length": 6}
    for method in methods_of(PROMPTS):
        assert texts([row], method, **options) == [("6789", "a long answer" + END)]
    with pytest.raises(InputError, match="max_length=6 leaves no prompt next to max_completion_length=6"):
        OPDConfig(output_dir="out", use_cpu=True, max_length=6, max_completion_length=6)


@pytest.mark.parametrize("template", [tok.CHATML, tok.CHATML_GENERATION])
def test_assistant_only_without_generation_tags(template):
    rows = [{"messages": [USER, REPLY]}]
    assert texts(rows, "sft", tok.byte_tokenizer(template), assistant_only_loss=True) == [(ASKED, *["4" + END] * 2)]
    with pytest.raises(InputError, match=r"train, row 0: column 'messages': there is no assistant turn"):
        prepare([{"messages": [USER]}], "sft", tok.byte_tokenizer(template), assistant_only_loss=True)


def test_the_end_is_trained_when_pad_is_eos():
    tokenizer = tok.base_tokenizer()  # eos == pad == <|endoftext|> 256, turns end with <|im_end|> 258
    for row, end in (
        ({"prompt": [USER], "completion": [REPLY]}, 258),
        ({"prompt": "q", "completion": "a"}, 256),
        ({"prompt": "q", "completion": "a<|endoftext|>"}, 256),
        ({"messages": [USER, REPLY]}, 258),
        ({"text": "q a"}, 256),
    ):
        out = prepare([row], "sft", tokenizer)[0]
        assert (out["completion_ids"][-1], out["completion_ids"].count(end) - out["completion_mask"][-1]) == (
            end, int(row.keys() == {"messages"}),
        )  # one end token; whole conversations have the user's as well  # fmt: skip


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_the_end_is_a_target_of_the_batch(layout):
    """pad == eos, and rows of unequal length: padding is never a target, each row's end always is."""
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "abcdefgh"}]
    batch = Collator(supervised_examples, layout)(list(prepare(rows, "sft", tok.base_tokenizer())))
    trained = batch["shift_labels"][batch["shift_labels"] != -100].tolist()
    assert sorted(trained) == sorted([*b"a", *b"abcdefgh", 256, 256])


def test_rows_end_with_the_turn_end_of_the_template_not_eos():
    tokenizer = tok.base_tokenizer()
    row = {"prompt": [USER], "completion": [REPLY], "chosen": [REPLY], "rejected": [WRONG], "label": True}
    for method in METHODS.values():
        out = prepare([row], method.name, tokenizer)[0]
        # a classifier reads the conversation to its end, as transformers does
        end = [258, *b"\n"] if method.rows.classified else [258]
        assert [out[column][-len(end) :] for column in method.rows.answers] == [end] * len(method.rows.answers)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "abc"}, SUPERVISED),
        ({"text": "<s>abc"}, SUPERVISED),
        ({"messages": [USER, REPLY]}, SUPERVISED),
        ({"prompt": "q", "completion": "a"}, SUPERVISED),
        ({"prompt": "<s>q", "completion": "a"}, SUPERVISED),
        ({"prompt": "", "completion": "a"}, SUPERVISED),
        ({"prompt": [USER], "completion": [REPLY]}, SUPERVISED),
        ({"prompt": "q", "completion": "a", "label": True}, UNPAIRED),
        ({"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]}, PREFERENCE),
        ({"prompt": "q"}, PROMPTS),
        ({"prompt": [USER]}, PROMPTS),
    ],
)
@pytest.mark.parametrize("template", [tok.LLAMA, tok.CHATML])
def test_bos_exactly_once_in_every_format(row, kind, template):
    for method in methods_of(kind):
        out = prepare([row], method, tok.bos_tokenizer(template))[0]
        assert out["prompt_ids"][0] == 256
        assert sum(ids.count(256) for ids in out.values() if isinstance(ids, list)) == 1


def test_boundary_from_the_full_render_or_an_error_with_its_row():
    rows = [{"prompt": [USER], "completion": [REPLY]}]
    assert texts(rows, "sft", tok.byte_tokenizer(tok.QWEN3))[0][:2] == (ASKED, "<think>\n\n</think>\n\n4" + END)
    off = {"enable_thinking": False}
    prompt, completion, _ = texts(rows, "sft", tok.byte_tokenizer(tok.QWEN3), chat_template_kwargs=off)[0]
    assert (prompt, completion) == (ASKED + "<think>\n\n</think>\n\n", "4" + END)
    with pytest.raises(InputError, match=r"train, row 0: the rendered conversation does not begin"):
        prepare(rows, "sft", tok.byte_tokenizer(tok.DEEPSEEK))


# ---- bad rows


@pytest.mark.parametrize(
    ("row", "method", "message"),
    [
        ({"prompt": "q", "completion": 7}, "sft", "row 1: column 'completion': expected a string or a list .*found 7"),
        ({"completion": "a"}, "sft", "row 1: column 'prompt': missing or null. This row has completion$"),
        ({"messages": None, "extra": 1}, "sft", "row 1: column 'messages': missing or null. This row has extra$"),
        ({"prompt": [USER], "completion": [REPLY]}, "sft", "row 1: .*plain text and some hold messages"),
        ({"prompt": [USER], "completion": "a"}, "sft", "row 1: .*Use one type for all of them"),
        ({"prompt": [USER], "completion": [MORE]}, "sft", "row 1: .*turn has the role 'user', expected 'assistant'"),
        ({"prompt": [{"text": "q"}], "completion": "a"}, "sft", "row 1: column 'prompt': message 0 has no role"),
    ],
)
def test_bad_rows_name_row_column_and_expectation(row, method, message, tmp_path):
    good = {"messages": [USER, REPLY]} if "messages" in row else GOOD
    rows = load(source(jsonl(tmp_path / "bad.jsonl", [good, row])))
    with pytest.raises(InputError, match="mine, " + message):
        prepare(rows, method, name="mine")


@pytest.mark.parametrize("method", methods_of(UNPAIRED))
@pytest.mark.parametrize("label", ["yes", 2, 0.5])
def test_label_that_is_not_boolean(label, method, tmp_path):
    rows = [{**GOOD, "label": True}, {**GOOD, "label": label}]
    with pytest.raises(InputError, match="row 1: column 'label': expected true or false"):
        prepare(load(source(jsonl(tmp_path / "bad.jsonl", rows))), method)


@pytest.mark.parametrize("method", names_where(lambda method: method.rows.needs_prompt))
def test_empty_prompt_needs_a_bos(method):
    rows = [raw_row(METHODS[method].rows, prompt="")]
    with pytest.raises(
        InputError, match=rf"row 0: columns prompt.*: the prompt is empty, and {method} requires a prompt"
    ):
        prepare(rows, method)
    assert prepare(rows, method, tok.bos_tokenizer())[0]["prompt_ids"] == [256]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": [1], "completion_ids": []}, "0 truncated .*, 1 dropped .*: nothing to train on.*correct empty"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "row 0: columns input_ids: the row is padded. Write one"),
        ({"prompt_ids": [0], "completion_ids": [1], "attention_mask": [0, 1]}, "the row is padded"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, "row 0: columns input_ids: several examples are packed"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "several examples are packed in the row.*Write one"),
        ({"input_ids": [1, 2], "assistant_masks": [1]}, "column 'completion_mask': expected 2 values 0 or 1"),
        ({"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1, 1]}, "expected 1 values 0 or 1"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "the token of 'input_ids' at the same position"),
        ({"input_ids": [1.5, 2.0]}, "column 'input_ids': expected a list of token ids"),
        ({"text": 3}, "column 'text'"),
        ({"prompt_ids": [1], "completion_ids": [259]}, r"token id 259 is not in the tokenizer's vocabulary of 259 ids"),
    ],
)
def test_bad_tokenised_rows(row, message):
    with pytest.raises(InputError, match=message):
        prepare([row], "sft")


def test_assistant_only_needs_offsets():
    tokenizer = ByT5Tokenizer()  # a slow one
    tokenizer.chat_template = tok.CHATML
    assert prepare([{"messages": [USER, REPLY]}], "sft", tokenizer)
    with pytest.raises(InputError, match=r"assistant_only_loss requires a fast tokenizer\. ByT5Tokenizer"):
        prepare([{"messages": [USER, REPLY]}], "sft", tokenizer, assistant_only_loss=True)


def test_detect_names_what_the_method_reads():
    assert detect_format(["completion", "prompt", "label"], METHODS["kto"]) == "prompt + completion + label"
    assert detect_format(["chosen", "rejected", "prompt"], METHODS["dpo"]) == "prompt + chosen + rejected"
    assert detect_format(["prompt", "messages"], METHODS["sft"]) == "messages"
    with pytest.raises(InputError, match=r"column 'completion' is missing. sft reads prompt \+ completion"):
        detect_format(["prompt", "completions"], METHODS["sft"])


def test_contradictory_loss_options():
    with pytest.raises(InputError, match="completion_only_loss requires prompt and completion, and the data has mess"):
        prepare([{"messages": [USER, REPLY]}], "sft", completion_only_loss=True)
    with pytest.raises(InputError, match="assistant_only_loss requires messages"):
        prepare([{"text": "a b"}], "sft", assistant_only_loss=True)
    with pytest.raises(InputError, match="assistant_only_loss requires messages"):
        prepare([GOOD], "sft", assistant_only_loss=True)
    with pytest.raises(InputError, match=r"row 0: messages require a chat template"):
        prepare([{"messages": [USER, REPLY]}], "sft", tok.words_tokenizer())


# ---- sources


def test_files_folders_and_saved_sets(tmp_path):
    rows = [{"q": "a", "answer": "b"}, {"q": "c", "answer": "d"}]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl", rows)
    columns = {"prompt": "q", "completion": "answer"}
    table.to_csv(tmp_path / "rows.tsv", sep="\t")
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for name in ("rows.csv", "rows.parquet", "rows.jsonl", "rows.json", "rows.tsv", "saved", "folder",
                 "rows.jsonl.gz", "rows.json.gz", "rows.csv.gz", "rows.tsv.gz"):  # fmt: skip
        streamed = load(source(tmp_path / name, columns=columns, limit=1, streaming=True))
        assert [dict(row) for row in streamed] == [{"prompt": "a", "completion": "b"}], name
        loaded = load(source(tmp_path / name, columns=columns, limit=1))
        assert [dict(row) for row in loaded] == [{"prompt": "a", "completion": "b"}], name


def test_columns_replace_a_column_of_the_same_name(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "old", "question": "new"}])
    assert load(source(path, columns={"prompt": "question"}))[:] == {"prompt": ["new"]}


def test_sources_are_mixed_by_weight(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [{"text": f"a{n}", "only": 1} for n in range(4)])
    two = jsonl(tmp_path / "two.jsonl", [{"text": f"b{n}"} for n in range(4)])
    assert load([source(one), source(two)])[:] == {"text": ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]}
    mixed = load([source(one, weight=2.5), source(two, weight=0.5)])["text"][:]
    assert (len(mixed), sum(t[0] == "a" for t in mixed)) == (12, 10)  # 2.5 * 4 and 0.5 * 4
    assert {mixed.count(f"a{n}") for n in range(4)} == {2, 3}
    assert load([source(one, weight=2.5), source(two, weight=0.5)])["text"][:] == mixed


@pytest.mark.parametrize(
    ("name", "matched"),
    [("a[1].jsonl", "a1.jsonl"), ("b*.jsonl", "bb.jsonl"), ("c?.csv", "cc.csv"), ("d[1].parquet", "d1.parquet")],
)
def test_the_name_of_a_file_is_no_pattern(name, matched, tmp_path):
    for text, file in (("asked", name), ("other", matched)):
        write = {".jsonl": "to_json", ".csv": "to_csv", ".parquet": "to_parquet"}[Path(name).suffix]
        getattr(datasets.Dataset.from_list([{"text": text}]), write)(tmp_path / file)
    for streaming in (False, True):
        assert [row["text"] for row in load(source(tmp_path / name, streaming=streaming))] == ["asked"]


def test_sources_that_are_mixed_are_read_from_the_same_columns(tmp_path):
    """What all methods leave unread may differ, and system and tools; what one source alone has is not dropped."""

    def mixed(*rows, method="sft"):
        sources = [source(jsonl(tmp_path / f"{n}.jsonl", [row])) for n, row in enumerate(rows)]
        return load(sources, "train", partial(columns_read, method=METHODS[method], config=config()))

    turns = {"messages": [USER, REPLY]}
    assert mixed({**GOOD, "id": 1}, {**GOOD, "messages": [USER]}).column_names == ["prompt", "completion"]
    assert mixed(turns, {**turns, "system": "Be short."}).column_names == ["messages", "system"]
    assert mixed(turns, {"conversations": [USER, REPLY]}).column_names == ["messages"]
    assert mixed({**GOOD, "id": 1}, {**GOOD, "id": "a"}).column_names == ["prompt", "completion"]
    alpaca = {"instruction": "a", "output": "b"}
    assert mixed(alpaca, {**alpaca, "input": "c"})["input"][:] == [None, "c"]
    for one, other, method, message in [
        (turns, GOOD, "sft", r"the same columns, .*0.jsonl is read from messages, .*1.jsonl from completion, prompt"),
        ({"prompt_ids": [1], "completion_ids": [2]}, {"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1]},
         "sft", "from completion_ids, completion_mask, prompt_ids"),
        ({"input_ids": [1]}, {"input_ids": [1], "labels": [1]}, "sft", "from input_ids, labels"),
        ({"chosen": [USER, REPLY], "rejected": [USER, WRONG]}, {"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo",
         "0.jsonl is read from chosen, rejected, .*1.jsonl from chosen, prompt, rejected"),
        (turns, {**turns, "instruction": "Add."}, "sft", "column 'instruction' seems to be a part of the prompt"),
        (GOOD, {"text": "a"}, "opd", "columns text are not supported by opd"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            mixed(one, other, method=method)


def test_json_and_parquet_are_mixed(tmp_path):
    rows = [{"messages": [{**USER, "weight": weight}, REPLY]} for weight in (1, None)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for streaming in (False, True):
        mixed = load([source(path, streaming=streaming), source(tmp_path / "rows.parquet", streaming=streaming)])
        assert {str(row["messages"][0].get("weight", "none")) for row in mixed} == {"1", "None", "none"}
    # values of several types, which `datasets` keeps as JSON inside a list
    rows = [{"text": "x", "tools": [{"a": 1}, {"a": "s"}]}]
    paths = [jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "json.parquet"]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(paths[1])
    assert load([*map(source, paths)])[:] == {"text": ["x"] * 2, "tools": [rows[0]["tools"]] * 2}


def test_a_weight_that_leaves_no_row_is_refused(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [GOOD] * 4)
    with pytest.raises(InputError, match=r"rows.jsonl: weight 0.1 of 4 rows leaves none. Increase the weight, or"):
        load(source(path, weight=0.1))


def test_streams_are_interleaved(tmp_path):
    paths = [jsonl(tmp_path / f"{name}.jsonl", [{"text": name}] * n) for name, n in (("a", 20), ("b", 9))]
    found = "".join(row["text"] for row in load([source(path, streaming=True) for path in paths]))
    assert {*found[:10]} == {"a", "b"}
    assert len(found) == 29  # each row once
    with pytest.raises(InputError, match=r"b\.jsonl is the only one. Remove it"):
        load(source(paths[1], streaming=True, weight=2.0))


def test_cells_of_csv_are_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('id,prompt,completion,label\n007,NA,null,TRUE\n8,"1, ""2""\n3",1.50,0\n\n9,,x,\n')
    for streaming in (False, True):
        assert [tuple(row.values()) for row in load(source(path, streaming=streaming))] == [
            ("007", "NA", "null", "TRUE"), ("8", '1, "2"\n3', "1.50", "0"), ("9", None, "x", None)
        ]  # fmt: skip
    assert prepare(load(source(path, limit=2)), "kto")["label"][:] == [True, False]


@pytest.mark.parametrize(
    ("name", "header", "separators"),
    [
        ("rows.csv", "prompt;completion", ("semicolons", "commas")),
        ("rows.csv", "prompt\tcompletion", ("tabs", "commas")),
        ("rows.tsv", "prompt,completion", ("commas", "tabs")),
    ],
)
def test_a_table_with_another_separator_is_named(name, header, separators, tmp_path):
    path = tmp_path / name
    path.write_text(f"{header}\na, b;c\n")
    found, expected = separators
    problem = f"the columns {header!r} are separated by {found}, not by {expected}. Save the file with {expected}"
    with pytest.raises(InputError) as caught:
        load(source(path))
    assert problem in str(caught.value)


@pytest.mark.parametrize("names", [("code_train.jsonl", "math.jsonl"), ("a.jsonl", "b.jsonl", "c.csv")])
def test_files_of_a_folder_that_would_not_be_read_are_named(names, tmp_path):
    for name in names:
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match=f"{names[-1]} would not be read. The files of a folder must be of one type"):
        load(source(tmp_path))


def test_files_of_other_splits_are_named(tmp_path, caplog, monkeypatch):
    for name in ("train", "test"):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        (tmp_path / "dataset_infos.json").write_text("{}")
        assert load(source(tmp_path))["text"][:] == ["train"]
    assert "files of other splits than train, which are not read: test.jsonl" in caplog.text
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n")
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "raw.csv").write_text("")
    assert len(load(source(tmp_path.name))) == 2


def test_what_is_no_data_set_is_refused(tmp_path, monkeypatch, caplog):
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    assert len(load(source(path, name="main"))) == 1  # as with a recipe for the hub
    assert caplog.messages == [f"{path}: name: main is not read, since it is only valid for a data set of the hub"]
    monkeypatch.setenv("HOME", str(tmp_path))
    for home in ("~", str(tmp_path.parent)):
        with pytest.raises(InputError, match=r"is the home folder or a parent of it\. Set the path of a file"):
            load(source(home))
    with pytest.raises(InputError, match=r"not supported by sft.*; here columns: {prompt: question, completion: answ"):
        prepare(load(source(path)), "sft")


@pytest.mark.parametrize("late", [{"a": 1}, {"tools": "x"}])
def test_a_stream_that_changes_later_is_refused(late, tmp_path):
    stream = load(source(jsonl(tmp_path / "rows.jsonl", [{"a": "x"}] * 1000 + [late]), streaming=True))
    with pytest.raises(InputError, match=r"rows.jsonl: column '(a|tools)' (must be|is not in) .*the first 1000 rows"):
        list(stream)


def test_a_column_that_comes_late_in_a_stream_is_told(tmp_path, caplog):
    rows = [{"text": "x"}] * 1000 + [{"text": "y", "b": 1}] * 2
    assert [row["text"] for row in load(source(jsonl(tmp_path / "rows.jsonl", rows), streaming=True))][-1] == "y"
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "column 'b' is not in the first 1000 rows of the stream and is not read"
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("index.csv", "text,n\n0,a,1\n1,b,2\n", "line 2 has 3 fields, but the header has 2"),
        ("twice.csv", "text,text\na,b\n", "several columns have the same name: text, text"),
        ("names.json", '["a", "b"]', "line 1: a row must be an object such as"),
        ("trian.jsonl", None, r"no file or folder .*trian\.jsonl \(did you mean '.*train\.jsonl'\?\)"),
        ("rows.txt", "x", r"unknown extension. Supported are \.jsonl"),
        ("empty.jsonl", " \n\n", "is empty"),
        ("header.csv", "a,b\n", "header.csv"),
        ("broken.jsonl", '{"text": "a"}\n{"text": b}\n', "line 2 is not valid JSON"),
        ("broken.json", '[\n{"text": "a"},\n{"text": b}]', "line 3 is not valid JSON"),
        ("lines.json", '{"text": "a"}\n{"text": "b"}\n{"text": ', "line 3 is not valid JSON"),
        ("wide.tsv", "a\tb\n1\t2\n1\t2\t3\n", "line 3 has 3 fields, but the header has 2. Put a text with tabs"),
        ("open.csv", '"prompt,completion\na,b\n', "in line 1 has an unclosed double quote"),
    ],
)
def test_unreadable_files(name, content, message, tmp_path):
    jsonl(tmp_path / "train.jsonl", [GOOD])
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="data.train: .*" + message):
        load(source(tmp_path / name), "data.train")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_has_no_splits(streaming, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": str(n)} for n in range(10)])
    with pytest.raises(InputError, match=r"rows\.jsonl: it is a single file, which has no split 'validation'. Set"):
        load(source(path, split="validation", streaming=streaming))
    rows = load(source(path, split="train[80%:]", streaming=streaming)) if not streaming else None
    assert streaming or rows["text"][:] == ["8", "9"]


def test_a_gzip_file_that_is_cut_or_none_is_said_in_one_line(tmp_path):
    whole = gzip.compress(json.dumps({"text": "a" * 100}).encode())
    for content in (whole[:-10], b"\x1f\x8b", b"plain"):
        (tmp_path / "rows.jsonl.gz").write_bytes(content)
        with pytest.raises(InputError, match=r"rows\.jsonl\.gz: the gzip file is truncated or corrupt"):
            load(source(tmp_path / "rows.jsonl.gz"))


def test_a_saved_data_set_has_the_split_that_it_was_saved_from(tmp_path):
    jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    rows = datasets.load_dataset("json", data_files={"validation": str(tmp_path / "rows.jsonl")}, split="validation")
    rows.save_to_disk(tmp_path / "saved")
    assert len(load(source(tmp_path / "saved", split="validation"))) == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", '{"text": b}\n'), ("rows.csv", 'a,b\n1,2,3\n"')])
def test_a_broken_file_is_said_once(name, content, streaming, tmp_path, caplog):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"cannot read .*{name}: "):
        load(source(tmp_path / name, streaming=streaming))
    assert caplog.messages == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part.jsonl").write_text('{"text": b}\n')
    with pytest.raises(InputError, match=r"cannot read .*folder: part\.jsonl, line 1 is not valid JSON"):
        load(source(tmp_path / "folder", streaming=streaming))
    assert caplog.messages == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_may_keep_its_name(streaming, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "a"}])
    rows = load(source(path, streaming=streaming, columns={"prompt": "prompt", "completion": "answer"}))
    assert list(rows) == [{"prompt": "q", "completion": "a"}]


def test_assistant_only_loss_is_refused_on_ids():
    with pytest.raises(InputError, match="assistant_only_loss requires messages, and the data has input_ids"):
        prepare([{"input_ids": [5, 6, 7]}], "sft", assistant_only_loss=True)


def test_wrong_column_or_split(tmp_path):
    path = jsonl(tmp_path / "train.jsonl", [{"question": "q", "answer": "a"}])
    message = r"no column 'qestion' for 'prompt' \(did you mean 'question'\?\); valid: question, answer"
    with pytest.raises(InputError, match=message):
        load(source(path, columns={"prompt": "qestion"}))
    with pytest.raises(InputError, match=r"valid: question, answer\. Swap the two.*\(prompt: question\)$"):
        load(source(path, columns={"question": "prompt"}))
    with pytest.raises(InputError, match=r"no column 'questions' for 'completion'; valid: question, answer"):
        load(source(path, columns={"prompt": "question", "completion": "questions"}))
    with pytest.raises(InputError, match="Unknown split"):
        load(source(tmp_path, split="test"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("weight", [1, 2])
def test_sources_of_different_types(streaming, weight, tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [GOOD])
    two = jsonl(tmp_path / "two.jsonl", [{"prompt": [USER], "completion": [REPLY]}])
    with pytest.raises(InputError, match=r"data.train: the columns of .*one.jsonl, .*two.jsonl have different types"):
        load([source(one, streaming=streaming, weight=weight), source(two, streaming=streaming)], "data.train")


def test_streams_alongside_other_sources(tmp_path):
    one, two = (jsonl(tmp_path / name, [GOOD]) for name in ("one.jsonl", "two.jsonl"))
    with pytest.raises(InputError, match=r"\(.*two.jsonl with streaming: true, .*one.jsonl without\)\. Set it for all"):
        load([source(one), source(two, streaming=True)], "data.train")


@pytest.fixture
def saved(tmp_path):
    """Folders of a saved Dataset, 0 to 19, and of a DatasetDict of that as `train` and one row, 20, as `valid`."""
    rows = datasets.Dataset.from_dict({"text": [str(n) for n in range(20)]})
    rows.save_to_disk(tmp_path / "one")
    valid = datasets.Dataset.from_dict({"text": ["20"]})
    datasets.DatasetDict({"train": rows, "valid": valid}).save_to_disk(tmp_path / "more")
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("one", "train", range(20)),
        ("one", "train[:10%]", range(2)),
        ("one", "train[-3:]", range(17, 20)),
        ("more", "valid", [20]),
        ("more", "train[5:7]", [5, 6]),
        ("more", "train[:10%]+valid", [0, 1, 20]),
    ],
)
def test_slices_of_saved_sets(saved, name, split, expected, streaming):
    rows = load(source(saved / name, split=split, streaming=streaming))
    assert isinstance(rows, datasets.IterableDataset) == streaming
    assert [row["text"] for row in rows] == [str(n) for n in expected]


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("more", "test", r"cannot read .*more: Unknown split \"test\". Should be one of \['train', 'valid'\]"),
        ("more", "train[x]", r"cannot read .*more: Unrecognized instruction format: train\[x\]"),
        ("one", "train[:1%]", "one has no rows"),
        ("one", "train+test", r"a single saved data set, which has no split 'train\+test'. Set split: train, or"),
        ("one", "any", "a single saved data set, which has no split 'any'"),
    ],
)
def test_splits_that_a_saved_set_has_not(saved, name, split, message):
    with pytest.raises(InputError, match=message):
        load(source(saved / name, split=split))


# ---- datasets: cache, streams, speed


def test_second_preparation_hits_the_cache(tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([{"messages": [USER, REPLY]}] * 3).save_to_disk(saved)

    def files():
        prepare(load(source(saved)), "sft", tok.byte_tokenizer(), assistant_only_loss=True)
        return {path.name for path in saved.rglob("cache-*")}

    first = files()
    assert len(first) == 1
    assert files() == first
    prepare(load(source(saved)), "sft", tok.byte_tokenizer(), assistant_only_loss=True, max_length=30)
    assert len({path.name for path in saved.rglob("cache-*")}) == 2


def test_rows_of_another_version_are_not_taken_from_the_cache(tmp_path, monkeypatch):
    datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}] * 3).save_to_disk(tmp_path)

    def files():
        prepare(load(source(tmp_path)), "sft")
        return {path.name for path in tmp_path.rglob("cache-*")}

    first = files()
    for part in (prepare_module.tokenise, prepare_module.Plan, type(SUPERVISED)):  # words change nothing
        monkeypatch.setattr(part, "__doc__", "other words")
    assert files() == first
    assert Plan._field_defaults["version"] == VERSION
    monkeypatch.setattr(prepare_module, "Plan", partial(Plan, version=VERSION + 1))
    assert len(files() - first) == 1


def test_several_processes_give_the_same_rows(tmp_path):
    rows = load(source(jsonl(tmp_path / "rows.jsonl", [{**GOOD, "prompt": f"q{n}"} for n in range(8)])))
    assert prepare(rows, "sft", dataset_num_proc=2)[:] == prepare(rows, "sft")[:]


@pytest.mark.parametrize("method", METHODS)
def test_streams(method, tmp_path):
    rows = [raw_row(METHODS[method].rows, answer=f"a{n}", worse=f"b{n}") for n in range(5)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    stream = prepare(load(source(path, streaming=True, limit=3)), method)
    assert isinstance(stream, datasets.IterableDataset)
    assert list(stream) == list(prepare(load(source(path, limit=3)), method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("named", [True, False])
def test_a_prepared_stream_stays_as_it_is(method, named):
    rows = [raw_row(METHODS[method].rows)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    stream = stream if named else datasets.IterableDataset.from_generator(lambda: iter(rows))
    once = prepare(stream, method, apply_chat_template=True)
    assert once.column_names == [*METHODS[method].rows.columns, "index"]
    assert prepare(once, method, apply_chat_template=True) is once


def test_values_of_json_files_are_those_that_stand_there(tmp_path):
    """Arrow makes dates of texts, 1.0 of 1 next to 0.5, gives all mappings the same keys, and `datasets` reads the text
    "4" as 4 next to content of another kind."""
    calls = [{"when": "2024-05-01", "n": 1, "no": None}, {"n": 0.5, "big": 10**30}, {"n": {"t": "2024-05-01T10:00:00"}}]
    rows = [
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": call}}]}],
         "tools": [{"name": "f", "default": n}], "day": f"2024-05-0{n + 1}", "ids": [n], "id": 10 ** (30 * n)}
        for n, call in enumerate(calls)
    ]  # fmt: skip
    rows += [{**rows[0], "messages": [USER, {**REPLY, "content": content}]} for content in ('"4"', [TEXT_PART])]
    for name, text in {"rows.jsonl": "\n".join(map(json.dumps, rows)), "rows.json": json.dumps(rows, indent=1)}.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / f"a.{name}").write_text(text)
        for path in (tmp_path / "in" / name / f"a.{name}", tmp_path / "in" / name):
            for streaming in (False, True):
                assert list(load(source(path, streaming=streaming))) == rows
    assert [row[2] for row in texts(load(source(path)).select([3, 4]), "sft")]
    path = jsonl(tmp_path / "days.jsonl", [{"prompt": "2024-05-01T10:00:00", "completion": "2024-05-02"}] * 2)
    assert texts(load(source(path)), "sft")[0] == ("2024-05-01T10:00:00", "2024-05-02" + END, "2024-05-02" + END)


def test_nulls_that_arrow_fills_in_are_not_trained(tmp_path):
    """In rows given in Python they cannot be told from those that were given; in a JSON file they can."""
    written = [{"messages": [USER, REPLY], "tools": [{"name": "f", **keys}]} for keys in ({"a": None}, {"b": 2})]
    for rows, nulls in ((load(source(jsonl(tmp_path / "rows.jsonl", written))), 1), (written, 0)):
        assert ["".join(row[:2]).count("null") for row in texts(rows, "sft")] == [nulls, 0]
        rows = rows if nulls else datasets.Dataset.from_list(rows)
        notes = collect_notes(rows, METHODS["sft"], None, tok.byte_tokenizer())
        assert [note.partition(", ")[0] for note in notes][:-1] == [
            "column 'tools' has nulls inside calls or tools"] * nulls  # fmt: skip


def test_parts_of_text_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    asked = {"role": "user", "content": parts}
    assert texts([{"prompt": [asked], "completion": [REPLY]}], "sft")[0][0] == ASKED
    asked["content"] = [{"type": "image", "text": "2+2?"}]
    with pytest.raises(InputError, match=r"message 0 \(user\): a part of the content is {.*'image'"):
        prepare([{"prompt": [asked], "completion": [REPLY]}], "sft")


@pytest.mark.parametrize("role", ["human", "User", "gpt", " user"])
def test_roles_under_other_names(role):
    with pytest.raises(InputError, match=r"row 0: column 'prompt': message 0 has the role '.*', expected '"):
        prepare([{"prompt": [{"role": role, "content": "2+2?"}], "completion": [REPLY]}], "sft")


@pytest.mark.parametrize("ids", ["int64", "int32"])
def test_a_tokenised_stream_is_cut(ids):
    """Of prepared streams too it has the types, but not `index`."""
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [1, 1]}
    features = datasets.Features(dict.fromkeys(row, datasets.List(datasets.Value(ids))))
    stream = datasets.Dataset.from_list([row], features=features).to_iterable_dataset()
    assert next(iter(prepare(stream, "sft", max_length=3)))["prompt_ids"] == [2]


def test_stream_from_a_generator_and_dropped_rows(caplog):
    kept = {"prompt_ids": [1], "completion_ids": [3, 4], "completion_mask": [1, 1]}
    rows = [kept, {**kept, "completion_mask": [0, 0]}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert list(prepare(stream, "sft")) == [{**kept, "index": 0}]
    assert "train: row 1 dropped" in caplog.text


def test_real_rows_round_trip(gsm8k):
    columns = {"prompt": "question", "completion": "answer"}
    rows = load(source(gsm8k / "train.jsonl", columns=columns, limit=200))
    for raw, (prompt, completion, trained) in zip(rows, texts(rows, "sft"), strict=True):
        assert (prompt, completion, trained) == (raw["prompt"], raw["completion"] + END, raw["completion"] + END)
    assert len(prepare(load(source(gsm8k / "preference.jsonl", limit=50)), "dpo")) == 50
    unpaired = load(source(gsm8k / "unpaired.jsonl", limit=50))
    assert prepare(unpaired, "kto")["label"][:] == unpaired["label"][:]


@pytest.mark.parametrize("method", METHODS)
def test_plain_strings_as_chat(method):
    """apply_chat_template gives a row of strings the ids of the same row as messages."""
    kind = METHODS[method].rows
    turns = [[{"role": "user", "content": "2+2?"}], *([{"role": "assistant", "content": text}] for text in "45")]
    text = [raw_row(kind, "2+2?", "4", "5")]
    plain = prepare(text, method, apply_chat_template=True)
    assert plain[:] == prepare([raw_row(kind, *turns)], method)[:]
    assert plain[:] != prepare(text, method)[:]
    with pytest.raises(InputError, match="requires a column 'prompt'"):
        prepare([{"text": "a"}], "sft", apply_chat_template=True)
    with pytest.raises(InputError, match="apply_chat_template requires a chat template, and the tokenizer has none"):
        prepare(text, method, tok.words_tokenizer(), apply_chat_template=True)


def test_messages_without_a_prompt_go_with_apply_chat_template():
    """They are chat already."""
    rows = [{"messages": [USER, REPLY]}] * 2
    assert prepare(rows, "sft", apply_chat_template=True)[:] == prepare(rows, "sft")[:]
    rows = [{"chosen": [USER, REPLY], "rejected": [USER, {"role": "assistant", "content": "5"}]}] * 2
    assert prepare(rows, "dpo", apply_chat_template=True)[:] == prepare(rows, "dpo")[:]


def test_plain_prompts_as_chat_alongside_messages():
    as_messages = [{"prompt": [USER], "completion": [REPLY]}]
    mixed = prepare([{"prompt": "2+2?", "completion": [REPLY]}], "sft", apply_chat_template=True)
    assert mixed[:] == prepare(as_messages, "sft")[:]


def test_columns_of_another_format_change_nothing():
    row = {"prompt_ids": [1, 2], "completion_ids": [3], "chosen_ids": [4], "rejected_ids": [5], "input_ids": [6, 7]}
    branches = {SUPERVISED: [[3]], PREFERENCE: [[4], [5]], REWARD_PAIRS: [[4], [5]], PROMPTS: [[3]]}
    for method in methods_of(*branches):
        sample = read_format(row, detect_format(list(row), METHODS[method]))
        assert (sample.prompt, sample.branches) == ([1, 2], branches[METHODS[method].rows])


def test_a_prompt_that_is_trained_too_gives_way_to_its_answer():
    row = {"prompt": "p" * 100, "completion": "ANSWER"}
    [made] = prepare([row], "sft", completion_only_loss=False, max_length=40)
    ids, mask = made["prompt_ids"] + made["completion_ids"], made["completion_mask"]
    assert tok.byte_tokenizer().decode(ids) == "p" * 33 + "ANSWER" + END
    assert mask == [1] * 39


def test_prepared_rows_are_not_longer_than_max_length():
    made = prepare([{"prompt": "p" * 50, "completion": "c"}], "sft", max_length=64)
    assert prepare(made, "sft", max_length=52) is made
    with pytest.raises(InputError, match="the prepared rows have up to 52 tokens, more than max_length 32"):
        prepare(made, "sft", max_length=32)


def test_a_column_is_not_given_to_two_of_ours(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"a": "x"}])
    with pytest.raises(InputError, match=r"column 'a' cannot be mapped to both 'prompt' and 'completion'\. Remove one"):
        load(source(path, columns={"prompt": "a", "completion": "a"}))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_file_of_a_header_has_no_rows(streaming, tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,completion\n")
    with pytest.raises(InputError, match=r"rows\.csv: the file has no rows"):
        load(source(tmp_path / "rows.csv", streaming=streaming))


def test_a_brace_that_is_missing_is_looked_for_in_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n')
    with pytest.raises(InputError, match="line 2 is not valid JSON"):
        load(source(tmp_path / "rows.jsonl"))


def test_a_row_of_a_stream_that_is_cut_is_told_once(caplog):
    rows = [{"prompt": "p", "completion": "c" * n} for n in (3, 50, 60)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    assert len(list(prepare(stream, "sft", max_length=16))) == 3
    assert [message for message in caplog.messages if "truncated" in message] == [
        "train: row 1 is truncated to max_length, and others of this stream may be"]  # fmt: skip


def test_template_switches_of_rows_without_messages_are_told(caplog):
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        prepare([{"prompt": "p", "completion": "c"}], "sft", chat_template_kwargs={"enable_thinking": False})
        prepare([{"input_ids": [1, 2]}], "sft", chat_template_kwargs={"enable_thinking": False})
    assert caplog.text.count("chat_template_kwargs: the chat template is applied to no row") == 2


@pytest.mark.parametrize(
    ("method", "columns", "told"),
    [
        ("dpo", ["promt", "chosen", "rejected"], {"promt": "prompt"}),
        ("dpo", ["Pormpt", "chosen", "rejected"], {"Pormpt": "prompt"}),
        ("sft", ["prompt", "completion", "sytem"], {"sytem": "system"}),
        ("sft", ["prompt", "completion", "toools", "chat_template_kwarg"], {"toools": "tools"}),
        ("sft", ["instruction", "output", "inpt"], {"inpt": "input"}),
        ("sft", ["text", "promt", "competion"], {"promt": "prompt", "competion": "completion"}),
        ("opd", ["prompt", "compltion"], {"compltion": "completion"}),
        ("kto", ["prompt", "chosen", "rejected", "lable"], {"lable": "label"}),
    ],
)
def test_columns_that_are_likely_misspelt(method, columns, told):
    form = detect_format(columns, METHODS[method])
    assert misspelled_columns(unread_columns(columns, form), columns, form, METHODS[method]) == told


COMMON = [
    "prompt1", "prompt2", "text1", "text2", "tools2", "system2", "chosen_2",
    "id", "ids", "idx", "index", "uid", "uuid", "key", "source", "sources", "meta", "metadata", "score", "scores",
    "score_chosen", "score_rejected", "chosen_score", "rejected_score", "margin", "rating", "ratings", "category",
    "categories", "subset", "split", "domain", "topic", "tag", "tags", "lang", "language", "model", "models",
    "model_name", "url", "title", "date", "timestamp", "author", "license", "difficulty", "level", "type", "kind",
    "name", "task", "task_id", "task_name", "prompt_id", "prompt_len", "prompt_hash", "completion_len", "num_tokens",
    "tokens", "length", "n_tokens", "turns", "num_turns", "hash", "answer", "answers", "final_answer", "solution",
    "ground_truth", "reward", "rewards", "extra", "extra_info", "info", "notes", "comment", "comments", "label",
    "labels", "target", "targets", "class", "classes", "test", "tests", "next", "message", "texts", "prompts",
    "completions", "chosens", "output", "outputs", "inputs", "tool", "systems", "images", "image", "video", "audio",
    "file", "file_name", "path", "row", "row_id", "__index_level_0__", "created_at", "embedding", "weight",
    "weights", "quality", "toxicity", "conversation_id", "dataset", "origin", "winner", "loser", "human", "gpt",
    "response_id", "preference",
]  # fmt: skip


@pytest.mark.parametrize("method", sorted(METHODS))
def test_common_columns_are_not_taken_for_mistakes(method):
    for one in METHODS[method].rows.formats:
        columns = [*dict.fromkeys([*one.split(" + "), *COMMON])]
        form = detect_format(columns, METHODS[method])
        assert misspelled_columns(unread_columns(columns, form), columns, form, METHODS[method]) == {}


def test_a_misspelt_column_and_plain_rows_are_each_told_in_a_line(caplog):
    rows = [{"promt": "q", "chosen": "what a", "rejected": "what b"}]
    with caplog.at_level(logging.INFO):
        prepare(rows, "dpo", tok.byte_tokenizer())
    hint = "did you mean 'prompt'? Rename it with columns: {prompt: promt}"
    assert f"train: column 'promt' is not read; {hint}" in caplog.messages
    plain = "train: the rows are plain text, and the tokenizer's chat template is not applied"
    assert sum(message.startswith(plain) for message in caplog.messages) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prepare([{"prompt": "q", "completion": "a"}], "sft", tok.byte_tokenizer(), apply_chat_template=True)
        prepare([{"input_ids": [1, 2]}], "sft", tok.byte_tokenizer())
        bare = tok.byte_tokenizer()
        bare.chat_template = None
        prepare([{"prompt": "q", "completion": "a"}], "sft", bare)
    assert [message for message in caplog.messages if "plain text" in message] == []
