"""Which PERSEUS_* environment variables are there? One table; a leaf module, and the one place that reads them."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Variable:
    """One environment variable; ``meaning`` and ``default`` are its row in docs/kernels.md."""

    name: str
    meaning: str
    default: str  # in words

    def read(self) -> str | None:
        """Its value now; None where it is unset or empty."""
        return os.environ.get(self.name) or None


CACHE_DIR = Variable(
    "PERSEUS_CACHE_DIR",
    "where compiled kernels and, under `plans`, tuned plans are kept",
    "`perseus_compile/kernels` in `$XDG_CACHE_HOME` or `~/.cache`",
)
NVCC = Variable("PERSEUS_NVCC", "compile with this nvcc instead of NVRTC", "unset")

VARIABLES = (CACHE_DIR, NVCC)
