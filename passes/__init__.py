"""Stages MATCH and REWRITE of perseus_compile: reads an ATen view, edits Dynamo's graph.

The folder ships as ``perseus_compile.passes``.
``perseus_compile.backend`` chains the stages; their order is written there.
"""

if __name__ != "perseus_compile.passes":
    raise ImportError(
        f"passes/ must be imported as perseus_compile.passes, got {__name__}; "
        "install the project (pip install -e .) and import perseus_compile.passes"
    )
