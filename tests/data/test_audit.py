"""The data audit: every count against a plain loop over the same rows, and what its warnings say.

`byte_tokenizer` makes one token per byte, and an end: "abc" is 4 tokens, so lengths can be counted by eye.
"""

import dataclasses
import json
import logging
import math
import random
from collections import Counter
from types import SimpleNamespace

import datasets
import pytest
from rows_for_tests import COLUMNS, raw_row
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import names_where

from hf_posttrain.data import audit as audit_module
from hf_posttrain.data.audit import Tally, Truncation, audit_datasets
from hf_posttrain.data.prepare import prepare, tokenize_dataset
from hf_posttrain.data.row_schema import PREFERENCE, PROMPTS, REWARD_PAIRS, SUPERVISED, UNPAIRED
from hf_posttrain.data.sources import _apply_weight
from hf_posttrain.methods import METHODS, config_class, trainer_class

ANSWERED = names_where(lambda method: not method.rows.sampled)
"""Methods whose rows have answers."""


def config_for(method, tmp_path, **options):
    return config_class(METHODS[method])(output_dir=str(tmp_path), use_cpu=True, **options)


def answers_of(method):
    """The raw columns of the answers."""
    return [column for column in COLUMNS[METHODS[method].rows] if column not in ("prompt", "label")]


@pytest.fixture
def audited(tmp_path):
    """(method, rows, options of the Config) -> the DataAudit."""

    def made(method, rows, name="train", **options):
        rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
        config = config_for(method, tmp_path, **options)
        return audit_datasets({name: rows}, METHODS[method], byte_tokenizer(), config)[name]

    return made


@pytest.mark.parametrize("method", names_where(lambda method: method.rows.paired or method.rows.labeled))
@pytest.mark.parametrize("marked", ["chosen", "rejected"])
def test_a_first_token_that_reveals_the_label_is_named(method, marked, audited):
    def rows_with(share):
        rows = [{"prompt": f"p{n}", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(100)]
        for row in rows[: int(share * 100)]:
            row[marked] = f"X{row[marked]}"
        return rows

    found = audited(method, rows_with(0.95))
    kinds = {"chosen": ("chosen", "rejected"), "rejected": ("rejected", "chosen")}[marked]
    if METHODS[method].rows.labeled:
        kinds = [{"chosen": "desirable", "rejected": "undesirable"}[name] for name in kinds]
    assert found.marker == f"95 of 100 {kinds[0]} answers begin with 'X', and 0 of 100 {kinds[1]} ones"
    assert any(found.marker in warning for warning in found.warnings())
    assert audited(method, rows_with(0.8)).marker is None  # a common first word
    assert audited(method, rows_with(1)[:10]).marker is None  # too few rows
    both = [row | {"chosen": f"X{row['chosen']}", "rejected": f"X{row['rejected']}"} for row in rows_with(0)]
    assert audited(method, both).marker is None


def random_rows(method, seed, count=60):
    """Rows of few letters and few lengths, so that some are alike, too long, or contradict each other."""
    draw = random.Random(seed)
    text = lambda *lengths: draw.choice("ab") * draw.choice(lengths)  # noqa: E731
    rows = []
    for _ in range(count):
        row = {"prompt": text(1, 2, 3, 30), **{key: text(1, 2, 12, 30) for key in answers_of(method)}}
        rows.append(row | ({"label": draw.random() < 0.7} if METHODS[method].rows.labeled else {}))
    return rows


def plain(method, rows, max_length):
    """The same counts from the texts: a byte is a token, an answer has an end, a prompt is cut first, to half."""
    counts, seen, cut = Counter(), set(), {"prompt": [], "completion": [], "total": [], "uncut": []}
    labels = Counter((row["prompt"], row.get("completion"), row.get("label")) for row in rows)
    for row in rows:
        answers = [row[key] + "$" for key in answers_of(method)]
        longest = max(map(len, answers))
        cut["uncut"].append(len(row["prompt"]) + longest)
        kept_prompt = row["prompt"][-max(1, max_length // 2, max_length - longest) :]
        kept = [answer[: max_length - len(kept_prompt)] for answer in answers]
        what = (kept_prompt != row["prompt"]) + 2 * (kept != answers)
        counts[("", "prompt trimmed", "completion cut", "prompt trimmed and completion cut")[what]] += 1
        counts["repeated"] += tuple(row.items()) in seen
        seen.add(tuple(row.items()))
        counts["identical"] += len(kept) == 2 and kept[0] == kept[1]
        counts["desirable"] += bool(row.get("label"))
        counts["conflicts"] += bool(labels[row["prompt"], row.get("completion"), not row.get("label")])
        cut["prompt"].append(len(kept_prompt))
        cut["completion"] += map(len, kept)
        cut["total"].append(len(kept_prompt) + max(map(len, kept)))
    return counts, cut


def spread(lengths):
    """Sorted, the k-th of n is the smallest that k / n of them do not exceed."""
    lengths = sorted(lengths)
    at = {f"p{p}": lengths[math.ceil(p / 100 * len(lengths)) - 1] for p in (50, 95, 99)}
    return {"min": lengths[0], **at, "max": lengths[-1], "mean": round(sum(lengths) / len(lengths), 1)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ANSWERED)
def test_counts_are_those_of_a_plain_loop(audited, method, seed):
    rows, kind = random_rows(method, seed), METHODS[method].rows
    found, (counts, lengths) = audited(method, rows, max_length=20), plain(method, rows, 20)
    assert (found.rows_read, found.examples, found.kept, found.dropped, found.streamed) == (60, 60, 60, [], False)
    assert {cut.reason: cut.count for cut in found.truncated} == {
        reason: count for reason, count in counts.items() if " " in reason
    }
    assert {name: found.lengths[name] for name in lengths} == {name: spread(each) for name, each in lengths.items()}
    assert found.lengths["trained"] == (spread(lengths["completion"]) if kind.masked else None)
    assert found.duplicates.count == counts["repeated"] > 0
    assert (found.identical and found.identical.count) == (counts["identical"] if kind.paired else None)
    if kind.labeled:
        assert found.classes == {"desirable": counts["desirable"], "undesirable": 60 - counts["desirable"]}
        assert found.balance == counts["desirable"] / (60 - counts["desirable"])
        assert found.conflicts.count == counts["conflicts"] > 0
    else:
        assert (found.classes, found.balance, found.conflicts) == (None, None, None)


def test_rows_are_named(audited):
    rows = [{"prompt": "q" * n, "completion": "a"} for n in (1, 9, 1, 9, 9, 9, 9, 9)]
    found = audited("sft", rows, max_length=6)  # "a" and the end leave 4 of the prompt
    assert found.truncated == [Truncation(6, [1, 3, 4, 5, 6], "prompt trimmed")]
    assert found.duplicates == Tally(6, [2, 3, 4, 5, 6])  # more than five are counted


def test_a_misspelt_column_is_a_warning_and_another_one_is_named(audited):
    """A run warns of the first as well."""
    rows = [{"promt": "2+2=", "chosen": "it is 4", "rejected": "it is 5", "source": "me"}] * 2
    found = audited("dpo", rows)
    [warning] = [line for line in found.warnings() if "promt" in line]
    assert (
        warning == "train: column 'promt' is not read; did you mean 'prompt'? Rename it with columns: {prompt: promt}"
    )
    assert any("columns not read: " in note and "source" in note for note in found.notes)
    assert not any("did you mean" in note for note in found.notes)


def test_dropped_rows_have_their_reason(audited):
    ids = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
    masks = [[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]]
    rows = [{**ids, "completion_mask": mask} for mask in masks]
    found = audited("sft", rows, max_length=3)  # 1 of the prompt, 2 of the completion
    # rows 2 and 4 train nothing to begin with, but are cut as well; what cutting left of row 1 is not trained
    assert found.dropped == [Truncation(3, [1, 2, 4], "no trained token left by max_length")]
    assert (found.kept, found.truncated[0].first_rows) == (2, [0, 3])
    assert found.lengths["trained"] == {"min": 1, "p50": 1, "p95": 1, "p99": 1, "max": 1, "mean": 1.0}
    assert audited("sft", rows).dropped == [Truncation(2, [2, 4], "no trained token")]
    assert audited("sft", rows[2:3], max_length=3).warnings() == [
        "train: every example is dropped, because none has a trained token (number of examples: 1). Increase max_length"
    ]


def test_pairs_are_two_examples_of_kto(audited):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "b", "rejected": "b"}]
    found = audited("kto", rows)
    assert (found.rows_read, found.examples) == (2, 4)
    assert found.classes == {"desirable": 2, "undesirable": 2}
    assert found.duplicates == Tally(1, [1])  # (q, b, undesirable) is in both rows
    assert found.conflicts == Tally(3, [0, 1])  # (q, b) is undesirable twice and desirable once


def test_lengths_of_opd_are_those_that_max_length_limits(audited, tmp_path, caplog):
    """Answers of the data, which are not trained, are neither cut nor counted next to max_length."""
    rows = [{"prompt": "q" * n, "completion": "a" * 30} for n in (1, 3, 9)]
    found = audited("opd", rows, max_length=16, max_completion_length=10)
    assert found.summary() == "train: prompt tokens p50 3 p95 6 max 6"
    assert (found.lengths["total"], found.lengths["uncut"]["max"]) == (None, 9)
    assert found.truncated == [Truncation(1, [2], "prompt trimmed")]
    found = audited("opd", rows[2:], max_length=16, max_completion_length=10)
    remedy = "Increase max_length from 16 (10 tokens are reserved for the answer, and the longest prompt has 9)"
    assert found.warnings() == [f"train: 1 of 1 examples are truncated. {remedy} or shorten the rows"]
    config = config_for("opd", tmp_path, max_length=16, max_completion_length=10)
    with caplog.at_level(logging.INFO):
        prepare(datasets.Dataset.from_list(rows), METHODS["opd"], byte_tokenizer(), config)
    counts = "1 truncated (prompts to 6 tokens: max_length 16 - max_completion_length 10), 0 dropped"
    assert f"train: 3 rows read, {counts}" in caplog.messages


def test_opd_compares_prompts(audited):
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b"}, {"prompt": "r", "completion": "c"}]
    found = audited("opd", rows, max_completion_length=4)
    assert (found.duplicates, found.stubs) == (Tally(1, [1]), Tally(0, []))
    assert audited("opd", [{"prompt": "q"}], max_completion_length=4).lengths["completion"] is None


@pytest.mark.parametrize("method", METHODS)
def test_trained_tokens_are_counted_while_rows_are_tokenised(method, tmp_path):
    """Answers have an end: of 1 and 2 letters, cut to 3 tokens with max_length 4; a pair has that of the longest."""
    kind = METHODS[method].rows
    trained = {SUPERVISED: [2, 3], PREFERENCE: [4, 3], REWARD_PAIRS: [4, 3], UNPAIRED: [2, 3], PROMPTS: [0, 0]}[kind]
    answers = [("b", "bbb"), ("b", "bb")] if kind.paired else [("b", ""), ("bbbb", "")]
    rows = datasets.Dataset.from_list([raw_row(kind, "a", *pair) for pair in answers])
    options = {"max_length": 4} if kind in (SUPERVISED, UNPAIRED) else {}
    config = config_for(method, tmp_path, **options)
    assert tokenize_dataset(rows, METHODS[method], byte_tokenizer(), config)["trained"] == trained


def test_masked_tokens_of_an_answer_are_not_trained(tmp_path):
    config = config_for("sft", tmp_path)
    rows = datasets.Dataset.from_list([{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, -100, 8, 9]}])
    assert tokenize_dataset(rows, METHODS["sft"], byte_tokenizer(), config)["trained"] == [3]
    found = audit_datasets({"train": rows}, METHODS["sft"], byte_tokenizer(), config)["train"]
    assert found.lengths["trained"]["max"] == 3
    assert found.lengths["completion"]["max"] == 4


def test_answers_that_differ_beyond_the_cut_train_nothing(audited):
    rows = [{"prompt": "q", "chosen": "aaaaaa", "rejected": "aaaaab"}]
    assert audited("dpo", rows).identical == Tally(0, [])
    assert audited("dpo", rows, max_length=5).identical == Tally(1, [0])


def test_copies_by_weight_are_no_duplicates(audited):
    once = datasets.Dataset.from_list([{"prompt": p, "completion": "a"} for p in "xyxz"])
    assert audited("sft", once).duplicates == Tally(1, [2])
    twice = _apply_weight(once, SimpleNamespace(path="x", weight=2.5))
    assert (len(twice), audited("sft", twice).duplicates.count) == (10, 1)


@pytest.mark.parametrize("method", ANSWERED)
def test_overlap_of_evaluation_with_training(tmp_path, method):
    train, evaluation = random_rows(method, 1), random_rows(method, 2, 30)
    answers = answers_of(method)
    known = {(row["prompt"], row[key]) for row in train for key in answers}
    expected = [n for n, row in enumerate(evaluation) if {(row["prompt"], row[key]) for key in answers} & known]
    config = config_for(method, tmp_path, max_length=20)
    raw = {"train": datasets.Dataset.from_list(train), "eval": datasets.Dataset.from_list(evaluation)}
    found = audit_datasets(raw, METHODS[method], byte_tokenizer(), config)
    assert found["eval"].overlap == Tally(len(expected), expected[:5])
    assert found["train"].overlap is None
    assert f"eval: {len(expected)} of 30 examples are also in the training set" in " ".join(found["eval"].warnings())
    raw["eval"] = datasets.Dataset.from_list([{**row, "prompt": "new"} for row in evaluation])
    assert audit_datasets(raw, METHODS[method], byte_tokenizer(), config)["eval"].overlap == Tally(0, [])


def test_it_is_read_from_the_cache_of_training(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in random_rows("kto", 0)))
    config, tokenizer = config_for("kto", tmp_path, max_length=20), byte_tokenizer()
    rows = datasets.load_dataset("json", data_files=str(path), split="train")
    trainer_class(METHODS["kto"]).prepare(rows, tokenizer, config, "train (rows.jsonl)")
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *args, **kwargs: pytest.fail("tokenised again"))
    found = audit_datasets({"train": rows}, METHODS["kto"], tokenizer, config, {"train": "train (rows.jsonl)"})
    assert found["train"].examples == 60


def test_lengths_of_both_sides_are_told_apart(audited):
    """Answers of n + 1 tokens with their end: a label that shows in the length."""
    pairs = audited("dpo", [{"prompt": "q", "chosen": "aaaa", "rejected": "b"}] * 2).lengths
    assert (pairs["chosen"]["p50"], pairs["rejected"]["p50"]) == (5, 2)
    rows = [{"prompt": "q", "completion": "aaaa", "label": True}, {"prompt": "r", "completion": "b", "label": False}]
    rated = audited("kto", rows).lengths
    assert (rated["desirable"]["p50"], rated["undesirable"]["p50"]) == (5, 2)


def test_streams_say_that_they_are_not_read_to_the_end(audited, monkeypatch):
    monkeypatch.setattr(audit_module, "STREAMED", 3)
    stream = datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}] * 9).to_iterable_dataset()
    found = audited("sft", stream)
    assert (found.rows_read, found.examples, found.streamed, found.duplicates.count) == (3, 3, True, 2)
    assert found.lines()[0] == "train: 3 rows read as 3 examples (the beginning of a stream; the rest is not audited)"
    assert found.summary().endswith("2 duplicates, of the first 3 examples of the stream")


def test_prepared_rows_are_audited_as_they_are(tmp_path, audited):
    rows = datasets.Dataset.from_list([{"prompt": "qq", "completion": "a"}] * 2)
    prepared = prepare(rows, METHODS["sft"], byte_tokenizer(), config_for("sft", tmp_path))
    assert audited("sft", prepared).lengths["total"]["max"] == 4


# ---- warnings

GOOD = {"prompt": "q", "completion": "answer"}


@pytest.mark.parametrize(
    ("method", "rows", "options", "warning"),
    [
        ("sft", [{"prompt": "q", "completion": "a" * n} for n in range(1, 9)], {"max_length": 7},
         "train: 3 of 8 examples lose the end of a completion, from which the model learns to stop. Increase max_length"
         " from 7 (the longest has 10 tokens) or shorten the rows"),
        ("sft", [{"prompt": "q" * n, "completion": "a"} for n in range(1, 6)], {"max_length": 4},
         "train: 3 of 5 examples are truncated. Increase max_length from 4 (the longest has 7 tokens) or shorten the"
         " rows"),
        ("sft", [{"prompt_ids": [1], "completion_ids": [n], "completion_mask": [n]} for n in (0, 1)], {},
         "train: 1 of 2 examples are dropped, because they have no trained token. Correct empty answers and masks"),
        ("sft", [{"text": "ab"}, {"text": "a"}], {"max_length": 2},
         "train: 2 of 2 examples train a single token. Check that the columns are the right ones (first rows 0, 1)"),
        ("sft", [GOOD, GOOD], {}, "train: 1 of 2 examples repeat an earlier one. Remove them (first rows 1)"),
        ("dpo", [{"prompt": "q", "chosen": "a", "rejected": "a"}], {},
         "train: 1 of 1 pairs have the same chosen and rejected answer. Remove them (first rows 0)"),
        ("kto", [{**GOOD, "label": True}, {**GOOD, "label": False}], {},
         "train: 2 of 2 answers are labeled desirable and undesirable. Keep one label (first rows 0, 1)"),
        ("kto", [{**GOOD, "prompt": p, "label": True} for p in "pq"], {},
         "train: 2 desirable and 0 undesirable examples. Training requires both labels. Add examples of"
         " the missing one"),
        ("kto", [{**GOOD, "prompt": p, "label": p == "p"} for p in "pqrstu"], {},
         "train: 1 desirable and 5 undesirable examples, whose total weights are 0.2 to 1. Set"
         " train.desirable_weight=auto"),
    ],
)  # fmt: skip
def test_what_would_ruin_training(audited, method, rows, options, warning):
    assert warning in audited(method, rows, **options).warnings()


def test_good_data_has_no_warnings(audited, caplog):
    rows = [{**GOOD, "prompt": p, "label": p in "pq"} for p in "pqrstu"]
    for method in ("sft", "kto"):
        assert audited(method, rows).warnings() == []
    rows = [{**GOOD, "prompt": p, "label": p == "p"} for p in "pqrstu"]
    with caplog.at_level(logging.INFO):
        assert audited("kto", rows, desirable_weight="auto").warnings() == []
    assert audited("kto", rows, undesirable_weight=0.05).warnings() == []  # whoever gives a weight means it
    assert audited("kto", rows, name="eval").warnings() == []  # balance is a matter of training


# ---- text


def test_lines_and_json(audited):
    rows = [{"prompt": "q" * n, "completion": "a", "label": n < 3} for n in (1, 2, 3, 9, 9)]
    found = audited("kto", rows, max_length=6)
    assert found.lines() == [
        "train: 5 rows read as 5 examples",
        "  the rows are plain text, and the tokenizer's chat template is not applied. A chat model requires"
        " messages, or apply_chat_template: true",
        "  dropped: 0",
        "  truncated: 2 (first rows 3, 4), prompt trimmed",
        "  duplicates: 1 (first rows 4)",
        "  with the unknown token: 0",
        "  with a single trained token: 0",
        "  under both labels: 0",
        "  labels: 2 desirable, 3 undesirable",
        "  tokens              min      p50      p95      p99      max     mean",
        "    prompt              1        3        4        4        4      2.8",
        "    completion          2        2        2        2        2      2.0",
        "    desirable           2        2        2        2        2      2.0",
        "    undesirable         2        2        2        2        2      2.0",
        "    total               3        5        6        6        6      4.8",
        "    uncut               3        5       11       11       11      6.8",
    ]
    assert found.summary() == "train: tokens p50 5 p95 6 max 6, 1 duplicates, 2 desirable and 3 undesirable"
    as_json = json.loads(json.dumps(dataclasses.asdict(found)))
    assert as_json["truncated"] == [{"count": 2, "first_rows": [3, 4], "reason": "prompt trimmed"}]
    assert as_json["lengths"]["total"] == {"min": 3, "p50": 5, "p95": 6, "p99": 6, "max": 6, "mean": 4.8}


def test_real_rows_are_clean(audited, gsm8k):
    rows = datasets.load_dataset("json", data_files=str(gsm8k / "unpaired.jsonl"), split="train[:300]")
    found = audited("kto", rows, max_length=4096)
    assert (found.examples, sum(found.classes.values()), found.truncated) == (300, 300, [])
