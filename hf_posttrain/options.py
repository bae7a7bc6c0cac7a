"""Fields of the dataclasses that users fill in: a Config, a section of a recipe, a group of options."""

import dataclasses
from typing import Any


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    default_factory: Any = dataclasses.MISSING,
    kw_only: bool = False,
    **metadata: Any,
) -> Any:
    """Return a dataclass field with a help text, which HfArgumentParser, `init` and the docs show.

    metadata: more that HfArgumentParser reads, such as `choices`.
    """
    metadata["help"] = help
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, kw_only=kw_only, metadata=metadata)
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)
