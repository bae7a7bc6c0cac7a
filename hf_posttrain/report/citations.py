"""The papers behind a method and its options, as the model card cites them.

    cited(method, arguments, adapter) -> papers, the method's own first
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv."""

    key: str
    arxiv: str
    year: int
    title: str
    authors: tuple[str, ...]

    @property
    def url(self) -> str:
        """Its page."""
        return f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def bibtex(self) -> str:
        """Its entry."""
        fields = {
            "title": f"{{{self.title}}}", "author": " and ".join(self.authors), "year": str(self.year),
            "eprint": self.arxiv, "archivePrefix": "arXiv", "url": self.url,
        }  # fmt: skip
        body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
        return f"@article{{{self.key},\n{body}\n}}"


DPO = Paper(
    "rafailov2023direct", "2305.18290", 2023,
    "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    ("Rafael Rafailov", "Archit Sharma", "Eric Mitchell", "Stefano Ermon", "Christopher D. Manning", "Chelsea Finn"),
)  # fmt: skip
KTO = Paper(
    "ethayarajh2024kto", "2402.01306", 2024, "KTO: Model Alignment as Prospect Theoretic Optimization",
    ("Kawin Ethayarajh", "Winnie Xu", "Niklas Muennighoff", "Dan Jurafsky", "Douwe Kiela"),
)  # fmt: skip
KD = Paper(
    "hinton2015distilling", "1503.02531", 2015, "Distilling the Knowledge in a Neural Network",
    ("Geoffrey Hinton", "Oriol Vinyals", "Jeff Dean"),
)  # fmt: skip
GKD = Paper(
    "agarwal2023onpolicy", "2306.13649", 2023,
    "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    ("Rishabh Agarwal", "Nino Vieillard", "Yongchao Zhou", "Piotr Stanczyk", "Sabela Ramos", "Matthieu Geist",
     "Olivier Bachem"),
)  # fmt: skip
MINILLM = Paper(
    "gu2023minillm", "2306.08543", 2023, "MiniLLM: Knowledge Distillation of Large Language Models",
    ("Yuxian Gu", "Li Dong", "Furu Wei", "Minlie Huang"),
)  # fmt: skip
LORA = Paper(
    "hu2021lora", "2106.09685", 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
    ("Edward J. Hu", "Yelong Shen", "Phillip Wallis", "Zeyuan Allen-Zhu", "Yuanzhi Li", "Shean Wang", "Lu Wang",
     "Weizhu Chen"),
)  # fmt: skip
IPO = Paper(
    "azar2023general", "2310.12036", 2023,
    "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    ("Mohammad Gheshlaghi Azar", "Mark Rowland", "Bilal Piot", "Daniel Guo", "Daniele Calandriello", "Michal Valko",
     "Rémi Munos"),
)  # fmt: skip
SIMPO = Paper(
    "meng2024simpo", "2405.14734", 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    ("Yu Meng", "Mengzhou Xia", "Danqi Chen"),
)  # fmt: skip
ORPO = Paper(
    "hong2024orpo", "2403.07691", 2024, "ORPO: Monolithic Preference Optimization without Reference Model",
    ("Jiwoo Hong", "Noah Lee", "James Thorne"),
)  # fmt: skip
SLIC = Paper(
    "zhao2023slic", "2305.10425", 2023, "SLiC-HF: Sequence Likelihood Calibration with Human Feedback",
    ("Yao Zhao", "Rishabh Joshi", "Tianqi Liu", "Misha Khalman", "Mohammad Saleh", "Peter J. Liu"),
)  # fmt: skip
ROBUST = Paper(
    "chowdhury2024provably", "2403.00409", 2024,
    "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    ("Sayak Ray Chowdhury", "Anush Kini", "Nagarajan Natarajan"),
)  # fmt: skip
EXO = Paper(
    "ji2024towards", "2402.00856", 2024, "Towards Efficient Exact Optimization of Language Model Alignment",
    ("Haozhe Ji", "Cheng Lu", "Yilin Niu", "Pei Ke", "Hongning Wang", "Jun Zhu", "Jie Tang", "Minlie Huang"),
)  # fmt: skip
NCA = Paper(
    "chen2024noise", "2402.05369", 2024, "Noise Contrastive Alignment of Language Models with Explicit Rewards",
    ("Huayu Chen", "Guande He", "Lifan Yuan", "Ganqu Cui", "Hang Su", "Jun Zhu"),
)  # fmt: skip
BCO = Paper(
    "jung2024binary", "2404.04656", 2024, "Binary Classifier Optimization for Large Language Model Alignment",
    ("Seungjae Jung", "Gunsoo Han", "Daniel Wontae Nam", "Kyoung-Woon On"),
)  # fmt: skip
SPPO = Paper(
    "wu2024selfplay", "2405.00675", 2024, "Self-Play Preference Optimization for Language Model Alignment",
    ("Yue Wu", "Zhiqing Sun", "Huizhuo Yuan", "Kaixuan Ji", "Yiming Yang", "Quanquan Gu"),
)  # fmt: skip
APO = Paper(
    "doosterlinck2024anchored", "2408.06266", 2024,
    "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    ("Karel D'Oosterlinck", "Winnie Xu", "Chris Develder", "Thomas Demeester", "Amanpreet Singh",
     "Christopher Potts", "Douwe Kiela", "Shikib Mehri"),
)  # fmt: skip

METHODS = {"dpo": DPO, "kto": KTO, "kd": KD, "opd": GKD}
LOSSES = {
    "ipo": IPO, "ipo_sum": IPO, "hinge": SLIC, "robust": ROBUST, "exo_pair": EXO, "nca_pair": NCA, "bco_pair": BCO,
    "bco": BCO, "sppo_hard": SPPO, "apo_zero": APO, "apo_down": APO, "apo_zero_unpaired": APO, "simpo": SIMPO,
    "orpo": ORPO, "policy_gradient": MINILLM,
}  # fmt: skip
"""loss_type: whose loss it is, where that is not the method's own paper."""


def cited(method: str, arguments: Mapping[str, Any], lora: bool) -> list[Paper]:
    """The method's paper, those of its loss_type, and LoRA's."""
    given = arguments.get("loss_type") or []
    losses = [given] if isinstance(given, str) else given
    papers = [METHODS.get(method), *(LOSSES.get(loss) for loss in losses), LORA if lora else None]
    return list(dict.fromkeys(paper for paper in papers if paper))
