"""What is one step of recognition? A ``Rule`` says what one ATen operator makes of the meanings of its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch._ops import OpOverload
from torch.fx import Node

from .values import Value

if TYPE_CHECKING:
    from .interpret import Reader

# A derivation answers with the meaning of the node, with a sentence that says why the node has none, or with None
# where the rule does not apply. Sentences are shown to users: they name the node and say what was expected.
Derivation = Callable[["Reader", Node], "Value | str | None"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One step of recognition.

    Attributes:
        name: what the step recognises, unique over all rules.
        targets: the functional overloads it reads; their in-place forms count as these where the write is local.
        derive: the step itself; it reads and never edits.
    """

    name: str
    targets: tuple[OpOverload, ...]
    derive: Derivation


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One way in which people write a part of a MoE layer: rules, and the row of docs/patterns.md.

    Attributes:
        name: as shown by explain(); equal to the file name.
        part: which part of a layer it spells.
        chain: the operators, in order, as a reader of a graph would see them.
        rules: the steps.
        source: who writes it so.
    """

    name: str
    part: str
    chain: str
    rules: tuple[Rule, ...]
    source: str
