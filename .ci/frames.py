"""The README's function for frames, inside Ray Data's map_batches and, where Java is, Spark's mapInPandas."""
import importlib.util
import os
import re
import shutil
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT                     # the workers import the file, too
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
    CODE = re.findall(r"```python\n(.*?)```", readme.read(), re.S)[0]
names = {}
exec(compile(CODE, "README", "exec"), names)
judge = names["judge"]
TEXTS = ["text number %d" % number for number in range(40)]


def ask(prompt):
    """Answers by the text's number; the first prompt of each pair is broken where it holds number 3."""
    import json
    import re
    found = re.findall(r'^<item id="([0-9a-f]+)">text number (\d+)</item>$', prompt, re.M)
    if len(found) > 1 and "3" in dict(found).values():
        return "no"
    return json.dumps([{"id": name, "answer": "good" if int(number) % 2 else "bad"} for name, number in found])


def check(where, rows):
    wanted = {text: "good" if number % 2 else "bad" for number, text in enumerate(TEXTS)}
    if rows != wanted:
        sys.exit("%s: other answers: %r" % (where, rows))
    print("%s: %d of %d answers" % (where, len(rows), len(TEXTS)))


def with_ray():
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    answered = ray.data.from_items([{"text": text} for text in TEXTS]).map_batches(
        judge, fn_args=(ask,), batch_size=2, batch_format="pandas")
    check("Ray", {row["text"]: row["answer"] for row in answered.take_all()})
    ray.shutdown()


def with_spark():
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config(
        "spark.sql.execution.arrow.maxRecordsPerBatch", "2").getOrCreate()
    rows = spark.createDataFrame([(text,) for text in TEXTS], "text string")
    answered = rows.mapInPandas(lambda frames: (judge(frame, ask) for frame in frames),
                                "text string, item string, answer string")
    check("Spark", {row["text"]: row["answer"] for row in answered.collect()})
    spark.stop()


for module, needed, run in (("ray", True, with_ray), ("pyspark", shutil.which("java"), with_spark)):
    if needed and importlib.util.find_spec(module):
        run()
    else:
        print("%s: skipped, it is not to be had here" % module)
