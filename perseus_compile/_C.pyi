"""Types of the host extension; the docstrings are in csrc/api. Addresses come from ``Tensor.data_ptr()``."""

def instruction_sets() -> list[str]: ...
def sort_by_expert(
    *, ids: int, id_bytes: int, num_tokens: int, num_choices: int, first_expert: int, num_local: int, table: int
) -> list[tuple[int, int, int]]: ...

class CpuExperts:
    def __init__(
        self,
        *,
        dtype: str,
        activation: str,
        interleaved: bool,
        alpha: float,
        limit: float,
        first_expert: int,
        num_local: int,
        max_rows: int,
        instruction_set: str = "",
    ) -> None: ...
    def linear(
        self,
        *,
        rows: int,
        row_index: int,
        offsets: int,
        weight: int,
        strides: tuple[int, ...],
        num_outs: int,
        depth: int,
        out: int,
        num_threads: int,
    ) -> None: ...
    def activate(self, *, hidden: int, active: int, num_rows: int, width: int, num_threads: int) -> None: ...
    def combine(
        self,
        *,
        rows: int,
        slots: int,
        weights: int,
        weights_are_float32: bool,
        out: int,
        num_tokens: int,
        num_choices: int,
        width: int,
        num_threads: int,
    ) -> None: ...
    def forward(
        self,
        *,
        x: int,
        ids: int,
        id_bytes: int,
        weights: int,
        weights_are_float32: bool,
        gate_up: int,
        gate_up_strides: tuple[int, ...],
        gate_up_bias: int,
        down: int,
        down_strides: tuple[int, ...],
        down_bias: int,
        out: int,
        num_tokens: int,
        num_choices: int,
        model_width: int,
        expert_width: int,
        num_threads: int,
    ) -> bool: ...

class ControlBlocks:
    def __init__(
        self, *, words: int, stride_bytes: int, capacity: int, error: int, driver: str
    ) -> None: ...
    @property
    def num_used(self) -> int: ...
    @property
    def expired(self) -> bool: ...
    def address(self, stream: int) -> int: ...

class KernelLauncher:
    def __init__(
        self,
        *,
        function: int,
        context: int,
        params: bytes,
        patches: list[tuple[int, int, int]],
        tensor_maps: list[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
        num_addresses: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        control: ControlBlocks | None = None,
        driver: str,
    ) -> None: ...
    def launch(self, stream: int, *addresses: int) -> bool: ...
