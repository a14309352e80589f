"""Which choices does a user of the backend have? A leaf module."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from .errors import OptionError

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``perseus_compile.compile`` and of ``torch.compile(..., backend="perseus", options={...})``.

    Attributes:
        inner: name of the compiler that gets the rewritten graph: "inductor", or any name registered with
            torch.compile (``torch._dynamo.list_backends``), such as "eager", "aot_eager", "torch_tensorrt".
        on_unsupported: what happens where a MoE layer is refused: "keep" leaves its own code and logs the reason,
            "error" raises ``UnsupportedMoE`` with the reason.
        verify: at compile time, run every rewrite and the region that it replaces on the same random inputs and raise
            ``VerificationError`` if they differ. Costs memory for one more layer's weights, and for the largest of them
            once more in float32.
        mode: Inductor's mode ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"). A field
            here, since torch.compile refuses ``mode`` together with ``options``. Only with inner="inductor".
        dynamic: passed to torch.compile by ``perseus_compile.compile``; None leaves torch's default there. A backend
            is called after that decision, so torch.compile users pass ``dynamic=`` to torch.compile itself; there the
            option is an error.
        debug: check at run time that every expert id lies in [0, num_experts) and raise ``UnsupportedMoE`` if not;
            the check costs a host synchronisation on a GPU.
    """

    inner: str = "inductor"
    on_unsupported: str = "keep"
    verify: bool = False
    mode: str | None = None
    dynamic: bool | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.inner, str) or not self.inner or self.inner == "perseus":
            raise OptionError(
                "option 'inner' must be the name of a backend registered with torch.compile, and not perseus itself; "
                f"got {self.inner!r}"
            )
        _check_choice("on_unsupported", self.on_unsupported, ("keep", "error"))
        _check_choice("verify", self.verify, (False, True))
        _check_choice("mode", self.mode, _MODES)
        _check_choice("dynamic", self.dynamic, (None, False, True))
        _check_choice("debug", self.debug, (False, True))
        if self.mode not in (None, "default") and self.inner != "inductor":
            raise OptionError(
                f"option 'mode' must be None where option 'inner' is not 'inductor', got mode={self.mode!r} with "
                f"inner={self.inner!r}; leave mode out"
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Options:
        """Options from a mapping, as torch.compile passes them.

        Raises:
            OptionError: an unknown name, or a value that its option does not allow.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise OptionError(f"option {name!r} does not exist, allowed are {', '.join(names)}{hint}")
        return cls(**options)


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # Identity and type, since 0 == False and 1 == True.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise OptionError(f"option {name!r} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
