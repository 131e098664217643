"""The public JSON Schema suite, where it lies beside the checkout: tests of schemas whose keywords are all checked."""
import glob
import json
import os
import sys

sys.path.insert(0, os.getcwd())
import batch_harness as bh  # noqa: E402

ran = failed = 0
for path in sorted(glob.glob("../*/suites/jsonschema/*.json")):
    for group in json.load(open(path, encoding="utf-8")):
        try:
            bh.check_schema(group["schema"], "suite")
        except bh.HarnessError:
            continue
        for test in group["tests"]:
            ran += 1
            if (bh.broken_rule(group["schema"], test["data"]) is None) != test["valid"]:
                failed += 1
                print("%s: %s: %s" % (os.path.basename(path), group["description"], test["description"]))
print("%d tests of the suite run, %d failed" % (ran, failed) if ran else "the suite is not here; skipped")
sys.exit(1 if failed else 0)
