"""Which errors does perseus_compile raise? A leaf module: it imports nothing of the package.

A message says what must hold, what came and what to do. User mistakes raise one of these; our own broken
invariants are asserts.
"""

from __future__ import annotations


class PerseusError(Exception):
    """Base of every error that perseus_compile raises on purpose."""


class OptionError(PerseusError, ValueError):
    """An option that does not exist, or a value that it does not allow."""


class UnsupportedMoE(PerseusError, ValueError):
    """A MoE call or layer that perseus_compile does not cover: shapes, dtypes, routing, or a refused rewrite
    under ``on_unsupported="error"``."""


class BuildError(PerseusError, RuntimeError):
    """A kernel that did not compile or did not load; the message names the log."""


class LaunchError(PerseusError, RuntimeError):
    """A CUDA driver call that failed around a launch."""


class PeerTimeout(PerseusError, RuntimeError):
    """A wait inside a kernel that ran out of time; the output is NaN wherever it needed what did not arrive."""


class VerificationError(PerseusError, RuntimeError):
    """A rewrite whose numbers differ from the region that it replaces, found under ``verify=True``."""


class GroupError(PerseusError, RuntimeError):
    """A process group that is gone, or ranks that do not make the same call; raised on every rank."""
