"""The names of TRL in docs/guides/from_trl.md are those of the installed TRL, and none is missing."""

import dataclasses
import importlib
import pkgutil
from importlib.util import find_spec

import pytest
from hub_for_tests import REPOSITORY
from test_docs import CONFIGS, code, table
from transformers import TrainingArguments

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.real
PAGE = (REPOSITORY / "docs" / "guides" / "from_trl.md").read_text(encoding="utf-8")
VERSION = "1.16."


@pytest.fixture(autouse=True)
def _version():
    if not trl.__version__.startswith(VERSION):
        pytest.skip(f"the page is about TRL {VERSION}x, here is {trl.__version__}")


def config(module, name):
    return getattr(importlib.import_module(f"trl.{module}"), name)


def fields(*configs):
    return {field.name for one in configs for field in dataclasses.fields(one)}


def test_fields():
    distillation = config("trainer.distillation_config", "DistillationConfig")
    experimental = [config(f"experimental.{name}", f"{name.upper()}Config") for name in ("gkd", "cpo", "orpo")]
    theirs = fields(trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.RewardConfig, distillation, *experimental)
    served = config("experimental.server_distillation", "ServerDistillationConfig")
    named_in_part = fields(served, config("experimental.gold", "GOLDConfig"), config("experimental.tpo", "TPOConfig"))
    of_the_model = {"use_kernels"}  # an argument of from_pretrained, in model_init_kwargs
    ours = {name for one in CONFIGS.values() for name in one.__dataclass_fields__}
    rows = table(PAGE, "## Fields")
    named = {one for cells in rows for one in code(cells[0])}
    assert named <= theirs | named_in_part | of_the_model, named - theirs - named_in_part
    missing = theirs - fields(TrainingArguments) - named
    assert not missing
    for cells in rows:
        assert not cells[1].startswith("the same") or set(code(cells[0])) <= ours | of_the_model, cells


def exists(name):
    """Whether TRL has a class, or a module of its experimental package: SFTTrainer, experimental.gkd, gkd."""
    if "." not in name:
        return hasattr(trl, name) or find_spec(f"trl.experimental.{name}") is not None
    module, _, attribute = f"trl.{name}".rpartition(".")
    if find_spec(module) is None:
        return False
    if attribute.islower():
        return find_spec(f"trl.{name}") is not None
    return hasattr(importlib.import_module(module), attribute)


def test_classes():
    for cells in table(PAGE, "## 1. Change the imports"):
        names = [name for name in code(cells[0]) if "=" not in name and name not in ("lmbda", "experimental")]
        module = names[0].rpartition(".")[0]
        for name in names:
            # `experimental.cpo.CPOTrainer`, `CPOConfig`: in the same module
            full = f"{module}.{name}" if module and "." not in name else name
            assert exists(full) != ("removed in 1.16" in cells[0]), full
    for name in ("experimental.nash_md", "experimental.xpo", "experimental.judges", "BestOfNSampler"):
        assert not exists(name), name


def test_every_trainer_is_named():
    package = importlib.import_module("trl.experimental")
    modules = [module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg]
    assert len(modules) > 10
    trainers = [name for name in dir(trl) if name.endswith("Trainer")]
    missing = [name for name in [*modules, *trainers] if f"`{name}`" not in PAGE and f"experimental.{name}" not in PAGE]
    assert not missing
