"""The floor of bench.py: threads over http.client that ask, decode envelope and reply, and dump one row.  No check.

    python3 .ci/bare_loop.py PORT WORKERS HEAD_FILE     (asks about the texts of ./items.jsonl)
"""
import http.client
import json
import sys
import threading

PORT, WORKERS, HEAD = int(sys.argv[1]), int(sys.argv[2]), open(sys.argv[3]).read()
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer FAKE-0123456789abcdef"}
texts, out, lock = (json.loads(line)["text"] for line in open("items.jsonl")), open("bare.jsonl", "w"), threading.Lock()


def work():
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    while True:
        with lock:
            text = next(texts, None)
        if text is None:
            return
        prompt = '%sThere is 1 item:\n<item id="0123456789ab">%s</item>' % (HEAD, text)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
        connection.request("POST", "/v1/chat/completions", body, HEADERS)
        document = json.loads(connection.getresponse().read())
        reply = document["choices"][0]["message"]["content"]
        row = json.dumps({"event": "attempt", "model": document["model"], "answers": json.loads(reply),
                          "usage": document["usage"], "reply": reply})
        with lock:
            out.write(row + "\n")


threads = [threading.Thread(target=work) for _ in range(WORKERS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
