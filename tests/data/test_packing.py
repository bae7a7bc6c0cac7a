"""SFT packing: every example once, full rows, and the numbers of the unpacked examples."""

import logging
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from models_for_tests import tiny_model
from training_for_tests import assert_same_step, one_step, token_rows, trainer_for
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_posttrain.data.packing import best_fit, pack
from hf_posttrain.errors import InputError
from hf_posttrain.methods.sft import supervised_examples
from hf_posttrain.scoring.layouts import Collator, balance_groups
from hf_posttrain.trainer.length_sampler import seeded_sampler


def indexed(rows):
    return rows.add_column("index", list(range(len(rows))))


def test_best_fit_by_hand():
    # longest first: 6 | 5 | 4 alongside 6 (space 4, the fullest that holds it) | 3 alongside 5 (space 5) | 2 | 1 alone
    assert best_fit([1, 2, 3, 4, 5, 6], 10) == [[0], [1, 2, 4], [3, 5]]
    assert best_fit([7, 7, 3, 3], 10) == [[0, 3], [1, 2]]
    assert best_fit([10, 10], 10) == [[0], [1]]


def test_rows_by_length_have_one_order_on_any_number_of_processes():
    """A run that is resumed on two processes skipped rows, and saw others twice."""
    lengths = np.random.default_rng(0).integers(1, 500, 1024).tolist()
    args = SimpleNamespace(seed=3, data_seed=None)
    one, two = (list(seeded_sampler(LengthGroupedSampler(rows, lengths=lengths), args, 8)) for rows in (8, 4))
    assert one == two
    assert sorted(one) == list(range(1024))


def test_realistic_lengths_fill_the_rows():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.7, 100_000).astype(int).clip(2, 1024).tolist()
    bins = best_fit(lengths, 1024)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    sizes = [sum(lengths[item] for item in items) for items in bins]
    assert max(sizes) <= 1024
    assert sum(sizes) / (1024 * len(bins)) >= 0.95
    assert best_fit(lengths, 1024) == bins


def test_packed_rows_hold_every_example_once(caplog):
    rows = indexed(token_rows("sft", 50))
    with caplog.at_level(logging.INFO, "hf_posttrain.data"):
        packed = pack(rows, 40, "mine")
    tokens = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    assert caplog.messages == [
        f"mine: 50 examples packed into {len(packed)} rows, {100 * tokens / 40 / len(packed):.1f} % full"
    ]
    names = ("prompt_ids", "completion_ids", "completion_mask")
    opened = [one for row in packed for one in zip(*(row[name] for name in names), strict=True)]
    assert sorted(opened) == sorted(tuple(row[name] for name in names) for row in rows)
    for row in packed:
        assert sum(map(len, row["prompt_ids"])) + sum(map(len, row["completion_ids"])) <= 40
    assert packed["index"][:] == list(range(len(packed)))
    assert pack(packed, 40) is packed
    assert pack(rows, 40).cache_files == packed.cache_files
    with pytest.raises(InputError, match=r"mine, row \d+: 1\d tokens do not fit into a row of 9"):
        pack(rows, 9, "mine")


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_packed_examples_train_as_they_do_alone(layout, tmp_path):
    rows = token_rows("sft", 12)
    packed = pack(indexed(rows), 40)
    assert len(packed) < 6
    count = lambda batch: (batch["shift_labels"] != -100).sum().item()  # noqa: E731
    collator = Collator(supervised_examples, layout)
    assert count(collator(list(packed))) == count(collator(list(rows)))
    expected = one_step("sft", tiny_model(), rows, tmp_path, per_device_train_batch_size=12, layout="padded")
    options = {"packing": True, "max_length": 40, "layout": layout}
    found = one_step("sft", tiny_model(), rows, tmp_path, per_device_train_batch_size=len(packed), **options)
    assert_same_step(found, expected)
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(packed)}
    assert_same_step(one_step("sft", tiny_model(), rows, tmp_path, **options), expected)


def test_training_rows_are_packed_and_evaluation_rows_are_not(tmp_path):
    rows = token_rows("sft", 12)
    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, eval_rows=rows, packing=True, max_length=40)
    assert len(trainer.train_dataset) < 6
    assert len(trainer.eval_dataset) == 12
    batch = trainer.data_collator([trainer.train_dataset[1]])
    assert batch["index"].tolist() == [1]
    assert batch["row"].tolist() == [0] * len(trainer.train_dataset[1]["prompt_ids"])  # its examples are one row


def test_no_rows_are_not_packed():
    with pytest.raises(InputError, match=r"^mine: the data set has no rows to pack$"):
        pack(indexed(token_rows("sft")).select([]), 40, "mine")


def test_streams_are_not_packed(tmp_path):
    stream = token_rows("sft").to_iterable_dataset()
    assert isinstance(stream, datasets.IterableDataset)
    with pytest.raises(InputError, match="packing cannot be combined with a stream of rows"):
        trainer_for("sft", tiny_model(), stream, tmp_path, packing=True, max_length=40)


def test_micro_batches_are_balanced_by_tokens():
    costs = [100, 1, 2, 90, 50, 3, 60]
    groups = balance_groups(costs, [2, 2, 2, 1])
    assert sorted(item for group in groups for item in group) == list(range(7))
    assert [len(group) for group in groups] == [2, 2, 2, 1]
    assert sorted(sum(costs[item] for item in group) for group in groups) == [50, 63, 92, 101]
    assert balance_groups([5, 9, 7], [3]) == [[1, 2, 0]]  # the dearest first
