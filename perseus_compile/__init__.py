"""perseus_compile: a torch.compile backend that rewrites Mixture-of-Experts layers into one call each."""

from importlib.metadata import PackageNotFoundError, version

from . import checked_ids, experts_list, experts_parallel, ops  # noqa: F401  (they register torch.ops.perseus)
from .backend import compile, perseus
from .errors import (
    BuildError,
    GroupError,
    LaunchError,
    OptionError,
    PeerTimeout,
    PerseusError,
    UnsupportedMoE,
    VerificationError,
)
from .explain import explain
from .jit.moe_kernel import check
from .options import Options
from .prepare import prepare

try:
    __version__ = version("perseus_compile")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "BuildError",
    "GroupError",
    "LaunchError",
    "OptionError",
    "Options",
    "PeerTimeout",
    "PerseusError",
    "UnsupportedMoE",
    "VerificationError",
    "__version__",
    "check",
    "compile",
    "explain",
    "perseus",
    "prepare",
]
