"""How does a stage ask what must hold for a layer? One condition after the other, and every answer is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .facts import Check, Stage


class Condition(NamedTuple):
    """What must hold for a layer, and the sentence that refuses the layer where it does not."""

    name: str
    reason: str | None


def ask(conditions: Iterable[Condition], stage: Stage, checks: list[Check]) -> str | None:
    """The first sentence of ``conditions``, None where all hold. Every answer up to that one is added to ``checks``.

    Conditions are taken one by one, so that a generator computes none after the one that fails.
    """
    for name, reason in conditions:
        checks.append(Check(stage=stage, name=name, passed=reason is None, finding=reason or "holds"))
        if reason is not None:
            return reason
    return None
