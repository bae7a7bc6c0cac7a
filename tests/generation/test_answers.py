"""Final answers of solutions, their exact match, and which rows can be asked and graded."""

import pytest

from hf_posttrain.errors import InputError
from hf_posttrain.generation.exact_match import ExactMatch, answerable, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("A 12 pack costs 3 each, so the total is 36", "36"),
        ("Vitamin A 5 times, then an answer 2 lines long: 8", "8"),
        ("A: 7", "7"),
        ("Q: 1+1? A: 2\nQ: 2+2? A: 4", "4"),
        ("The answer is 12.", "12"),
        ("the answer is: -3, of 10", "-3"),
        ("The answer to 3 + 4 is 7", "7"),
        ("Answer: $1,200.00", "1200"),
        ("**Answer:** 5 of 6", "5"),
        ("The answer is **-$4.50** for 2", "-4.5"),
        ("ANSWER: 5 of 6", "5"),
        ("3 + 2 = 5\n#### 5", "5"),
        ("#### $1,000.0 in 2 years", "1000"),
        (r"\boxed{3} of 4", "3"),
        (r"\boxed{x}, the answer is 4", "x"),
        ("#### Paris", "paris"),
        ("Paris", "paris"),
        ("", ""),
        ("#### 12345678901", "12345678901"),
        ("#### 12345678902.0", "12345678902"),
        ("#### 0.10000000000000000000000000001", "0.10000000000000000000000000001"),
        ("#### 1e3", "1000"),
        ("#### 1e999999999", "Infinity"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_exact_match_is_the_share_of_equal_final_answers():
    predictions = ["so 36", "The answer is 12.", "A: 7", "none"]
    assert ExactMatch().compute(predictions=predictions, references=["#### 36", "12.0", "8", "5"]) == {
        "exact_match": 0.5
    }


def test_rows_that_can_be_asked_and_graded():
    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}
    labelled = [{"prompt_ids": [1, 2], "completion_ids": [n], "label": n == 3} for n in (3, 4)]
    assert answerable([pair]) == answerable(labelled) == ([[1, 2]], [[3]])
    whole, prompt_only = {"prompt_ids": [1], "completion_ids": [2]}, {"prompt_ids": [1, 2], "completion_ids": []}
    for rows in ([whole], [prompt_only], labelled[1:], []):
        with pytest.raises(InputError, match="eval_exact_match needs eval rows with a prompt and an answer"):
            answerable(rows)
