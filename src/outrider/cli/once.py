"""A command that refuses to be told one thing twice: the option parser alone would keep the last and say nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from outrider.errors import ConfigError

COMPARED = ("--drafter", "--k")
"""Options of which other commands take several."""


class OnceCommand(TyperCommand):
    """Raises ConfigError when an option that holds one value is repeated. A flag said twice says the same, and may."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, of typer's own copy or not
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param, times in Counter(order).items():
            if times > 1 and _holds_one_value(param):
                name = "/".join((param.opts[0], *param.secondary_opts))
                hint = "; outrider bench and outrider verify take several" if name in COMPARED else ""
                raise ConfigError(f"{name} was given {times} times and one value counts here: give it once{hint}")
        return super().parse_args(ctx, args)


def _holds_one_value(param: Any) -> bool:
    """Whether a click parameter is an option that is neither a list nor a flag without a contrary."""
    if param.param_type_name != "option" or param.multiple:
        return False
    return bool(param.secondary_opts) or not param.is_flag
