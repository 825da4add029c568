"""Matched startups on a GPU by ``loadpeak ab``, beside an independent sampling of the device.

    python -m benchmarks.ab_gpu CONFIG_JSON [--cap-gib 32] [--pairs 2] [--conf expandable_segments:True]
        [--arm NAME:SETTING …] [--option NAME=JSON …] [--tamper VARIANT=weight …]

The command of all arms is ``benchmarks.startup`` with random weights. Prints the report, then the highest
device use of every startup by loadpeak and by the other process, from the start of the run to ready.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_startups import independent_sampler, recorded

MIB = 1 << 20


def main() -> None:
    """The experiment, its report, the agreement of the samplers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--conf", default="expandable_segments:True")
    parser.add_argument("--arm", action="append", default=[])
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON for LLM(); repeat it")
    parser.add_argument(
        "--tamper", action="append", default=[], help="VARIANT=weight or VARIANT=token: the gate has to fail"
    )
    parser.add_argument("--home", type=Path, default=Path("/tmp/loadpeak-ab"))
    parser.add_argument("--experiment", default="ab-gpu")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "benchmarks.startup", str(arguments.config.absolute()), "--random"]
    command += ["--prompts", "6"]
    command += [part for tamper in arguments.tamper for part in ("--tamper", tamper)]
    command += ["--cap-gib", str(arguments.cap_gib)] if arguments.cap_gib else []
    command += [part for option in arguments.option for part in ("--option", option)]
    loadpeak = [sys.executable, "-c", "from loadpeak.cli import main; main()"]
    ab = [*loadpeak, "ab", "--pairs", str(arguments.pairs), "--experiment", arguments.experiment]
    ab += [part for arm in arguments.arm for part in ("--arm", arm)]
    environ = {**os.environ, "LOADPEAK_HOME": str(arguments.home), "LOADPEAK_PORT": "off"}
    environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if arguments.conf != "default":
        environ["PYTORCH_CUDA_ALLOC_CONF"] = arguments.conf
    ours, theirs = multiprocessing.Pipe()
    sampler = multiprocessing.get_context("spawn").Process(target=independent_sampler, args=(theirs, 0.01))
    sampler.start()
    done = subprocess.run([*ab, "--", *command], env=environ, check=False)
    ours.send("stop")
    readings: list[tuple[float, int]] = ours.recv()
    sampler.join()
    print(f"loadpeak ab: exit status {done.returncode}\n", flush=True)
    subprocess.run([*loadpeak, "report", arguments.experiment], env=environ, check=False)
    print("\n| run | device peak, loadpeak | device peak, independent |\n|---|---|---|")
    for folder in sorted((arguments.home / "runs").iterdir()):
        if folder.is_dir():
            record = recorded(arguments.home, folder.name)
            inside = [used for at, used in readings if record["began_at"] <= at <= record["ready_at"]]
            # Startups of an earlier call, which this one resumed, have none.
            beside = f"{max(inside) / MIB:,.0f}" if inside else "—"
            print(f"| {folder.name} | {record['device'] / MIB:,.0f} | {beside} |")


if __name__ == "__main__":
    main()
