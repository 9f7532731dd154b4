#!/usr/bin/env python3
"""Prints the tables of docs/performance.md from the JSON of `pullback bench` and of scan.py.

    build/tools/pullback/pullback bench --json bench.json
    scripts/performance_tables.py bench.json
    scripts/scan.py entmax --json scan.json && scripts/performance_tables.py scan.json
"""

import json
import sys

DTYPES = ("float32", "bfloat16")


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def rate_text(result: dict) -> str:
    seconds = result["seconds"]["median"]
    if result["flops"] > 0:
        return f"{result['flops'] / seconds / 1e9:.0f} GFLOP/s"
    rate = result["bytes"] / seconds
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def cell(result: dict) -> str:
    share = result.get("share_of_ceiling")
    percent = f", {share:.0%}" if share is not None else ""
    return f"{time_text(result['seconds']['median'])}, {rate_text(result)}{percent}"


def print_scan(report: dict[str, list[float]]) -> None:
    """Of "SIZE torch.DTYPE WHAT": a table for what has the same sizes; f32; bf16, each in µs."""
    times: dict[str, dict[str, dict[str, str]]] = {}  # by what, size and dtype
    for key, passes in report.items():
        size, rest = key.split(" torch.", 1)
        dtype, what = rest.split(" ", 1)
        text = " / ".join(f"{microseconds:.0f}" for microseconds in passes)
        times.setdefault(what, {}).setdefault(size, {})[dtype] = text
    tables: dict[tuple[str, ...], list[str]] = {}
    for what, by_size in times.items():
        tables.setdefault(tuple(by_size), []).append(what)
    for sizes, columns in tables.items():
        print(f"\n| f32; bf16 | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
        for size in sizes:
            cells = [
                "; ".join(times[what][size][dtype] for dtype in DTYPES if dtype in times[what][size])
                for what in columns
            ]
            print(f"| {size} | {' | '.join(cells)} |")


def main() -> None:
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        if "results" not in report:
            print_scan(report)
            continue
        rows: dict[tuple[str, str, str], dict[str, dict]] = {}
        for result in report["results"]:
            key = (result["op"], result["case"], result["dtype"])
            rows.setdefault(key, {})[result["pass"]] = result
        op = ""
        for (row_op, case, dtype), passes in rows.items():
            if row_op != op:
                op = row_op
                print(f"\n### {op}\n\n| case | dtype | forward | backward |\n| --- | --- | --- | --- |")
            cells = [cell(passes[name]) if name in passes else "" for name in ("forward", "backward")]
            print(f"| {case} | {dtype} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
