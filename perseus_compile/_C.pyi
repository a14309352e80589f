"""Types of the host extension; the docstrings are in csrc/api. Addresses come from ``Tensor.data_ptr()``."""

def instruction_sets() -> list[str]: ...
def sort_by_expert(
    *, ids: int, id_bytes: int, num_tokens: int, num_choices: int, first_expert: int, num_local: int, table: int
) -> list[tuple[int, int, int]]: ...
def few_rows_linear(
    *,
    rows: int,
    row_index: int,
    weight: int,
    out: int,
    dtype: str,
    offsets: int,
    num_experts: int,
    max_rows: int,
    depth: int,
    num_outs: int,
    expert_stride: int,
    out_stride: int,
    depth_stride: int,
    num_threads: int,
    instruction_set: str = "",
) -> None: ...
def combine(
    *,
    rows: int,
    slots: int,
    weights: int,
    out: int,
    dtype: str,
    weights_dtype: str,
    num_tokens: int,
    num_choices: int,
    width: int,
    num_threads: int,
    instruction_set: str = "",
) -> None: ...
