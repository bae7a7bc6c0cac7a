"""Batches of prompts -> batches of rollouts, laid out for the losses."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..generation import rollout
from ..scoring.layouts import Branch, Example, balance_groups, teacher_input_of
from ..teachers.signal import TopK
from .batch import RolloutBatch
from .completion import Completion, Rollout
from .interface import OnPolicyInterface
from .policy_sampler import synchronise
from .reward import Reward, group_advantage
from .source import OnPolicy, RolloutSource

EVALUATION = 2**31
"""Stands for the step in the seed of an evaluation's rollouts, which are then the same at every evaluation."""


class RolloutBuilder:
    """Answers the prompts of a window, and lays the answers out as micro-batches."""

    def __init__(self, trainer: OnPolicyInterface, source: RolloutSource, reward: Reward | None):
        self.trainer = trainer
        self.source = source
        self.on_policy = OnPolicy(trainer)
        self.reward = reward
        self.upcoming: list[RolloutBatch] = []  # the prompts of the next step, with a sampler that prefetches
        self.epoch_iterator: Any = None  # which they come from

    def reset(self) -> None:
        """Start a training: the weights of the policy may have changed."""
        self.trainer.synchronised = None
        self.upcoming = []

    def next_window(
        self, read: Callable[[Any, int], list[RolloutBatch]], epoch_iterator: Any, count: int
    ) -> list[RolloutBatch]:
        """Return the prompts of a step from `read`. With a sampler that prefetches, those of the next step in the same
        epoch are read as well.
        """
        if not self.trainer.args.sampler.prefetch:
            return read(epoch_iterator, count)
        batches = self.upcoming if self.epoch_iterator is epoch_iterator else []
        batches = batches or read(epoch_iterator, count)
        self.upcoming = []
        self.epoch_iterator = epoch_iterator
        state = self.trainer.state
        if state.global_step + 1 < state.max_steps:
            self.upcoming = read(epoch_iterator, self.trainer.args.gradient_accumulation_steps)
        return batches

    def window(self, batches: Sequence[RolloutBatch], step: int) -> list[RolloutBatch]:
        """Return the rollouts of a step: of a share `lmbda` of its prompts, and the answers of the data to the others.

        The sampler gets the current weights first, and the prompts of the next step afterwards if it prefetches.
        """
        if not self.trainer.args.rollouts.fixed:
            synchronise(self.trainer)
        rows, sampled = self.prompts(batches, step)
        laid_out = self._answered(batches, rows, sampled, self.source, self.max_new_tokens(step), self.seed(step))
        if self.upcoming:
            self.prefetch(self.upcoming, step + 1)
        return laid_out

    def evaluation(self, batch: RolloutBatch) -> RolloutBatch:
        """Return on-policy rollouts of all prompts, by a seed that depends on the data alone."""
        seed = self.seed(EVALUATION, int(batch.index[0]) % 2**32)
        rows = batch.prompts.items
        longest = self.trainer.args.max_completion_length
        [answered] = self._answered([batch], rows, [True] * len(rows), self.on_policy, longest, seed)
        return answered

    def prefetch(self, batches: Sequence[RolloutBatch], step: int) -> None:
        """Begin to sample what `window` will return for these batches in a later step."""
        rows, sampled = self.prompts(batches, step)
        prompts = [row["prompt_ids"] for row, own in zip(rows, sampled, strict=True) if own]
        n = self.trainer.args.num_generations
        self.trainer.sampler.prefetch(prompts, n, self.max_new_tokens(step), self.seed(step))

    def max_new_tokens(self, step: int) -> int:
        """Return the length of the longest rollout of an optimizer step, in tokens."""
        tokens = self.trainer.args.rollouts.train_max_tokens
        if isinstance(tokens, dict):
            share = min(step / tokens["steps"], 1.0)
            tokens = round(tokens["from"] + share * (tokens["to"] - tokens["from"]))
        return tokens or self.trainer.args.max_completion_length

    def seed(self, *seed: int) -> tuple[int, ...]:
        """Return the seed of this rank's rollouts of a step, or of an evaluation."""
        return self.trainer.args.seed, *seed, self.trainer.accelerator.process_index

    def prompts(self, batches: Sequence[RolloutBatch], step: int) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return the rows of a window, and whether the student answers each of them."""
        rows = [row for batch in batches for row in batch.prompts.items]
        with rollout.seeded(self.trainer.accelerator.device, *self.seed(step)):
            return rows, (torch.rand(len(rows)) < self.trainer.args.lmbda).tolist()

    def _answered(
        self,
        batches: Sequence[RolloutBatch],
        rows: list[dict[str, Any]],
        sampled: list[bool],
        source: RolloutSource,
        max_new_tokens: int,
        seed: tuple[int, ...],
    ) -> list[RolloutBatch]:
        asked = [row for row, own in zip(rows, sampled, strict=True) if own]
        with rollout.seeded(self.trainer.accelerator.device, *seed):
            torch.rand(len(rows))  # those that `prompts` has drawn
            answers = source.rollouts(asked, seed, max_new_tokens)
        grades = self.reward.grades(self.trainer.tokenizer, asked, answers).tolist() if self.reward else None

        rollouts = []
        examples = []
        numbers = iter(range(len(answers)))
        for row, own in zip(rows, sampled, strict=True):
            answer = Rollout(row["prompt_ids"], [Completion(row["completion_ids"])])
            columns: dict[str, Any] = {"sampled": own}
            if own:
                number = next(numbers)
                answer = answers[number]
                columns |= {"grades": grades[number]} if grades else {}
            branches = [Branch(each.ids[:max_new_tokens]) for each in answer.completions]
            if not all(branch.ids for branch in branches):
                problem = "lmbda below 1 trains on completions of the data, and a row has none"
                raise InputError("the source of the rollouts gave an empty completion" if own else problem)
            rollouts.append(answer)
            examples.append(Example(answer.prompt, branches, columns, row.get("images") or (), teacher_input_of(row)))

        # as many rows in each micro-batch as it had prompts, and about as many tokens
        tokens = [len(one.prompt) + sum(len(branch.ids) for branch in one.branches) for one in examples]
        groups = balance_groups(tokens, [len(batch.prompts.items) for batch in batches])
        index = torch.cat([batch.index for batch in batches])
        row_weights = torch.cat([batch.weights_of_rows for batch in batches])
        laid_out = []
        for group in map(sorted, groups):
            batch = self._laid_out([examples[row] for row in group], [rollouts[row] for row in group], source)
            batch = self.trainer._prepare_inputs(batch.replace(index=index[group], row_weights=row_weights[group]))
            if self.trainer.args.sampler.prefetch and batch.sampler_logps is not None:
                # the probability of merged EOS ids is not that of the one that was sampled
                merged = self.trainer.eos.contains(batch.targets)
                batch = batch.replace(importance_logps=batch.sampler_logps.masked_fill(merged, math.nan))
            laid_out.append(batch)
        return laid_out

    def _laid_out(self, examples: list[Example], rollouts: list[Rollout], source: RolloutSource) -> RolloutBatch:
        """Return one micro-batch, with what is known about its tokens before the step."""
        batch = self.trainer.data_collator.lay_out(examples)
        branches = [branch.ids for example in examples for branch in example.branches]
        batch = batch.replace(repeated=torch.tensor([rollout.repeated_ngram_share(ids) for ids in branches]))

        def of_tokens(values: list[list[Any]]) -> torch.Tensor:
            """Return the values of each completion, which may have been cut, as values of tokens, [N, ...]."""
            return batch.per_token([each[: len(ids)] for each, ids in zip(values, branches, strict=True)])

        completions = [completion for one in rollouts for completion in one.completions]
        if source.reports_logps and source is not self.on_policy:
            logps = of_tokens([each.logps or [math.nan] * len(each.ids) for each in completions])
            batch = batch.replace(sampler_logps=logps)
        if rollouts[0].teacher is not None:
            scored = [each for one in rollouts for each in one.teacher or ()]
            names = ("teacher_ids", "teacher_logps", "teacher_own")
            batch = batch.replace(teacher_signal=TopK(*(of_tokens([each[name] for each in scored]) for name in names)))
        if self.reward:
            advantage = self.reward.options.coef * group_advantage(batch.grades)
            batch = batch.replace(reward_advantage=advantage.flatten()[batch.owner])
        return batch
