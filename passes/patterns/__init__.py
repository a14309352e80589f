"""Every spelling that the matcher reads, in the order in which its rules are tried.

Adding one is one file and one line here.
"""

from __future__ import annotations

from ..rule import Rule, Spelling
from .all_to_all import ALL_TO_ALL
from .batched_mm import BATCHED_MM
from .by_token import BY_TOKEN
from .choices import CHOICES
from .dense_experts import DENSE_EXPERTS
from .einsum import EINSUM
from .expert_hits import EXPERT_HITS
from .expert_loop import EXPERT_LOOP
from .expert_weights import EXPERT_WEIGHTS
from .experts import EXPERTS
from .grouped_mm import grouped_mm
from .own_choices import OWN_CHOICES
from .received import RECEIVED
from .router_choice import ROUTER_CHOICE
from .router_scores import ROUTER_SCORES
from .sentinels import SENTINELS


def spellings() -> tuple[Spelling, ...]:
    """All spellings. A function, since some operators exist only once the library that owns them is imported."""
    # Before CHOICES, which reads any [W, L] table that is made flat as choices.
    on_ranks = (ALL_TO_ALL, RECEIVED, OWN_CHOICES)
    of_rows = (CHOICES, SENTINELS, grouped_mm(), BATCHED_MM, EINSUM, BY_TOKEN, EXPERTS)
    of_routers = (ROUTER_SCORES, ROUTER_CHOICE)
    by_expert = (EXPERT_HITS, EXPERT_WEIGHTS, EXPERT_LOOP, DENSE_EXPERTS)
    return (*on_ranks, *of_rows, *of_routers, *by_expert)


def all_rules() -> tuple[Rule, ...]:
    return tuple(rule for spelling in spellings() for rule in spelling.rules)
