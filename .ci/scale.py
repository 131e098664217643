"""A million items of 200 characters: freeze, run, rerun, report, export, audit, each against a bare floor; start-up.

The floor reads the same files once: lines, json.loads and SHA-256 of the same bytes, in a process of its own.
"""
import os
import subprocess
import sys
import tempfile
import time

ITEMS = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
LIMIT_START = 9                         # a script is compiled at each start: most of the ratio is that
# Of CPU time against the floor, and bytes an item beyond a process that does nothing.
LIMITS = {"dry run": (4, 150), "rerun": (3, 150), "report": (4, 450), "export": (9, 250), "audit": (16, 450)}
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


def cpu(argv):
    """The least CPU time of a command over some starts."""
    return min(measured(argv)[0] for _ in range(15))


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
        floor = measured([sys.executable, "-c", FLOOR, *files])[0]
        started = time.time()
        seconds, peak, out = measured([sys.executable, "batch_harness.py", *words])
        each = (peak - empty) / ITEMS
        print("%-8s %.2f times the floor, %.0f bytes an item beyond an idle start (%.1f s)" % (
            name, seconds / floor, each, time.time() - started))
        if name in LIMITS and (seconds / floor > LIMITS[name][0] or each > LIMITS[name][1]):
            print("  beyond the limits of %s: %r" % (name, LIMITS[name]))
            failed = True
start = cpu([sys.executable, "batch_harness.py", "--help"])
bare = cpu([sys.executable, "-c", "import argparse"])
print("start-up: %.2f times a bare start with argparse" % (start / bare))
sys.exit(1 if failed or start / bare > LIMIT_START else 0)
