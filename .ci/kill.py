"""kill -9 at random moments of run, trial, batch job and apply, and a ledger cut at every byte of its last lines.

Each ends with the answers of an undisturbed run, and at most as many calls were made again as were in flight.
"""
import collections
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import test_batch_harness as tests  # noqa: E402

KILLS = int(sys.argv[1]) if len(sys.argv) > 1 else 60           # of each kind
SEED = int(os.environ.get("BATCH_HARNESS_SEED") or random.SystemRandom().randrange(10 ** 9))
dice = random.Random(SEED)
QUICK = ("import sys; sys.path.insert(0, %r); import batch_harness as bh; bh.POLL = 0.02; bh.GRACE = 0.1; bh.BACKOFF = 0.01; "
         "bh.CHUNK = 7; sys.exit(bh.main(sys.argv[1:]))" % ROOT)
os.environ["OPENAI_API_KEY"] = tests.KEY


def started(words):
    return subprocess.Popen([sys.executable, "-c", QUICK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(words):
    run = started(words)
    out, err = run.communicate()
    if run.returncode not in (0, 1) or b"Traceback" in err or b"fault of its own" in err:
        sys.exit("seed %d: %r ended with %d: %s%s" % (SEED, words, run.returncode, out.decode(), err.decode()))
    return run.returncode


def killed_on_the_way(words, longest):
    """Start a command and kill it, again and again, until it finishes by itself; how often it was killed."""
    kills = 0
    while True:
        run = started(words)
        time.sleep(dice.uniform(0.15, longest))
        ended = run.poll() is not None
        run.kill()
        run.communicate()
        if ended:
            break
        kills += 1
    finished(words)
    return kills


def until_enough(proof):
    """Repeat a proof, which gives its kills, on new files; all kills."""
    kills = rounds = 0
    while kills < KILLS:
        rounds += 1
        kills += proof("killed-%d.jsonl" % rounds)
    return kills


def answers(ledger, arm=None):
    found = {}
    with open(ledger, "rb") as file:
        for line in file.read().split(b"\n"):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if row["event"] == "attempt" and row["verdict"] == "ok":
                    for name, answer in row["answers"].items():
                        place = (row.get("arm"), name)
                        if place in found:
                            sys.exit("seed %d: %s was answered twice" % (SEED, place))
                        found[place] = answer
    return found


def spoilt(prompt):
    """What a model says to a prompt; to some of several items nothing of use, the first time and for ever."""
    texts = [text for _, text in tests.asked_in(prompt)]
    return "no" if len(texts) > 1 and any(text.endswith("7") for text in texts) else tests.reply_to_prompt(prompt)


def slow(prompt, number):
    time.sleep(0.01)
    return tests.completion(spoilt(prompt))


def check(what, condition, detail=""):
    if not condition:
        sys.exit("seed %d: %s does not hold %s" % (SEED, what, detail))


def online(command, *more):
    workers, server, again = 4, tests.Endpoint(slow), []
    words = [command, "--input", "items.jsonl", "--labels", "good,bad", "--model", "openai:m", "--base-url", server.base, "--workers",
             str(workers), *more]
    finished([*words, "--ledger", "whole.jsonl"])
    whole = collections.Counter(body["messages"][0]["content"] for _, _, body in server.requests)

    def once(ledger):
        server.requests.clear()
        kills = killed_on_the_way([*words, "--ledger", ledger], 0.5)
        asked = collections.Counter(body["messages"][0]["content"] for _, _, body in server.requests)
        check(command, answers(ledger) == answers("whole.jsonl"))
        check(command + ": the same prompts", set(asked) == set(whole))
        again.append(sum(asked.values()) - sum(whole.values()))
        check(command + ": calls made again", again[-1] <= workers * kills, "%d after %d kills" % (again[-1], kills))
        finished(["audit", "--ledger", ledger, "--input", "items.jsonl"])
        return kills
    kills = until_enough(once)
    server.close()
    print("%s: %d kills in %d runs of %d calls, %d calls made again" % (command, kills, len(again), sum(whole.values()), sum(again)))


def by_jobs(form):
    engine = tests.Engine("7</item>.*</item>|</item>.*7</item>: no", form=form)     # as spoilt says
    os.environ["ANTHROPIC_API_KEY"] = tests.KEY
    words = ["--input", "items.jsonl", "--labels", "good,bad", "--model", "openai:m" if form == "chat" else "anthropic:m", "--base-url",
             engine.base, "--batch-api", "--batch-size", "5"]
    finished([*words, "--ledger", "whole.jsonl"])
    whole = collections.Counter(engine.prompts())

    def once(ledger):
        engine.jobs.clear()
        kills = killed_on_the_way([*words, "--ledger", ledger], 0.5)
        check("jobs", answers(ledger) == answers("whole.jsonl"))
        check("one job and never two", collections.Counter(engine.prompts()) == whole)
        finished(["audit", "--ledger", ledger, "--input", "items.jsonl"])
        return kills
    kills = until_enough(once)
    engine.close()
    print("batch jobs (%s): %d kills in runs of %d requests, none paid twice" % (form, kills, sum(whole.values())))


def applied(count):
    def once(name):
        ledger, posts = name, name + ".db"
        finished(["--input", "items.jsonl", "--labels", "good,bad", "--model", "demo", "--ledger", ledger])
        with contextlib.closing(sqlite3.connect(posts)) as base:
            base.execute("CREATE TABLE posts (id INTEGER PRIMARY KEY, text TEXT, answer TEXT, decided TEXT)")
            base.executemany("INSERT INTO posts (id, text) VALUES (?, ?)", [(n, "text number %d" % n) for n in range(count)])
            base.commit()
        words = ["apply", "--ledger", ledger, "--database", posts, "--table", "posts", "--batch-column", "decided"]
        kills = 0
        for _ in range(30):
            run = started([*words, "--limit", "20"])
            time.sleep(dice.uniform(0.15, 0.35))
            kills += run.poll() is None
            run.kill()
            run.communicate()
        finished(words)
        wanted = {name: answer for (_, name), answer in answers(ledger).items()}
        with contextlib.closing(sqlite3.connect(posts)) as base:
            rows = base.execute("SELECT text, answer FROM posts").fetchall()
        check("apply", all(wanted[tests.bh.item_id(text)] == answer for text, answer in rows))
        with open(ledger, encoding="utf-8") as file:
            noted = [name for row in map(json.loads, file) if row["event"] == "apply" for name in row.get("applied", [])]
        check("apply: each outcome stands once", sorted(noted) == sorted(wanted))
        finished(["audit", "--ledger", ledger])
        return kills
    print("apply: %d kills in runs of %d rows" % (until_enough(once), count))


def cut_everywhere():
    """A ledger that ends at any byte of its last two lines costs those calls, and nothing else."""
    words = ["--input", "few.jsonl", "--labels", "good,bad", "--model", "demo", "--batch-size", "2", "--workers", "1"]
    finished([*words, "--ledger", "few-whole.jsonl"])
    whole = answers("few-whole.jsonl")
    with open("few-whole.jsonl", "rb") as file:
        data = file.read()
    begin = data.rstrip(b"\n").rfind(b"\n", 0, data.rstrip(b"\n").rfind(b"\n")) + 1
    for end in range(begin, len(data)):
        with open("cut.jsonl", "wb") as file:
            file.write(data[:end])
        with contextlib.redirect_stderr(open(os.devnull, "w")), contextlib.redirect_stdout(open(os.devnull, "w")):
            code = tests.bh.main([*words, "--ledger", "cut.jsonl"])
        check("cut at byte %d" % end, code == 0 and answers("cut.jsonl") == whole)
    print("a ledger cut at each of its last %d bytes: the same answers" % (len(data) - begin))


def two_writers_and_a_clock_set_back():
    server = tests.Endpoint(lambda prompt, number: (time.sleep(0.3), tests.completion(tests.reply_to_prompt(prompt)))[1])
    words = ["--input", "few.jsonl", "--labels", "good,bad", "--model", "openai:m", "--base-url", server.base, "--ledger", "two.jsonl"]
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(started(words).wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check("two processes", sorted(codes) == [0, 2], codes)
    back = "import time; real = time.time; time.time = lambda: real() - 86400; " + QUICK
    with open("few.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    check("a clock set back", subprocess.run([sys.executable, "-c", back, *words], capture_output=True).returncode == 0)
    finished(["audit", "--ledger", "two.jsonl", "--input", "few.jsonl"])
    server.close()
    print("two processes on one ledger: one is refused; a clock set back by a day: the ledger holds")


print("seed %d (BATCH_HARNESS_SEED repeats the choices)" % SEED)
with tempfile.TemporaryDirectory() as folder:
    for part, (proof, *words) in enumerate(((online, "run", "--batch-size", "5"), (online, "trial", "--sizes", "1,1,5", "--sample", "60"),
                                            (by_jobs, "chat"), (by_jobs, "messages"), (applied, 400), (cut_everywhere,),
                                            (two_writers_and_a_clock_set_back,))):
        place = os.path.join(folder, str(part))
        os.mkdir(place)
        os.chdir(place)
        for name, count in (("items.jsonl", 400), ("few.jsonl", 7)):
            with open(name, "w") as file:
                file.writelines('{"id": %d, "text": "text number %d"}\n' % (n, n) for n in range(count))
        proof(*words)
    os.chdir(ROOT)
