"""A command that refuses to be told one thing twice: the option parser alone would keep the last and say nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from outrider.errors import ConfigError

ONCE = ("--model", "--draft-model", "--drafter", "--k", "--rule")
"""Options of which one might want several. Of the others the last one counts, as everywhere on a command line."""
COMPARED = ("--drafter", "--k")


class OnceCommand(TyperCommand):
    """Raises ConfigError when an option of ONCE that holds one value is repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, of typer's own copy or not
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param, times in Counter(order).items():
            name = param.opts[0]
            if times > 1 and name in ONCE and not param.multiple:
                hint = "; outrider bench and outrider verify take several" if name in COMPARED else ""
                raise ConfigError(f"{name} was given {times} times and one value counts here: give it once{hint}")
        return super().parse_args(ctx, args)
