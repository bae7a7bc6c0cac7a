"""Metric for `hf-posttrain eval --metrics recipes/real/well_formed`: the share of answers that end in `#### number`."""

import re

import datasets
import evaluate


class WellFormed(evaluate.Metric):
    """Share of answers whose last line is `#### number`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__, citation="", features=datasets.Features({"predictions": text, "references": text})
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        formed = [bool(re.search(r"^#### -?[\d.,]+\s*\Z", text, re.MULTILINE)) for text in predictions]
        return {"well_formed": sum(formed) / len(formed)}
