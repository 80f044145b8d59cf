"""Every option of the D3TREE algorithm, declared once.

An option can be given, in order of precedence, as a command-line flag (``--speculative-d3tree-max-rows 16``),
as a keyword of ``sglang.Engine`` (``speculative_d3tree_max_rows=16``) or as an environment variable
(``SGLANG_D3TREE_MAX_ROWS=16``). The values that were given travel on the ``ServerArgs`` record, which SGLang
pickles to its child processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

POLICIES = ("d3tree", "ddtree", "caddtree", "chain")
HEADS = ("auto", "none", "linear", "path")

_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}

# Set on the ServerArgs record next to SGLang's own bookkeeping attributes, which survive pickling.
_GIVEN_ATTRIBUTE = "_d3tree_given"


@dataclass(frozen=True)
class D3TreeOptions:
    """The options as the worker reads them; see ``OPTIONS`` for meaning and limits."""

    policy: str = "d3tree"
    max_rows: int = 32
    topk: int = 0
    threshold: float = 0.0
    tree_rows: int = 0
    min_rows: int = 1
    adaptive_horizon: bool = True
    cost_profile: str = "auto"
    head: str = "auto"

    @property
    def rows(self) -> int:
        """Rows of a request's candidate tree at most."""
        return min(self.tree_rows, self.max_rows) if self.tree_rows else self.max_rows

    def replace(self, **changes: Any) -> D3TreeOptions:
        """A validated copy with ``changes`` applied.

        Raises:
            ValueError: for an unknown option or a value outside its limits, naming the flag.
        """
        changed = dataclasses.replace(self, **{n: option_named(n).parse(v) for n, v in changes.items()})
        if changed.min_rows > changed.max_rows:
            raise ValueError(
                f"{option_named('min_rows').flag} {changed.min_rows} is more than {option_named('max_rows').flag} "
                f"{changed.max_rows}."
            )
        return changed


@dataclass(frozen=True)
class Option:
    """One option: its name, type, limits and help text."""

    name: str
    kind: type
    help: str
    limits: Callable[[Any], str | None]
    choices: tuple[str, ...] | None = None
    runtime: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.keyword.replace("_", "-")

    @property
    def keyword(self) -> str:
        return f"speculative_d3tree_{self.name}"

    @property
    def environment(self) -> str:
        return f"SGLANG_D3TREE_{self.name.upper()}"

    @property
    def default(self) -> Any:
        return next(f.default for f in dataclasses.fields(D3TreeOptions) if f.name == self.name)

    def to_wire(self, value: Any) -> int | float:
        """A checked value as ``/set_internal_state`` carries it, which is numbers only: a choice by its position."""
        parsed = self.parse(value)
        return self.choices.index(parsed) if self.choices else parsed

    def from_wire(self, value: int | float) -> Any:
        """The inverse of ``to_wire``.

        Raises:
            ValueError: for a position without a choice, or a value outside the limits.
        """
        if self.choices is None:
            return self.parse(value)
        if value not in range(len(self.choices)):
            known = ", ".join(f"{index} = {choice}" for index, choice in enumerate(self.choices))
            raise ValueError(f"{self.keyword} must be one of {known}; got {value!r}.")
        return self.choices[int(value)]

    def parse(self, value: Any) -> Any:
        """Convert and check one value.

        Raises:
            ValueError: naming the flag, the value and what would be accepted.
        """
        try:
            # bool is an int to Python, but `max_rows=True` is a mistake.
            if isinstance(value, bool) and self.kind is not bool:
                raise TypeError
            parsed = _WORDS[value.lower()] if self.kind is bool and isinstance(value, str) else self.kind(value)
            if self.kind is int and not isinstance(value, str) and parsed != value:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{self.flag} expects {self.kind.__name__}, got {value!r}.") from None
        complaint = self.limits(parsed)
        if complaint:
            raise ValueError(f"{self.flag} {complaint}, got {value!r}.")
        return parsed


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"must be one of {', '.join(choices)}"


def _between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def _anything(value: Any) -> str | None:
    return None


OPTIONS: tuple[Option, ...] = (
    Option(
        "policy",
        str,
        "Which draft tree is verified: d3tree (survival-pruned tree), ddtree (best-first, fixed rows), "
        "caddtree (best-first, stops where the expected speed peaks) or chain (DFlash).",
        _one_of(POLICIES),
        choices=POLICIES,
        runtime=True,
    ),
    Option(
        "max_rows",
        int,
        "Most rows one request may put into a verify pass, its anchor included (32 rows = 31 draft nodes).",
        _between(1, 1024),
    ),
    Option(
        "topk",
        int,
        "Candidate tokens taken from the draft distribution at every depth; 0 takes as many as the tree-size head was "
        "trained with, 8 without a head.",
        _between(0, 256),
    ),
    Option(
        "threshold",
        float,
        "Drop draft nodes whose predicted survival (product along their path) is below this; 0 keeps all. "
        "Used by the d3tree policy.",
        _between(0.0, 1.0),
        runtime=True,
    ),
    Option(
        "tree_rows",
        int,
        "Rows of a request's candidate tree, its anchor included, as far as max-rows allows; 0 means max-rows. Unlike "
        "max-rows it can be changed on a running server.",
        _between(0, 1024),
        runtime=True,
    ),
    Option(
        "min_rows",
        int,
        "Rows every request gets in a drafted round before the batch competes for the rest, its anchor included. "
        "Used by the d3tree policy.",
        _between(1, 1024),
    ),
    Option(
        "adaptive_horizon",
        bool,
        "Draft fewer positions than the block allows where costs and survival say that this is faster. Used by the "
        "d3tree policy, which may decode plainly either way.",
        _anything,
        runtime=True,
    ),
    Option(
        "cost_profile",
        str,
        "Measured costs to decide by: auto (measured at the first start and cached), none (verify all that the policy "
        "wants) or the path of a file made by d3tree calibrate.",
        lambda value: None if value else "must be auto, none or a path",
    ),
    Option(
        "head",
        str,
        "Tree-size head beside the drafter that predicts survival for the d3tree policy: linear, path, auto (the best "
        "there is, path first) or none (the draft's own probabilities).",
        _one_of(HEADS),
        choices=HEADS,
    ),
)


def option_named(name: str) -> Option:
    """The option called ``name``; ValueError lists the known ones."""
    for option in OPTIONS:
        if option.name == name:
            return option
    raise ValueError(f"Unknown D3TREE option {name!r}; known: {', '.join(o.name for o in OPTIONS)}.")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add every option's flag to SGLang's server parser, unset by default so that the environment counts."""
    group = parser.add_argument_group("D3TREE speculative decoding (sglang-d3tree)")
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            # Values are checked when the server's arguments are resolved: a wrong one then gets one sentence
            # however it was given, and `--help` still lists the choices.
            type=str,
            default=None,
            metavar="{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper(),
            help=f"{option.help} Default: {option.default}. Environment: {option.environment}.",
        )


def take_from_namespace(args: argparse.Namespace) -> dict[str, Any]:
    """The options given on the command line, by option name."""
    values = {option.name: getattr(args, option.keyword, None) for option in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def take_from_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the options from an ``Engine`` keyword dict and return them by option name."""
    values = {option.name: kwargs.pop(option.keyword, None) for option in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def remember(server_args: Any, given: Mapping[str, Any]) -> None:
    """Store the given options on a ``ServerArgs`` record."""
    setattr(server_args, _GIVEN_ATTRIBUTE, dict(given))


def options_of(server_args: Any) -> D3TreeOptions:
    """Resolve the options of a server: given values, then the environment, then defaults.

    Raises:
        ValueError: naming the flag of a value that is not acceptable.
    """
    given = getattr(server_args, _GIVEN_ATTRIBUTE, {})
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.name in given:
            values[option.name] = given[option.name]
        elif option.environment in os.environ:
            values[option.name] = os.environ[option.environment]
    return D3TreeOptions().replace(**values)
