"""Papers behind options of the methods, as the model card cites them."""

from ..trainer.method import Paper

IPO = Paper(
    "azar2023general", "2310.12036", 2023,
    "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    "Mohammad Gheshlaghi Azar and Mark Rowland and Bilal Piot and Daniel Guo and Daniele Calandriello"
    " and Michal Valko and Rémi Munos",
)
SLIC = Paper(
    "zhao2023slic", "2305.10425", 2023,
    "SLiC-HF: Sequence Likelihood Calibration with Human Feedback",
    "Yao Zhao and Rishabh Joshi and Tianqi Liu and Misha Khalman and Mohammad Saleh and Peter J. Liu",
)
ROBUST = Paper(
    "chowdhury2024provably", "2403.00409", 2024,
    "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    "Sayak Ray Chowdhury and Anush Kini and Nagarajan Natarajan",
)
EXO = Paper(
    "ji2024towards", "2402.00856", 2024,
    "Towards Efficient Exact Optimization of Language Model Alignment",
    "Haozhe Ji and Cheng Lu and Yilin Niu and Pei Ke and Hongning Wang and Jun Zhu and Jie Tang"
    " and Minlie Huang",
)
NCA = Paper(
    "chen2024noise", "2402.05369", 2024,
    "Noise Contrastive Alignment of Language Models with Explicit Rewards",
    "Huayu Chen and Guande He and Lifan Yuan and Ganqu Cui and Hang Su and Jun Zhu",
)
BCO = Paper(
    "jung2024binary", "2404.04656", 2024,
    "Binary Classifier Optimization for Large Language Model Alignment",
    "Seungjae Jung and Gunsoo Han and Daniel Wontae Nam and Kyoung-Woon On",
)
SPPO = Paper(
    "wu2024selfplay", "2405.00675", 2024,
    "Self-Play Preference Optimization for Language Model Alignment",
    "Yue Wu and Zhiqing Sun and Huizhuo Yuan and Kaixuan Ji and Yiming Yang and Quanquan Gu",
)
APO = Paper(
    "doosterlinck2024anchored", "2408.06266", 2024,
    "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    "Karel D'Oosterlinck and Winnie Xu and Chris Develder and Thomas Demeester and Amanpreet Singh"
    " and Christopher Potts and Douwe Kiela and Shikib Mehri",
)
SIMPO = Paper(
    "meng2024simpo", "2405.14734", 2024,
    "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    "Yu Meng and Mengzhou Xia and Danqi Chen",
)
ORPO = Paper(
    "hong2024orpo", "2403.07691", 2024,
    "ORPO: Monolithic Preference Optimization without Reference Model",
    "Jiwoo Hong and Noah Lee and James Thorne",
)
MINILLM = Paper(
    "gu2023minillm", "2306.08543", 2023,
    "MiniLLM: Knowledge Distillation of Large Language Models",
    "Yuxian Gu and Li Dong and Furu Wei and Minlie Huang",
)
LORA = Paper(
    "hu2021lora", "2106.09685", 2021,
    "LoRA: Low-Rank Adaptation of Large Language Models",
    "Edward J. Hu and Yelong Shen and Phillip Wallis and Zeyuan Allen-Zhu and Yuanzhi Li and Shean Wang"
    " and Lu Wang and Weizhu Chen",
)
