#!/usr/bin/env python3
"""Pullback beside its rivals, and attention's bars, from what gpu_bench.sh left in FOLDER: bench*.json,
rivals*.json, and plans_*.json with the times of plans.

gpu_compare.py FOLDER             a line a result
gpu_compare.py --tables FOLDER    attention's tables of docs/performance.md
"""

import argparse
import glob
import json
import os
import re


def results_of(folder, pattern):
    results = []
    for path in sorted(glob.glob(os.path.join(folder, pattern))):
        with open(path) as file:
            results += json.load(file)["results"]
    return results


def load(folder):
    """Our results, and the rivals' by what they are a result of."""
    rivals = {}
    for r in results_of(folder, "rivals*.json"):
        rivals.setdefault((r["op"], r["case"], r["dtype"], r["pass"]), []).append(r)
    return results_of(folder, "bench*.json"), rivals


def bar_of(case, dtype, which, rival):
    """How many times as fast as the rival attention has to be; None: no bar."""
    head_dim = int(re.search(r" D(\d+)", case)[1])
    if rival == "efficient":
        if which == "forward":
            return 1.7
        return 1.5 if dtype == "f32" else 2 if "dropout" in case else 3 if head_dim >= 192 else 1.8
    length = int(re.search(r" S(\d+)", case)[1])
    dense = re.fullmatch(r"\S+ \S+ \S+ \S+( causal)?", case)
    return 0.8 if rival == "FA2" and which == "backward" and head_dim in (64, 128) and length >= 2048 and dense else None


def compare(folder):
    results, rivals = load(folder)
    # Which block masks are held to.
    dense = {(r["case"], r["dtype"], r["pass"]): r["seconds"]["median"] for r in results if r["op"] == "attention"}
    held, missed = 0, []

    def judge(name, ratio, bar, holds):
        nonlocal held
        held += holds
        if not holds:
            missed.append(f"{name}: {ratio:.2f} (bar {bar})")

    print(f"{'problem':58} {'Pullback':>10} {'of copy':>8}  rivals: time, times ours")
    for r in results:
        ours = r["seconds"]["median"]
        name = f"{r['op']} {r['case']} {r['dtype']} {r['pass']}"
        others = []
        for o in rivals.get((r["op"], r["case"], r["dtype"], r["pass"]), []):
            ratio = o["seconds"] / ours
            bar = bar_of(r["case"], r["dtype"], r["pass"], o["rival"]) if r["op"] == "attention" else None
            others.append(f"{o['rival']} {o['seconds'] * 1e3:.3f} ms {ratio:.2f}×" + (f" [{bar}]" if bar else ""))
            if bar:
                judge(f"{name} / {o['rival']}", ratio, bar, ratio >= bar)
        masked = re.match(r"(.*) 25 % of blocks of (64|128)$", r["case"])
        if masked and (masked[1], r["dtype"], r["pass"]) in dense:
            share = ours / dense[masked[1], r["dtype"], r["pass"]]
            others.append(f"{share:.2f} of dense [0.35]")
            judge(f"{name} of dense", share, 0.35, share <= 0.35)
        share = r["share_of_ceiling"]
        rate = f"{100 * share:6.1f} %" if share else f"{r['flops'] / ours * 1e-12:4.0f} TF/s"
        print(f"{name:58} {ours * 1e3:7.3f} ms {rate:>9}  {', '.join(others)}")
    if held or missed:
        print(f"{held} of {held + len(missed)} bars hold")
    for line in missed:
        print(f"missed: {line}")
    for start in ["cold", "warm"]:
        plans = [(r["plan_seconds"], r["op"], r["case"], r["pass"]) for r in results_of(folder, f"plans_{start}_*.json")]
        if plans:
            seconds = sorted(p[0] for p in plans)
            print(f"plans, {start} cache: median {seconds[len(seconds) // 2] * 1e3:.2f} ms, "
                  f"longest {max(plans)[0] * 1e3:.1f} ms ({' '.join(max(plans)[1:])})")


def tables(folder):
    results, rivals = load(folder)
    names = ["efficient", "FA2", "cuDNN"]
    dense, other = {}, []
    for r in results:
        if r["op"] != "attention":
            continue
        seconds = {o["rival"]: o["seconds"] for o in rivals.get((r["op"], r["case"], r["dtype"], r["pass"]), [])}
        rates = {rival: r["flops"] / s * 1e-12 for rival, s in [("Pullback", r["seconds"]["median"]), *seconds.items()]}
        shape = re.fullmatch(r"B(\d+) H(\d+) S(\d+) D(\d+)( causal)?", r["case"])
        if shape and r["dtype"] == "bf16":
            dense.setdefault(r["pass"], {}).setdefault("x".join(shape.groups()[:4]), {})[bool(shape[5])] = rates
        else:
            other.append((r, rates))
    for which, rows in dense.items():
        print(f"\n#### {which.capitalize()}, TFLOP/s (full / causal)\n\n| B×H×S×D | Pullback | {' | '.join(names)} |")
        print("| --- " * (2 + len(names)) + "|")
        for shape, pair in rows.items():
            cells = [" / ".join(f"{pair[c][n]:.0f}" if n in pair.get(c, {}) else "–" for c in (False, True))
                     for n in ["Pullback", *names]]
            print(f"| {shape} | {' | '.join(cells)} |")
    names.append("FlexAttention")
    print(f"\n| case, TFLOP/s | pass | Pullback | {' | '.join(names)} |\n" + "| --- " * (3 + len(names)) + "|")
    for r, rates in other:
        cells = [f"{rates[n]:.0f}" if n in rates else "–" for n in ["Pullback", *names]]
        print(f"| {r['case']}{', f32' if r['dtype'] == 'f32' else ''} | {r['pass']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    (tables if arguments.tables else compare)(arguments.folder)
