"""Speed as ratios within one run: whole processes against a bare loop of threads over http.client, and against ideals.

    python3 .ci/bench.py [CALLS]
"""
import asyncio
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.abspath(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, ROOT)
import batch_harness as bh  # noqa: E402

KEY = "FAKE-0123456789abcdef"


# ---- the endpoint, in a process of its own ----

class Endpoint(asyncio.Protocol):
    """Answers every chat request with a good reply, after `delay` seconds, over a kept-alive connection."""

    delay = 0.0

    def connection_made(self, transport):
        self.transport, self.data = transport, b""

    def data_received(self, data):
        self.data += data
        head, _, rest = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is None or len(rest) < int(length.group(1)):
            return
        self.data = b""
        ids = re.findall(rb'<item id=\\"([0-9a-f]+)\\">', rest)
        text = json.dumps([{"id": name.decode(), "answer": "pleased"} for name in ids])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 300, "completion_tokens": 29, "total_tokens": 329}
        body = json.dumps({"id": "c-1", "object": "chat.completion", "created": 1790000000, "model": "m-1",
                           "choices": [choice], "usage": usage}).encode()
        answer = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nDate: Mon, 30 Nov 2026 09:00:00 GMT\r\n"
                  b"X-Request-Id: r-1\r\nContent-Length: %d\r\n\r\n" % len(body)) + body
        if self.delay:
            asyncio.get_running_loop().call_later(self.delay, self.transport.write, answer)
        else:
            self.transport.write(answer)


async def serve(delay, certificate=None):
    Endpoint.delay = float(delay)
    context = None
    if certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
    server = await asyncio.get_running_loop().create_server(Endpoint, "127.0.0.1", 0, backlog=1024, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---- the floor ----

def bare_loop(port, workers, head):
    """Threads over http.client that ask, decode envelope and reply, and dump one row.  No check, no ledger."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + KEY}
    texts, lock = (json.loads(line)["text"] for line in open("items.jsonl")), threading.Lock()
    out = open("bare.jsonl", "w")

    def work():
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with lock:
                text = next(texts, None)
            if text is None:
                return
            prompt = '%s1 item:\n<item id="0123456789ab">%s</item>' % (head, text)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
            connection.request("POST", "/v1/chat/completions", body, headers)
            document = json.loads(connection.getresponse().read())
            reply = document["choices"][0]["message"]["content"]
            row = json.dumps({"event": "attempt", "model": document["model"], "answers": json.loads(reply),
                              "usage": document["usage"], "reply": reply})
            with lock:
                out.write(row + "\n")
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- measuring ----

class Server:
    """An endpoint that is there within a with statement."""

    def __init__(self, delay, certificate=""):
        self.words = [sys.executable, HERE, "serve", str(delay), certificate]

    def __enter__(self):
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE)
        return int(self.process.stdout.readline())

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def spent(argv, **more):
    """CPU seconds, wall seconds and peak MB of a whole process."""
    started = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, **more))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    if status:
        sys.exit("failed: %r" % (argv,))
    return usage.ru_utime + usage.ru_stime, time.monotonic() - started, usage.ru_maxrss / 1024


def harness(port, workers, scheme="http", **more):
    if os.path.exists("l.jsonl"):
        os.remove("l.jsonl")
    words = ["--input", "items.jsonl", "--ledger", "l.jsonl", "--model", "m", "--workers", str(workers),
             "--base-url", "%s://127.0.0.1:%d/v1" % (scheme, port)]
    return spent([sys.executable, os.path.join(ROOT, "batch_harness.py"), *words], OPENAI_API_KEY=KEY, **more)


def items(count):
    with open("items.jsonl", "w") as file:
        for n in range(count):
            text = "text number %d and a few more words to make it a real comment" % n
            file.write(json.dumps({"id": n, "text": text}) + "\n")


def span(ratios):
    return "%.2f (%s)" % (statistics.median(ratios), ", ".join("%.2f" % ratio for ratio in sorted(ratios)))


def endpoint_speed(count):
    items(count)
    with open("head.txt", "w") as file:
        file.write(bh.prompt_head(bh.DEFAULT))
    with Server(0) as port:
        for workers in (1, 16, 64):
            loop = [sys.executable, HERE, "loop", str(port), str(workers), "head.txt"]
            ratios = []
            for _ in range(5):
                floor = spent(loop)[0]
                ratios.append(floor / harness(port, workers)[0])
            print("instant endpoint, %d workers: calls per CPU second are %s of the bare loop's"
                  % (workers, span(ratios)))
        if not shutil.which("openssl"):
            print("over TLS: not measured, there is no openssl command to make a certificate")
            return
        certificate()
        with Server(0, "both.pem") as secure:
            ratios, trust = [], os.path.abspath("cert.pem")
            for _ in range(5):
                plain = harness(port, 16)[0]
                ratios.append(plain / harness(secure, 16, "https", SSL_CERT_FILE=trust)[0])
        print("over TLS, 16 workers: calls per CPU second are %s of the plain figure" % span(ratios))


def certificate():
    """A certificate of a day, and its key, made by openssl."""
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out cert.pem -subj /CN=127.0.0.1 -addext"
    subprocess.run(["openssl", *words.split(), "subjectAltName=IP:127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    with open("both.pem", "w") as file:
        file.write(open("key.pem").read() + open("cert.pem").read())


def reader_speed(count):
    """One call through the harness's own reader of HTTP, and one through http.client's."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + KEY}
    with Server(0) as port:
        client = bh.Client("http://127.0.0.1:%d/v1" % port, 5.0, ["Authorization: Bearer " + KEY], KEY)
        head = client.head("POST", "/chat/completions")
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def bare():
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().read()
        own = least(lambda: [client.exchange(head, body) for _ in range(count)])
        library = least(lambda: [bare() for _ in range(count)])
    print("HTTP: a request and its response take %.2f of http.client's CPU time" % (own / library))


def waiting_speed():
    with Server(0.2) as port:
        for workers in (64, 256):
            items(workers * 40)
            walls = [harness(port, workers)[1] / 8.0 for _ in range(3)]
            print("an endpoint of 200 ms, %d workers: wall time is %s of the ideal" % (workers, span(walls)))


def flatness(count):
    with Server(0) as port:
        peaks = []
        for size in (count, 4 * count):
            items(size)
            peaks.append(harness(port, 16)[2])
    print("memory: %.1f MB at most for %d calls, %.1f MB for %d" % (peaks[0], count, peaks[1], 4 * count))


def least(action, times=5):
    """The least CPU time of an action, in seconds."""
    best = float("inf")
    for _ in range(times):
        started = time.process_time()
        action()
        best = min(best, time.process_time() - started)
    return best


def disk_speed(count):
    with open("items.jsonl", "w") as file:
        for n in range(count):
            file.write(json.dumps({"id": n, "text": ("text number %d " % n).ljust(200, "x")}) + "\n")
    words = ["--input", "items.jsonl", "--ledger", "disk.jsonl", "--model", "demo"]
    sys.stdout = sys.stderr = open(os.devnull, "w")
    bh.main(words + ["--batch-size", "20"])
    with open("disk.jsonl", "rb") as file:
        row = json.loads(file.readlines()[1])

    def floor():
        for name in ("items.jsonl", "disk.jsonl"):
            with open(name, "rb") as file:
                for line in file:
                    json.loads(line)
                    hashlib.sha256(line).hexdigest()
    rerun = least(lambda: bh.main(words)) / least(floor)
    ledger = bh.Ledger("append.jsonl")
    file = os.open("bare.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append = least(lambda: [ledger.append(bh.row_parts(row)) for _ in range(5000)]) / least(
        lambda: [os.write(file, json.dumps(row).encode() + b"\n") for _ in range(5000)])
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    print("append: %.2f times a bare json.dumps and os.write" % append)
    print("rerun of a finished ledger: %.2f times reading, json.loads and SHA-256 of the same bytes" % rerun)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(*filter(None, sys.argv[2:])))
    elif sys.argv[1:2] == ["loop"]:
        bare_loop(int(sys.argv[2]), int(sys.argv[3]), open(sys.argv[4]).read())
    else:
        calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10000
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            reader_speed(calls // 5)
            endpoint_speed(calls)
            waiting_speed()
            flatness(calls)
            disk_speed(5 * calls)
            os.chdir(ROOT)
