"""Token weights against loops over plain lists, with mean 1, the same however a window is cut."""

import dataclasses
import math
import random

import pytest
import torch

from hf_posttrain.batching.sequence_padding import pad_by_sequence, positions_in_sequence
from hf_posttrain.losses.token_weights import TOKEN_WEIGHTS, Tokens, normalized_weights
from hf_posttrain.rollouts.options import TOKEN_WEIGHTS as OPTIONS

LENGTHS = [4, 1, 6, 3]


def made(seed=0):
    """Rollouts whose tokens are mixed, but in order within each: (tokens, positions of each rollout's tokens)."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    owners = [n for n, length in enumerate(LENGTHS) for _ in range(length)]
    draw.shuffle(owners)
    count = len(owners)
    student, teacher = (-torch.rand(count, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2))
    divergence = torch.rand(count, generator=generator, dtype=torch.float64)
    counts = torch.ones(count, dtype=torch.float64)
    return Tokens(student, teacher, divergence, torch.tensor(owners), counts)


def plain(name, tokens, option):
    """The weights by the definition, before their mean is made 1."""
    a = (tokens.teacher - tokens.student).tolist()
    found = [0.0] * len(a)
    if name == "cumulative":
        for rollout in range(len(LENGTHS)):
            places = [n for n, owner in enumerate(tokens.rollout.tolist()) if owner == rollout]
            whole, before = sum(abs(a[n]) for n in places), 0.0
            for n in places:
                found[n] = 1 + option * (1 - before / whole)
                before += abs(a[n])
    if name in ("top_share", "extremes"):
        values = tokens.divergence.tolist() if name == "top_share" else a
        count, order = round(option * len(a)), sorted(range(len(a)), key=values.__getitem__)
        for n in order[-count:] + (order[:count] if name == "extremes" else []):
            found[n] = 1.0
    if name == "bounded":
        q, p = tokens.student.exp().tolist(), tokens.teacher.exp().tolist()
        found = [abs(x - y) / (x + y) for x, y in zip(q, p, strict=True)]
    if name == "sign":
        found = [1 / abs(x) for x in a]
    assert any(found), f"{name} has no definition here"
    return torch.tensor(found, dtype=torch.float64)


DEFINED = [
    ("cumulative", "gain", 0.5), ("cumulative", "gain", 2.0), ("top_share", "share", 0.5), ("extremes", "share", 0.2),
    ("bounded", None, None), ("sign", None, None),
]  # fmt: skip


def options_of(name, option=None, value=None):
    """Name and options of a token weight."""
    built = OPTIONS.build("token_weights", {"name": name} | ({option: value} if option else {}))
    return name, dataclasses.asdict(built)


def test_every_function_has_a_definition_here():
    assert {name for name, *_ in DEFINED} == {*TOKEN_WEIGHTS}


@pytest.mark.parametrize(("name", "option", "value"), DEFINED)
def test_weights_are_those_of_their_definition(name, option, value):
    tokens = made()
    found, expected = normalized_weights(tokens, *options_of(name, option, value)), plain(name, tokens, value)
    advantage = tokens.advantage.abs()
    scale = advantage.sum() / (expected * advantage).sum() if name == "sign" else len(expected) / expected.sum()
    torch.testing.assert_close(found, expected * scale)
    if name == "sign":
        torch.testing.assert_close((found * tokens.advantage).abs(), advantage.mean().expand_as(found))
    else:
        assert found.mean() == pytest.approx(1)


@pytest.mark.parametrize(("name", "option", "value"), [*DEFINED, ("top_share", "share", 0.7)])
def test_rows_that_fill_up_a_batch_do_not_count(name, option, value):
    tokens = made()
    chosen = options_of(name, option, value)
    expected = normalized_weights(tokens, *chosen)
    more = {key: torch.cat([getattr(tokens, key), 9 * torch.ones(2).double()]) for key in ("student", "divergence")}
    more["teacher"] = torch.cat([tokens.teacher, torch.tensor([0.0, 30.0]).double()])
    rollout, counts = torch.cat([tokens.rollout, torch.tensor([9, 9])]), torch.cat([tokens.counts, torch.zeros(2)])
    found = normalized_weights(Tokens(rollout=rollout, counts=counts, **more), *chosen)
    torch.testing.assert_close(found[:-2], expected)


@pytest.mark.parametrize("name", TOKEN_WEIGHTS)
def test_a_window_in_two_micro_batches_has_the_weights_of_the_whole(name):
    whole = made()
    order = torch.argsort((whole.rollout >= 2).int(), stable=True)
    first = int((whole.rollout < 2).sum())
    parts = []
    for which, start in ((order[:first], 0), (order[first:], 2)):
        fields = {key: getattr(whole, key)[which] for key in ("student", "teacher", "divergence", "counts")}
        parts.append(Tokens(rollout=whole.rollout[which] - start, **fields))

    class Alone:
        num_processes = 1

    expected = normalized_weights(whole, *options_of(name))[order]
    torch.testing.assert_close(normalized_weights(Tokens.concat(parts, Alone), *options_of(name)), expected)


def test_the_table_of_a_window():
    owner = torch.tensor([1, 0, 1, 1, 0, 2])
    assert positions_in_sequence(owner).tolist() == [0, 0, 1, 2, 1, 0]
    table, where = pad_by_sequence(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), owner)
    assert table.tolist() == [[2, 5, 0], [1, 3, 4], [6, 0, 0]]
    assert table[where].tolist() == [1, 2, 3, 4, 5, 6]
    assert positions_in_sequence(torch.zeros(3, dtype=torch.long)).tolist() == [0, 1, 2]
    assert pad_by_sequence(torch.empty(0), torch.empty(0, dtype=torch.long))[0].shape == (0, 0)


def test_equal_models_have_finite_weights():
    tokens = made()
    tokens.teacher = tokens.student
    for name in TOKEN_WEIGHTS:
        assert all(map(math.isfinite, normalized_weights(tokens, *options_of(name)).tolist())), name


def test_every_function_has_options():
    assert {*OPTIONS.kinds} == {*TOKEN_WEIGHTS}
    for name, function in TOKEN_WEIGHTS.items():
        fields = dataclasses.fields(OPTIONS.kinds[name])
        assert {field.name for field in fields} == {*function.__annotations__} - {"tokens", "return"}
