"""The official clients talk to the fake servers of the tests, so that the fakes are known to be true; they send what
the harness sends.  Run with a Python that has the packages openai and anthropic.

    python .ci/peers.py
"""
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import anthropic  # noqa: E402
import openai  # noqa: E402

import batch_harness as bh  # noqa: E402
import test_batch_harness as fakes  # noqa: E402

done = []


def check(what, holds):
    done.append(bool(holds))
    print("%s %s" % ("ok  " if holds else "FAIL", what))


def caught(call, kind):
    try:
        call()
    except kind as error:
        return error
    return None


def messages(prompt):
    return [{"role": "user", "content": prompt}]


def harness_request(model, base, *more):
    """The headers and body that the harness sends for one item."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "i.txt"), "w") as file:
            file.write("It works.\n")
        subprocess.run([sys.executable, os.path.join(ROOT, "batch_harness.py"), "--input", "i.txt", "--model", model, "--base-url", base, *more],
                       cwd=folder, capture_output=True, check=False, env=dict(os.environ, OPENAI_API_KEY="k", ANTHROPIC_API_KEY="k"))


def main():
    item = bh.Item("It works.")
    prompt, schema = bh.build_prompt([item]), bh.reply_schema(bh.load_task({}, "keyed"), [item.id])
    script = {"came": None}
    server = fakes.Endpoint(lambda prompt, number: script["came"] or script["good"](fakes.reply_to_prompt(prompt)))

    client = openai.OpenAI(api_key="k", base_url=server.base, max_retries=0)
    script["good"] = fakes.completion
    structure = bh.APIS["chat"].structure(schema)
    came = client.chat.completions.create(model="m", messages=messages(prompt), max_completion_tokens=9, **structure)
    check("openai: the fake's completion is read", came.choices[0].finish_reason == "stop" and came.usage.prompt_tokens == 40 and came.model == "served-1")
    check("openai: its content is the reply", bh.validate([item], came.choices[0].message.content).code == "ok")
    theirs = server.requests[-1]
    harness_request("openai:m", server.base, "--max-tokens", "9", "--structured")
    ours = server.requests[-1]
    ours[2]["messages"] = theirs[2]["messages"]         # a keyed task has another prompt
    check("openai: the harness sends the same body, and that no stream is wanted", ours[2] == {**theirs[2], "stream": False})
    check("openai: to the same path, with the same key and kind", ours[0] == theirs[0] and all(
        {n.lower(): v for n, v in ours[1].items()}[name] == {n.lower(): v for n, v in theirs[1].items()}[name] for name in ("authorization", "content-type")))
    for status, body, kind in (
            (400, fakes.error_body(message="x", code="context_length_exceeded", param="messages", type="invalid_request_error"), openai.BadRequestError),
            (401, fakes.error_body(message="x", code="invalid_api_key"), openai.AuthenticationError), (403, fakes.error_body(message="x"), openai.PermissionDeniedError),
            (404, fakes.error_body(message="x", code="model_not_found"), openai.NotFoundError), (422, b'{"detail": []}', openai.UnprocessableEntityError),
            (429, fakes.error_body(message="x", type="insufficient_quota"), openai.RateLimitError), (500, b"<html>", openai.InternalServerError)):
        script["came"] = (status, body, {"Retry-After": "3"})
        error = caught(lambda: client.chat.completions.create(model="m", messages=messages(prompt)), kind)
        given = json.loads(body)["error"] if body.startswith(b'{"error') else {}
        check("openai: HTTP %d is a %s with the fake's code" % (status, kind.__name__), error and error.code == given.get("code") and (
            error.type == given.get("type") and error.response.headers["retry-after"] == "3"))
    script["came"] = None

    client = anthropic.Anthropic(api_key="k", base_url=server.base[:-3], max_retries=0)
    script["good"] = fakes.message
    structure = bh.APIS["messages"].structure(schema)
    came = client.messages.create(model="m", max_tokens=9, messages=messages(prompt), **structure)
    check("anthropic: the fake's message is read", came.stop_reason == "end_turn" and came.usage.input_tokens == 40 and came.model == "served-2")
    check("anthropic: its text block is the reply", bh.validate([item], came.content[0].text).code == "ok")
    theirs = server.requests[-1]
    harness_request("anthropic:m", server.base[:-3], "--max-tokens", "9", "--structured")
    ours = server.requests[-1]
    ours[2]["messages"] = theirs[2]["messages"]
    check("anthropic: the harness sends the same body", ours[2] == theirs[2])
    check("anthropic: to the same path, under the same version", ours[0] == theirs[0] and
          ours[1]["anthropic-version"] == {n.lower(): v for n, v in theirs[1].items()}["anthropic-version"])
    for status, name, kind in ((400, "invalid_request_error", anthropic.BadRequestError), (401, "authentication_error", anthropic.AuthenticationError),
                               (403, "permission_error", anthropic.PermissionDeniedError), (404, "not_found_error", anthropic.NotFoundError),
                               (429, "rate_limit_error", anthropic.RateLimitError), (529, "overloaded_error", anthropic.InternalServerError)):
        script["came"] = (status, json.dumps({"type": "error", "error": {"type": name, "message": "x"}, "request_id": "req_1"}).encode(), {})
        error = caught(lambda: client.messages.create(model="m", max_tokens=9, messages=messages(prompt)), kind)
        check("anthropic: HTTP %d is a %s" % (status, kind.__name__), error and error.body["error"]["type"] == name)
    server.close()
    print("openai %s, anthropic %s: %d of %d hold" % (openai.__version__, anthropic.__version__, sum(done), len(done)))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
