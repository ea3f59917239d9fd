"""What docstrings say of each argument, as tools read them that parse Google style."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import docstring_parser


def argument_texts(thing: Any) -> dict[str, str]:
    """Argument -> what the docstring says of it; of a dataclass, its attributes."""
    own = thing.__init__ if isinstance(thing, type) and not dataclasses.is_dataclass(thing) else thing
    parsed = docstring_parser.parse(inspect.cleandoc(own.__doc__ or ""), docstring_parser.DocstringStyle.GOOGLE)
    return {one.arg_name.lstrip("*"): (one.description or "").strip() for one in parsed.params}


def argument_names(thing: Any) -> list[str]:
    """Arguments in order, without `self` and `**kwargs`."""
    parameters = inspect.signature(thing).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
