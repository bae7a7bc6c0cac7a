"""The check of layouts, which every trainer repeats before its first batch, once for each model in a test process.

A third of the time of a test that trains is this check. It is skipped where the same check has passed before in this
process: the same weights and classes, and the same functions of `hf_posttrain.scoring`, so that a test that replaces
one of them is checked again.
"""

import functools
import hashlib
import importlib
import pkgutil

import torch
from torch import nn

from hf_posttrain import scoring
from hf_posttrain.scoring import forward

NAMES = [module.name for module in pkgutil.iter_modules(scoring.__path__) if module.name != "kernels"]
MODULES = [importlib.import_module(f"{scoring.__name__}.{name}") for name in NAMES]
"""Without the Triton kernels, which run on a GPU alone."""


def checked_once(trusted_layout):
    """Wrap `choose_layout.trusted_layout`."""
    passed = set()

    @functools.wraps(trusted_layout)
    def wrapper(models, layout, explicit, device, max_length, pictures, teachers):
        args = models, layout, explicit, device, max_length, pictures, teachers
        if pictures is not None or not all(map(plain, models)):
            return trusted_layout(*args)
        functions = tuple(id(value) for module in MODULES for value in vars(module).values())
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        of_teachers = [any(model is teacher for teacher in teachers) for model in models]
        key = layout, max_length, str(of_teachers), autocast, functions, tuple(map(fingerprint, models))
        if key in passed:
            return layout
        found = trusted_layout(*args)
        if found == layout and tuple(map(fingerprint, models)) == key[-1]:
            passed.add(key)
        return found

    return wrapper


def plain(model):
    """Return whether a model is small and whole on CPU, without an engine around it, quantised weights or hooks."""
    weights = [*model.parameters()]
    known = {type(weight) for weight in weights} <= {nn.Parameter}
    small = sum(weight.numel() for weight in weights) < 2**20
    hooks = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    on_cpu = {weight.device.type for weight in weights} == {"cpu"}
    return model is forward.unwrapped(model) and known and small and not hooks and on_cpu


def fingerprint(model):
    """What the check depends on: weights, classes and their forwards, and settings."""
    digest = hashlib.sha1()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.numel() else b"")
    inner = forward.causal_lm(model)
    parts = []
    for part in model.modules():
        forward_of_part = vars(part).get("forward")
        replaced = getattr(forward_of_part, "__func__", forward_of_part)
        parts.append((type(part), id(type(part).forward), id(replaced), part.training))
    settings = inner.config.to_json_string(), inner.config.get_text_config()._attn_implementation
    own = getattr(inner, forward.OWN_LOGITS, False), str(getattr(model, "peft_config", None))
    own += tuple(str(vars(part).get("_active_adapter")) for part in model.modules())
    return digest.hexdigest(), hash(tuple(parts)), settings, own
