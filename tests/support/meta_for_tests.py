"""The meta device in the place of a GPU: tensors without values. What reads one, or mixes devices, raises."""

import contextlib

import torch


def allow_meta(monkeypatch):
    """torch knows no autocast of the meta device: there it is never on."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def is_enabled(device=None):
        return device != "meta" and (enabled() if device is None else enabled(device))

    def context(device, *args, **kwargs):
        return contextlib.nullcontext() if device == "meta" else autocast(device, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", is_enabled)
    monkeypatch.setattr(torch, "autocast", context)
