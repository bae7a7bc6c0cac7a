"""Builds batches of rollouts from batches of prompts, laid out for the losses."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..batching.micro_batch import Deferred
from ..errors import InputError
from ..generation import rollout
from ..scoring.layouts import Branch, Example, balance_groups, teacher_input_of
from ..teachers.columns import from_columns
from .batch import RolloutBatch
from .completion import Completion, Rollout
from .interface import OnPolicyInterface
from .policy_sampler import synchronize
from .reward import Reward, group_advantage
from .source import OnPolicy, RolloutSource

EVALUATION = 2**31
"""Takes the place of the step in the seed of an evaluation's rollouts, which are then equal in every evaluation."""


class RolloutBuilder:
    """Obtains rollouts for the prompts of a window, and lays them out as micro-batches."""

    def __init__(self, trainer: OnPolicyInterface, source: RolloutSource, reward: Reward | None) -> None:
        self.trainer = trainer
        self.source = source
        self.on_policy = OnPolicy(trainer)
        self.reward = reward
        self.upcoming: list[RolloutBatch] = []  # prompts of the next step, with a sampler that prefetches
        self.epoch_iterator: Iterator[Any] | None = None  # source of `upcoming`

    def reset(self) -> None:
        """Start a training: the weights of the policy may have changed."""
        self.trainer.synchronized = None
        self.upcoming = []

    def next_window(
        self, read: Callable[[Iterator[Any], int], list[RolloutBatch]], epoch_iterator: Iterator[Any], count: int
    ) -> list[RolloutBatch]:
        """Return the prompts of a step.

        With a sampler that prefetches, the prompts of the next step in the same epoch are read as well.

        Args:
            read: Function of an iterator and a number that returns as many micro-batches of prompts.
            epoch_iterator: Iterator over the micro-batches of the epoch.
            count: Number of micro-batches of the step.
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
        """Return the rollouts of a step.

        The student answers a share `lmbda` of the prompts, and completions of the data answer the others. The sampler
        gets the current weights first, and the prompts of the next step afterwards if it prefetches.
        """
        if not self.trainer.args.rollouts.fixed:
            synchronize(self.trainer)
        rows, sampled = self.prompts(batches, step)
        laid_out = self._answer(batches, rows, sampled, self.source, self.max_new_tokens(step), self.seed(step))
        if self.upcoming:
            self.prefetch(self.upcoming, step + 1)
        return laid_out

    def evaluation(self, batch: RolloutBatch) -> RolloutBatch:
        """Return on-policy rollouts of all prompts of a batch, with a seed that depends on the data alone."""
        seed = self.seed(EVALUATION, int(batch.index[0]) % 2**32)
        rows = batch.prompts.items
        max_new_tokens = self.trainer.args.max_completion_length
        [laid_out] = self._answer([batch], rows, [True] * len(rows), self.on_policy, max_new_tokens, seed)
        return laid_out

    def prefetch(self, batches: Sequence[RolloutBatch], step: int) -> None:
        """Begin to sample what `window` will return for these batches in a later step."""
        rows, sampled = self.prompts(batches, step)
        prompts = [row["prompt_ids"] for row, is_sampled in zip(rows, sampled, strict=True) if is_sampled]
        n = self.trainer.args.num_generations
        self.trainer.sampler.prefetch(prompts, n, self.max_new_tokens(step), self.seed(step))

    def max_new_tokens(self, step: int) -> int:
        """Return the largest number of tokens of a rollout in an optimizer step."""
        tokens = self.trainer.args.rollouts.train_max_tokens
        if isinstance(tokens, dict):
            progress = min(step / tokens["steps"], 1.0)
            tokens = round(tokens["from"] + progress * (tokens["to"] - tokens["from"]))
        return tokens or self.trainer.args.max_completion_length

    def seed(self, *seed: int) -> tuple[int, ...]:
        """Return the seed of this rank's rollouts of a step, or of an evaluation."""
        return self.trainer.args.seed, *seed, self.trainer.accelerator.process_index

    def prompts(self, batches: Sequence[RolloutBatch], step: int) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return the rows of a window, and for each whether the student answers it."""
        rows = [row for batch in batches for row in batch.prompts.items]
        with rollout.seeded(self.trainer.accelerator.device, *self.seed(step)):
            return rows, (torch.rand(len(rows)) < self.trainer.args.lmbda).tolist()

    def _answer(
        self,
        batches: Sequence[RolloutBatch],
        rows: list[dict[str, Any]],
        sampled: list[bool],
        source: RolloutSource,
        max_new_tokens: int,
        seed: tuple[int, ...],
    ) -> list[RolloutBatch]:
        """Return micro-batches of the rollouts of all rows.

        Args:
            batches: Micro-batches of prompts.
            rows: Prepared rows of all batches.
            sampled: For each row whether `source` answers it; completions of the data answer the others.
            source: Source of the rollouts.
            max_new_tokens: Number of tokens to which rollouts are truncated.
            seed: Seed of the rollouts.
        """
        sampled_rows = [row for row, is_sampled in zip(rows, sampled, strict=True) if is_sampled]
        with rollout.seeded(self.trainer.accelerator.device, *seed):
            torch.rand(len(rows))  # advances the generator as `prompts` did
            answers = source.rollouts(sampled_rows, seed, max_new_tokens)
        grades = self.reward.grades(self.trainer.tokenizer, sampled_rows, answers).tolist() if self.reward else None

        rollouts = []
        examples = []
        numbers = iter(range(len(answers)))
        for row, is_sampled in zip(rows, sampled, strict=True):
            answer = Rollout(row["prompt_ids"], [Completion(row["completion_ids"])])
            columns: dict[str, Any] = {"sampled": is_sampled}
            if is_sampled:
                number = next(numbers)
                answer = answers[number]
                columns |= {"grades": grades[number]} if grades else {}
            branches = [Branch(completion.ids[:max_new_tokens]) for completion in answer.completions]
            if not all(branch.ids for branch in branches):
                problem = "lmbda below 1 trains on completions of the data, and a row has none. Set lmbda to 1"
                raise InputError("the source of the rollouts returned an empty completion" if is_sampled else problem)
            rollouts.append(answer)
            examples.append(Example(answer.prompt, branches, columns, row.get("images") or (), teacher_input_of(row)))

        # as many rows in each micro-batch as it had prompts, and about equal numbers of tokens
        tokens = [len(example.prompt) + sum(len(branch.ids) for branch in example.branches) for example in examples]
        groups = balance_groups(tokens, [len(batch.prompts.items) for batch in batches])
        index = torch.cat([batch.index for batch in batches])
        row_weights = torch.cat([batch.weights_of_rows for batch in batches])

        laid_out = []
        for group in map(sorted, groups):
            batch = self._lay_out([examples[row] for row in group], [rollouts[row] for row in group], source)
            values = [rows[row].get("group") for row in group for _ in examples[row].branches]
            batch = batch.replace(groups=Deferred(values) if values[0] else None)
            batch = self.trainer._prepare_inputs(batch.replace(index=index[group], row_weights=row_weights[group]))
            if self.trainer.args.sampler.prefetch and batch.sampler_logps is not None:
                # the policy's probability of merged EOS ids is not that of the single id that was sampled
                merged = self.trainer.eos.contains(batch.targets)
                batch = batch.replace(importance_logps=batch.sampler_logps.masked_fill(merged, math.nan))
            laid_out.append(batch)
        return laid_out

    def _lay_out(self, examples: list[Example], rollouts: list[Rollout], source: RolloutSource) -> RolloutBatch:
        """Return one micro-batch, with everything that is known about its tokens before the step."""
        batch = self.trainer.data_collator.lay_out(examples)
        branches = [branch.ids for example in examples for branch in example.branches]
        batch = batch.replace(repeated=torch.tensor([rollout.repeated_ngram_share(ids) for ids in branches]))

        def per_token(values: list[list[Any]]) -> torch.Tensor:
            """Return values of the tokens of each completion, which may have been truncated since, as [N, ...]."""
            return batch.per_token([row[: len(ids)] for row, ids in zip(values, branches, strict=True)])

        completions = [completion for answer in rollouts for completion in answer.completions]
        if source.reports_logps and source is not self.on_policy:
            logps = per_token([completion.logps or [math.nan] * len(completion.ids) for completion in completions])
            batch = batch.replace(sampler_logps=logps)
        if rollouts[0].teacher is not None:
            scores = [score for answer in rollouts for score in answer.teacher or ()]
            batch = batch.replace(teacher_signal=from_columns(scores, per_token))
        if self.reward:
            advantage = self.reward.options.coef * group_advantage(batch.grades)
            batch = batch.replace(reward_advantage=advantage.flatten()[batch.owner])
        return batch
