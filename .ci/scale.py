"""A million items of 200 characters: freeze, run, rerun, report, export, audit, each against a bare floor; start-up.

The floor reads the same files once: lines, json.loads and SHA-256 of the same bytes, in a process of its own.  It and
the command run in turns, and the median of their ratios is judged, so that what else the machine does hits both.
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time

ITEMS = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
TURNS = 3
# A script is compiled at each start: that is most of the ratio, 4.8 of 7.0 on 3.11 without site, 5.2 of 6.7 on 3.13.
LIMIT_START = 8.75
# Of CPU time against the floor, to which a busy machine may add a quarter, and bytes an item beyond a process that does
# nothing.
LIMITS = {"dry run": (4, 150), "rerun": (3, 150), "report": (6, 450), "export": (12, 250), "audit": (16, 450)}
FLOOR = """
import hashlib, json, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
            hashlib.sha256(line).digest()
"""


def measured(argv):
    """CPU seconds and peak memory, in bytes, of a child process, and its output."""
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit("%r failed: %s" % (argv, out))
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), out


def beside(argv, floor, turns):
    """The median ratio of a command's CPU time to its floor's, run in turns; the command's least peak memory."""
    ratios, peaks = [], []
    for _ in range(turns):
        least = measured(floor)[0]
        seconds, peak, _ = measured(argv)
        ratios.append(seconds / least)
        peaks.append(peak)
    return statistics.median(ratios), min(peaks)


failed = False
with tempfile.TemporaryDirectory() as folder:
    path, ledger = os.path.join(folder, "million.jsonl"), os.path.join(folder, "ledger.jsonl")
    with open(path, "w") as file:
        for number in range(ITEMS):
            file.write('{"id": %d, "text": "%s"}\n' % (number, ("text number %d " % number).ljust(200, "x")))
    ask = ["--input", path, "--model", "demo", "--labels", "good,bad", "--batch-size", "20", "--ledger", ledger]
    empty = measured([sys.executable, "batch_harness.py", "--version"])[1]
    steps = [("dry run", [*ask, "--dry-run"], [path]), ("run", ask, [path, path]), ("rerun", ask, [path, ledger]),
             ("report", ["report", "--ledger", ledger], [ledger]),
             ("export", ["export", "--input", path, "--ledger", ledger, "--output", os.path.join(folder, "out.jsonl")],
              [path, ledger]), ("audit", ["audit", "--ledger", ledger], [ledger])]
    for name, words, files in steps:
        started, turns = time.time(), TURNS if name in LIMITS else 1     # what is not judged, the run, happens once
        ratio, peak = beside([sys.executable, "batch_harness.py", *words], [sys.executable, "-c", FLOOR, *files], turns)
        each = (peak - empty) / ITEMS
        print("%-8s %.2f times the floor, %.0f bytes an item beyond an idle start (%.1f s a turn)" % (
            name, ratio, each, (time.time() - started) / turns))
        if name in LIMITS and (ratio > LIMITS[name][0] or each > LIMITS[name][1]):
            print("  beyond the limits of %s: %r" % (name, LIMITS[name]))
            failed = True
start, _ = beside([sys.executable, "batch_harness.py", "--help"], [sys.executable, "-c", "import argparse"], 15)
print("start-up: %.2f times a bare start with argparse" % start)
sys.exit(1 if failed or start > LIMIT_START else 0)
