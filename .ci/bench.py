"""Speed as ratios within one run, against the bare floor: ledger appends, and the rerun of a finished ledger.

    python3 .ci/bench.py [ITEMS]
"""
import hashlib
import json
import os
import sys
import tempfile
import time

sys.path.insert(0, os.getcwd())
import batch_harness as bh  # noqa: E402


def least(action, times=5):
    """The least CPU time of an action, in seconds."""
    best = float("inf")
    for _ in range(times):
        started = time.process_time()
        action()
        best = min(best, time.process_time() - started)
    return best


def main(count):
    """Print the ratios for so many items."""
    rows = [json.dumps({"id": n, "text": ("text number %d " % n).ljust(200, "x")}) for n in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with open("items.jsonl", "w") as file:
            file.write("\n".join(rows) + "\n")
        words = ["--input", "items.jsonl", "--ledger", "l.jsonl", "--model", "demo"]
        sys.stdout = sys.stderr = open(os.devnull, "w")
        bh.main(words + ["--batch-size", "20"])
        with open("l.jsonl", "rb") as file:
            row = json.loads(file.readlines()[1])

        def floor():
            for name in ("items.jsonl", "l.jsonl"):
                with open(name, "rb") as file:
                    for line in file:
                        json.loads(line)
                        hashlib.sha256(line).hexdigest()
        rerun = least(lambda: bh.main(words)) / least(floor)
        ledger = bh.Ledger("append.jsonl")
        bare = os.open("bare.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        append = least(lambda: [ledger.append(row) for _ in range(5000)]) / least(
            lambda: [os.write(bare, json.dumps(row).encode() + b"\n") for _ in range(5000)])
        sys.stdout = sys.__stdout__
    print("rerun of a finished ledger: %.2f times reading, json.loads and SHA-256 of the same bytes" % rerun)
    print("append: %.2f times a bare json.dumps and os.write" % append)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50000)
