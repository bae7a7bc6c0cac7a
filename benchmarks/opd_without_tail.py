"""`hf_posttrain.run` with a loss that is not offered: the reverse KL summed over the teacher's top tokens alone.

It can go below 0 and has its least where the student puts nothing on them: experiment e of benchmarks.opd shows it.
"""

import sys

import torch

from hf_posttrain import run
from hf_posttrain.methods import objective
from hf_posttrain.scoring.teacher_tiles import at_temperature, autograd_tile


def without_tail(ids, logps, targets, temperature, vocabulary, *, teacher):  # type: ignore[no-untyped-def]
    """As `top_tokens.residual_reverse_kl`, without the residual."""

    def value(logits, rows):  # type: ignore[no-untyped-def]
        q = torch.log_softmax(at_temperature(logits[:, :vocabulary], temperature), dim=-1)
        top = q.gather(-1, ids[rows])
        own = q.gather(-1, targets[rows, None])[:, 0]
        found = (top.exp() * (top - logps[rows])).sum(-1)
        return found, {"divergence": found, "student": own, "teacher": teacher[rows]}

    return autograd_tile(value)


if __name__ == "__main__":
    objective.residual_reverse_kl = without_tail
    sys.exit(run.main())
