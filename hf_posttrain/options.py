"""Fields of the dataclasses that hold user options: Configs, sections of a recipe and groups of options."""

import dataclasses
from typing import Any, TypeAlias

OptionValues: TypeAlias = Any
"""An object with the options of a Config as attributes: a Config, or a namespace that is checked before one is built.
"""


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    default_factory: Any = dataclasses.MISSING,
    kw_only: bool = False,
    **metadata: object,
) -> Any:
    """Return a dataclass field with a help text, which HfArgumentParser, `init` and the documentation print.

    Args:
        default: Default value of the field.
        help: Help text.
        default_factory: As in `dataclasses.field`, instead of `default`.
        kw_only: As in `dataclasses.field`.
        metadata: Other keys that HfArgumentParser reads, such as `choices`.
    """
    metadata["help"] = help
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, kw_only=kw_only, metadata=metadata)
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)
