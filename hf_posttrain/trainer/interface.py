"""What a method's trainer defines, and the attributes that the parts of PostTrainer share."""

from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..batching.micro_batch import Batch, MicroBatch
from ..data.dataset_type import AnyDataset
from ..models.frozen import FrozenModel
from ..monitoring.anomaly_monitor import AnomalyMonitor
from ..monitoring.progress import Throughput
from ..scoring.layouts import Collator, Example
from .config import PostTrainConfig
from .loss_output import Losses, MetricAverager
from .method_spec import Method
from .stateful import Stateful


class TrainerInterface(Trainer):
    """`transformers.Trainer` with the attributes of PostTrainer, and the methods that a subclass defines.

    The mixins of PostTrainer are subclasses: they call `super()`, so that a mixin of the user between PostTrainer and
    Trainer is reached.
    """

    loss_is_scaled_for_ga = True  # Trainer reads it: it must not divide by the accumulation steps once more
    config_class: ClassVar[type[PostTrainConfig]]
    collator_class: ClassVar[type[Collator]] = Collator
    method: ClassVar[Method]
    """The row of the table of methods, of `config_class`."""
    data_method: ClassVar[Method]
    """The same with the kind of rows that the data hold: in rounds these are prompts."""

    args: Any
    model: Any
    model_wrapped: Any
    tokenizer: Any
    data_collator: Any
    terminal_ids: list[int]
    """Ids that end an answer."""
    scored: list[PreTrainedModel]
    """The causal LMs that score batches: of the policy, then of second models."""
    second_models: Sequence[FrozenModel]
    router_coef: float
    """Factor of the load-balancing loss of a mixture of experts; 0 without one."""
    meters: dict[str, MetricAverager]
    """Metrics by stage, `train` and `eval`."""
    throughput: Throughput
    anomaly_monitor: AnomalyMonitor
    preemption: Any
    """Whether the run was told to stop: a `Preemption`."""
    stateful: dict[str, Stateful]
    """What checkpoints store in addition to the state of Trainer, by name."""
    scored_rows: list[datasets.Dataset]
    """Data sets with columns of scores by this trainer's second model."""
    ready = False
    """Whether the engine has prepared the policy."""
    has_trained = False
    """Whether the last `train` has taken a step. A finished run that is resumed takes none."""
    saved_step: int | None = None
    """Step of the newest checkpoint in output_dir that this run resumed from or has saved."""
    saving_folder: str | None = None
    """Folder in which a checkpoint is being saved."""
    rows_ran_out = False
    """In rounds, whether a round gave no rows, so that training ended."""
    reference_per_round = False
    """In rounds, whether each round has a reference of its own."""

    # ---- what a method defines

    @staticmethod
    def examples(row: dict[str, Any]) -> list[Example]:
        """Return the examples of a prepared row: a prompt with its branches, and columns that the losses read."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: MicroBatch) -> Losses:
        """Return the losses of a micro-batch, in training and in evaluation. `compute_loss` and `prediction_step` call
        it and reduce them.
        """
        raise NotImplementedError

    def prepare_window(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches of an optimizer step with what a method requires of all of them before the first
        one. All ranks call it.
        """
        return batches

    def prepare_evaluation(self) -> None:
        """Prepare an evaluation. All ranks call it."""

    def prepare_evaluation_batch(self, batch: Any) -> Any:
        """Return what `losses` gets in evaluation. All ranks call it, without gradient."""
        return batch

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a logging interval (`train`) or of an evaluation (`eval`, with `loss`), given their
        means.
        """
        return metrics

    def on_dataset_ready(self, rows: AnyDataset | None) -> None:
        """Read from prepared training rows what a method requires before training, such as the number of each label."""

    # ---- what PostTrainer defines

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Sample one completion of each prompt from the policy."""
        raise NotImplementedError

    def _prepare_inputs(self, inputs: Batch) -> Batch:  # type: ignore[override]
        """Move a batch to the device."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, rows: Any, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str) -> Any:
        """Return rows as `examples` takes them."""
        raise NotImplementedError

    def without_scores(self, rows: Any) -> Any:
        """Return prepared rows without the scores of another trainer's second model."""
        raise NotImplementedError

    def check_scoring(self, model: nn.Module) -> None:
        """Check once that models score in the layout as their own forwards do."""
        raise NotImplementedError

    def weights(self, batch: MicroBatch) -> Tensor:
        """Return the weight of each unit of the loss, [units]."""
        raise NotImplementedError
