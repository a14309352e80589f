"""Options: what is allowed, and what the errors say."""

from __future__ import annotations

import pytest
import torch

import perseus_compile
from perseus_compile import OptionError, Options

BAD_OPTIONS = {
    "unknown": (
        {"verfy": True},
        "option 'verfy' does not exist, allowed are inner, on_unsupported, verify, mode, dynamic, debug; "
        "did you mean 'verify'?",
    ),
    "bad value": (
        {"on_unsupported": "raise"},
        "option 'on_unsupported' must be one of 'keep', 'error', got 'raise'",
    ),
    "bool is not an int": ({"verify": 1}, "option 'verify' must be one of False, True, got 1"),
    "mode": (
        {"mode": "fast"},
        "option 'mode' must be one of None, 'default', 'reduce-overhead', 'max-autotune', "
        "'max-autotune-no-cudagraphs', got 'fast'",
    ),
    "mode without inductor": (
        {"mode": "max-autotune", "inner": "eager"},
        "option 'mode' must be None where option 'inner' is not 'inductor', got mode='max-autotune' with "
        "inner='eager'; leave mode out",
    ),
    "itself": (
        {"inner": "perseus"},
        "option 'inner' must be the name of a backend registered with torch.compile, and not perseus itself; "
        "got 'perseus'",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_errors_name_the_option_what_is_allowed_and_what_came(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(OptionError) as error:
        Options.from_mapping(options)
    assert str(error.value) == message
    with pytest.raises(OptionError) as error:
        perseus_compile.compile(torch.sin, **options)
    assert str(error.value) == message


def test_unknown_inner_backend_is_told_at_once() -> None:
    message = (
        r"^option 'inner' must name a backend registered with torch.compile \(.*inductor.*\), got 'no_such_backend'; "
        r"import the package that registers it first$"
    )
    with pytest.raises(OptionError, match=message):
        perseus_compile.compile(torch.sin, inner="no_such_backend")


def test_torch_compile_passes_options_and_mode() -> None:
    """A bad option reaches the user through torch.compile as well."""
    x = torch.ones(3)
    with pytest.raises(Exception, match="option 'verify' must be one of False, True, got 3"):
        torch.compile(torch.sin, backend=perseus_compile.perseus, options={"verify": 3})(x)
    with pytest.raises(Exception, match="option 'mode' must be one of"):
        torch.compile(torch.sin, backend=perseus_compile.perseus, mode="fast")(x)


def test_options_are_frozen() -> None:
    options = Options()
    with pytest.raises(AttributeError):
        options.verify = True  # type: ignore[misc]


def test_dynamic_is_no_option_of_a_backend() -> None:
    """It would be accepted and have no effect: torch.compile has decided before it calls the backend."""
    message = (
        "option 'dynamic' must be left out here, since a backend is called after that decision, got True; pass "
        "dynamic= to torch.compile itself, or use perseus_compile.compile"
    )
    with pytest.raises(Exception, match=message):
        torch.compile(torch.sin, backend=perseus_compile.perseus, options={"dynamic": True})(torch.ones(3))
