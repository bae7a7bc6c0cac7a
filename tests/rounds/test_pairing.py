"""Which of a prompt's judged answers are trained on, by hand."""

import functools
import operator

import pytest

from hf_posttrain.data.row_schema import PREFERENCE, SUPERVISED, UNPAIRED
from hf_posttrain.rounds import pairing
from hf_posttrain.rounds.config import PairSection, resolve_threshold
from hf_posttrain.rounds.pairing import Row, pair_up


def paired(kind, scores, answers=None, stopped=None, threshold=None, **options):
    """(rows, reasons) of one prompt."""
    answers = answers or [f"answer {n}" for n in range(len(scores))]
    found = pair_up(kind, [answers], [scores], [stopped or [True] * len(scores)], PairSection(**options), threshold)
    [rows] = found.rows
    assert found.count == len(rows)
    return rows, [*found.left_out]


def test_the_best_and_the_worst_are_a_pair():
    assert paired(PREFERENCE, [0.2, 0.9, -1.0, 0.9]) == ([Row((1, 2))], [])  # of equal scores the first


def test_every_pair_is_taken_that_is_far_enough_apart():
    assert paired(PREFERENCE, [1.0, 0.0, 0.4], take="all")[0] == [Row((0, 1)), Row((0, 2)), Row((2, 1))]
    assert paired(PREFERENCE, [1.0, 0.0, 0.4], take="all", margin=0.6)[0] == [Row((0, 1)), Row((0, 2))]


@pytest.mark.parametrize(
    ("scores", "options", "reason"),
    [
        ([1.0, 1.0], {}, pairing.ALIKE),
        ([1.0, 0.8], {"margin": 0.5}, pairing.TOO_CLOSE),
        ([None, None], {}, pairing.UNJUDGED),
        ([1.0, None], {}, pairing.ALL_SAME),  # what is not judged is in no pair
        ([1.0, 0.0], {"answers": ["x", "x"]}, pairing.ALL_SAME),
        ([1.0, 0.0], {"answers": ["", ""]}, pairing.EMPTY),
        ([1.0, 0.0], {"stopped": [False, True]}, pairing.UNFINISHED),
    ],
)
def test_a_prompt_without_a_pair_is_counted_with_its_reason(scores, options, reason):
    assert paired(PREFERENCE, scores, **options) == ([], [reason])


def test_an_answer_that_was_cut_is_never_the_better_one_unless_that_is_allowed():
    cut = {"stopped": [False, True, True]}
    assert paired(PREFERENCE, [1.0, 0.5, 0.0], **cut)[0] == [Row((1, 2))]
    assert paired(PREFERENCE, [1.0, 0.5, 0.0], **cut, unfinished=True)[0] == [Row((0, 2))]
    assert paired(PREFERENCE, [0.0, 0.5, 1.0], **cut)[0] == [Row((2, 0))]  # it may be the worse one
    assert paired(SUPERVISED, [1.0, 0.5, 0.0], **cut)[0] == [Row((1,))]
    assert paired(UNPAIRED, [1.0, 0.9, 0.0], threshold=0.5, **cut)[0] == [Row((1,), True), Row((2,), False)]


def test_the_best_answer_is_trained_alone_from_the_threshold_on():
    assert paired(SUPERVISED, [0.1, 0.3, 0.2])[0] == [Row((1,))]
    assert paired(SUPERVISED, [0.1, 0.3, 0.2], threshold=0.3)[0] == [Row((1,))]
    assert paired(SUPERVISED, [0.1, 0.3, 0.2], threshold=0.4) == ([], [pairing.NOT_GOOD])
    assert paired(SUPERVISED, [1.0, 0.0, 1.0, 1.0], ["a", "b", "a", "c"], take="all", threshold=0.5)[0] == [
        Row((0,)), Row((3,)),
    ]  # fmt: skip


def test_answers_are_labelled_by_the_threshold_or_the_mean_of_their_prompt():
    assert paired(UNPAIRED, [1.0, 0.0, 1.0], threshold=0.5)[0] == [
        Row((0,), True), Row((2,), True), Row((1,), False),
    ]  # fmt: skip
    assert paired(UNPAIRED, [1.0, 1.0], threshold=0.5)[0] == [Row((0,), True), Row((1,), True)]
    assert paired(UNPAIRED, [3.0, 1.0, 2.0])[0] == [Row((0,), True), Row((1,), False)]  # 2 is the mean
    assert paired(UNPAIRED, [2.0, 2.0]) == ([], [pairing.ALIKE])
    for score, count in ((0.1, 8), (0.1, 3), (0.7, 3)):  # whose mean is another number
        assert functools.reduce(operator.add, [score] * count) / count != score
        assert paired(UNPAIRED, [score] * count) == ([], [pairing.ALIKE])
    assert paired(UNPAIRED, [3.0, 1.0, 2.5], margin=0.8)[0] == [Row((0,), True), Row((1,), False)]
    assert paired(UNPAIRED, [0.6, 0.4], threshold=0.5, margin=0.3) == ([], [pairing.LABELS_ALIKE])
    assert paired(UNPAIRED, [1.0, 0.0, 0.9, 0.1], threshold=0.5, take="best")[0] == [Row((0,), True), Row((1,), False)]


def test_good_labels_that_did_not_end_are_told_apart_from_poor_ones():
    assert paired(UNPAIRED, [1.0, 1.0], stopped=[False, False], threshold=0.5) == ([], [pairing.UNFINISHED])


def test_of_equal_answers_the_one_that_ended_counts():
    assert paired(SUPERVISED, [1.0, 1.0], ["a", "a"], stopped=[False, True])[0] == [Row((1,))]


def test_counts_are_of_prompts():
    found = pair_up(PREFERENCE, [["a", "b"]] * 3, [[1, 0], [1, 1], [0, 0]], [[True] * 2] * 3, PairSection(), None)
    assert [len(rows) for rows in found.rows] == [1, 0, 0]
    assert found.left_out == {pairing.ALIKE: 2}


def test_exact_match_knows_its_threshold():
    assert resolve_threshold(PairSection(), "exact_match") == 0.5
    assert resolve_threshold(PairSection(threshold=1.0), "exact_match") == 1.0
    assert resolve_threshold(PairSection(), "model") is None
