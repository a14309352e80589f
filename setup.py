"""Package map and host extension; everything else is in pyproject.toml.

``passes/`` and ``csrc/`` are top-level folders of the repository that install inside the package. setuptools takes
such a map only from here.
"""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

HERE = Path(__file__).parent


def host_sources() -> list[str]:
    """The translation units of ``_C``, relative to the repository as setuptools asks for."""
    return ["csrc/bindings.cpp", *sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/api/*.cpp"))]


setup(
    packages=[
        *find_packages(include=["perseus_compile*"]),
        "perseus_compile.csrc",
        "perseus_compile.passes",
        *("perseus_compile.passes." + name for name in find_packages("passes")),
    ],
    package_dir={
        "perseus_compile": "perseus_compile",
        "perseus_compile.csrc": "csrc",
        "perseus_compile.passes": "passes",
    },
    ext_modules=[
        # Host code only: a C++ compiler is enough, torch headers and CUDA are not used. The OpenMP runtime is the one
        # that torch has loaded already, under the same library name.
        Pybind11Extension(
            "perseus_compile._C",
            host_sources(),
            include_dirs=["csrc", "csrc/include"],
            libraries=["dl"],  # the CUDA driver is opened when it is first needed
            cxx_std=20,
            extra_compile_args=["-O3", "-fopenmp", "-Wall", "-Wextra"],
            extra_link_args=["-fopenmp"],
        )
    ],
)
