"""How long does the host take to launch one MoE layer on this GPU?

    python benchmarks/host_time.py --case qwen3-30b --tokens 1 --out bench_host.jsonl

Prints microseconds per part of a call (perseus_compile/testing/bench_host.py says which) and appends JSON rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perseus_compile.testing import bench_host, bench_rows
from perseus_compile.testing.moe_cases import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), default="qwen3-30b")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100, help="of 64 calls of each part")
    parser.add_argument("--commit", help="of the source tree, where git does not know it")
    parser.add_argument("--out", type=Path, default=Path("bench_host.jsonl"), help="JSON rows are appended here")
    options = parser.parse_args()
    rows = bench_host.measure(CASES[options.case], options.tokens, rounds=options.rounds, commit=options.commit)
    bench_rows.append(options.out, rows)
    print(f"{options.case}, T={options.tokens}, {rows[0]['gpu']}: microseconds of the host per call")
    print(f"{'part':10}{'p20':>8}{'median':>8}{'p80':>8}")
    for row in rows:
        print(f"{row['part']:10}" + "".join(f"{row[key] * 1e3:8.2f}" for key in ("ms_p20", "ms_p50", "ms_p80")))


if __name__ == "__main__":
    main()
