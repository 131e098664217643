"""A million items of 200 characters: memory of the first pass.  Start-up: --help against a bare start with argparse."""
import os
import resource
import subprocess
import sys
import tempfile
import time

LIMIT_MB, LIMIT_START = 400, 9       # a script is compiled at each start: most of the ratio is that


def peak_mb(argv):
    """Peak resident memory of a child process, in MB, and its output."""
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit("%r failed: %s" % (argv, out))
    return usage.ru_maxrss / (1024 if sys.platform != "darwin" else 1 << 20), out


def cpu(argv):
    """The least CPU time of a command over some starts."""
    times = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "million.jsonl")
    with open(path, "w") as file:
        for number in range(1000000):
            file.write('{"id": %d, "text": "%s"}\n' % (number, ("text number %d " % number).ljust(200, "x")))
    started = time.time()
    peak, out = peak_mb([sys.executable, "batch_harness.py", "--input", path, "--model", "demo", "--dry-run"])
    print("a million items: %.0f MB at most, %.1f s" % (peak, time.time() - started))
start = cpu([sys.executable, "batch_harness.py", "--help"])
bare = cpu([sys.executable, "-c", "import argparse"])
print("start-up: %.2f times a bare start with argparse" % (start / bare))
sys.exit(0 if "1000000 items" in out and peak < LIMIT_MB and start / bare < LIMIT_START else 1)
