"""Interface of trainers: the methods that a training method defines, and the attributes that all mixins share."""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import datasets
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..batching.micro_batch import Batch, MicroBatch
from ..data.dataset_type import AnyDataset, AnyDatasets
from ..models.frozen import FrozenModel
from ..monitoring.anomaly_monitor import AnomalyMonitor
from ..monitoring.progress import Throughput
from ..scoring.layouts import Collator, Example
from .config import PostTrainConfig
from .loss_output import Losses, MetricAverager
from .method_spec import Method
from .stateful import Stateful

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset | Sequence[dict[str, Any]]
"""A data set as users pass it: raw, streaming or tokenized."""


class TrainerInterface(Trainer):
    """`transformers.Trainer` with the attributes of PostTrainer and the methods that a subclass defines.

    The mixins of PostTrainer are subclasses and call `super()`, so that a user's mixin between PostTrainer and Trainer
    is reached.
    """

    loss_is_scaled_for_ga = True  # tells Trainer not to divide the loss by the accumulation steps again
    config_class: ClassVar[type[PostTrainConfig]]
    collator_class: ClassVar[type[Collator]] = Collator
    method: ClassVar[Method]
    """The training method, an entry of the registry in `methods`."""
    data_method: ClassVar[Method]
    """`method` with the kind of rows of the data. In rounds these are prompts."""

    args: Any
    model: Any
    model_wrapped: Any
    tokenizer: Any
    data_collator: Any
    terminal_ids: list[int]
    """Token ids that end a completion."""
    scored: list[PreTrainedModel]
    """The causal LMs that score batches: the policy, then second models."""
    second_models: Sequence[FrozenModel]
    router_coef: float
    """Weight of the load-balancing loss of a mixture of experts, or 0."""
    meters: dict[str, MetricAverager]
    """Metrics by stage, `train` and `eval`."""
    groups: Sequence[str] = ()
    """Values of the column that `log_loss_by` names, in all data sets."""
    throughput: Throughput
    run_description: dict[str, Any]
    """`run_fingerprint.describe_run` of the last `train`, on ranks that write checkpoints."""
    recipe: dict[str, Any] | None
    """The recipe of the command line, for W&B."""
    base_key: str
    """Hash of the weights that are not in a checkpoint."""
    start_key: str | None
    """Hash of the trained weights at the start, or None if they are random."""
    has_custom_optimizer: bool
    """Whether the optimizer was passed to the trainer or is created by a subclass."""
    new_adapter: bool
    """Whether a new adapter does not change the base model at the start."""
    second_key: str | None
    """Hash or description of the second models."""
    anomaly_monitor: AnomalyMonitor
    preemption: Any
    """The `Preemption`, which knows whether a signal has stopped the run."""
    stateful: dict[str, Stateful]
    """Objects by name whose state checkpoints store in addition to the state of Trainer."""
    scored_rows: list[datasets.Dataset]
    """Data sets with columns of scores by the second model of this trainer."""
    ready = False
    """Whether the engine has prepared the policy."""
    has_trained = False
    """Whether the last `train` took a step. A finished run that is resumed takes none."""
    saved_step: int | None = None
    """Step of the newest checkpoint in output_dir that this run resumed from or has saved."""
    saving_folder: str | None = None
    """Folder in which a checkpoint is being saved."""
    rows_ran_out = False
    """In rounds, whether training ended because a round produced no rows."""
    reference_per_round = False
    """In rounds, whether each round has another reference."""

    # ---- defined by a method

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the examples of a prepared row: a prompt with its branches, and the columns that the losses read."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """Return the losses of a micro-batch in training and in evaluation.

        `compute_loss` and `prediction_step` reduce them.
        """
        raise NotImplementedError

    def prepare_window(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Prepare the micro-batches of an optimizer step before the first one is trained. All ranks call it."""
        return batches

    def prepare_evaluation(self) -> None:
        """Prepare an evaluation. All ranks call it."""

    def prepare_evaluation_batch(self, batch: MicroBatch) -> MicroBatch:
        """Prepare a micro-batch for `losses` in evaluation. All ranks call it, without gradient."""
        return batch

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to log, from the means over a logging interval or an evaluation.

        Args:
            stage: `train` or `eval`.
            metrics: Means by name, in evaluation with `loss`.
        """
        return metrics

    def on_dataset_ready(self, rows: AnyDataset | None) -> None:
        """Compute statistics of the prepared training rows, such as the number of each label."""

    # ---- defined by PostTrainer

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Sample one completion of each prompt from the policy."""
        raise NotImplementedError

    def _prepare_inputs(self, inputs: Batch) -> Batch:  # type: ignore[override]
        """Move a batch to the device."""
        raise NotImplementedError

    @classmethod
    def prepare(
        cls, rows: Rows | dict[str, Rows] | None, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Return rows prepared for `examples`."""
        raise NotImplementedError

    def without_scores(self, rows: AnyDatasets | None, args: PostTrainConfig) -> Any:
        """Return prepared rows without the scores by the second model of another trainer."""
        raise NotImplementedError

    def check_scoring(self, model: nn.Module) -> None:
        """Check once that models score in the layout as in their own forwards."""
        raise NotImplementedError

    def weights(self, batch: MicroBatch) -> Tensor:
        """Return the weight of each unit of the loss, [units]."""
        raise NotImplementedError
