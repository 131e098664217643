"""A million mutated replies, from two seeds that are printed: no wrong answer is accepted, and nothing is raised."""
import os
import random
import subprocess
import sys

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
seeds = [random.SystemRandom().randrange(10 ** 9) for _ in range(2)]
runs = [subprocess.Popen([sys.executable, "test_batch_harness.py", "Mutations"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env=dict(os.environ, BATCH_HARNESS_SEED=str(seed), BATCH_HARNESS_MUTATIONS=str(COUNT // 2))) for seed in seeds]
for seed, run in zip(seeds, runs):
    out = run.communicate()[0].decode()
    print("seed %d: %d mutated replies: %s" % (seed, COUNT // 2, out.strip().splitlines()[-1]))
    if run.returncode:
        sys.exit(out)
