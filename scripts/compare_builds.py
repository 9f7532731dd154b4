#!/usr/bin/env python3
"""Times builds of the library beside each other, in turns, on the cases of scan.py.

  compare_builds.py OP NAME=LIBRARY NAME=LIBRARY ... [--device cpu] [--match WORD ...] [--rounds N]

A line a case and pass: each build's least µs of all rounds, and its ratio to the first build's. A build that is
only now and then faster shows in --spread, which prints the rounds. PYTHONPATH has to lead to the package, and
LIBRARY is a libpullback.so, whose kernels are compiled before anything is timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

SCAN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scan.py")


def scan(library, folder, arguments, *more):
    """A process of scan.py with a build, whose kernels are kept apart from the other builds'."""
    environment = {**os.environ, "PULLBACK_LIBRARY": library, "PULLBACK_CACHE_DIR": os.path.join(folder, "kernels")}
    if arguments.device == "cpu":
        environment |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "4294967296")
    command = [sys.executable, SCAN, arguments.op, "--device", arguments.device, "--match", *arguments.match, *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def finish(processes):
    for process in processes:
        if process.wait() != 0:
            sys.exit(f"scan.py ended with status {process.returncode}")


def measure(builds, arguments, root):
    """{build: {case: [(forward, backward) of each round]}}"""
    folders = {name: os.path.join(root, name) for name in builds}
    for folder in folders.values():
        os.mkdir(folder)
    if arguments.device == "cuda":
        count = min(os.cpu_count() or 1, 8)
        for name, library in builds.items():
            for process in [scan(library, folders[name], arguments, "--warm", f"{i}/{count}") for i in range(count)]:
                process.wait()  # what is not compiled then, the first round does
    times = {name: {} for name in builds}
    for _ in range(arguments.rounds):
        for name, library in builds.items():
            path = os.path.join(folders[name], "times.json")
            finish([scan(library, folders[name], arguments, "--json", path)])
            with open(path) as file:
                for case, both in json.load(file).items():
                    times[name].setdefault(case, []).append(both)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["attention", "block_softmax", "entmax", "segment"])
    parser.add_argument("builds", nargs="+", metavar="NAME=LIBRARY")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--match", nargs="+", default=[""], help="only cases with one of these in their names")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spread", action="store_true", help="all rounds")
    arguments = parser.parse_args()
    builds = {name: os.path.abspath(path) for name, path in (build.split("=", 1) for build in arguments.builds)}
    with tempfile.TemporaryDirectory() as root:
        times = measure(builds, arguments, root)
    first = next(iter(builds))
    for case in times[first]:
        for which, direction in enumerate(("forward", "backward")):
            columns = []
            for name in builds:
                rounds = [both[which] for both in times[name].get(case, [])]
                if not rounds:
                    columns.append(f"{name} has none")
                    continue
                ratio = min(rounds) / min(both[which] for both in times[first][case])
                shown = " ".join(f"{t:.0f}" for t in rounds) if arguments.spread else f"{min(rounds):.0f}"
                columns.append(f"{name} {shown} µs {ratio:.3f}")
            print(f"{case:44} {direction:8}  {'  '.join(columns)}")


if __name__ == "__main__":
    main()
