#!/usr/bin/env python3
"""Loads the example `server`: python3 load.py [--url URL] [--requests 64] [--at-once 64] [--tokens 64].

Streams many completions at once; prints tokens per second and times to the first token. Needs only Python.
"""

import argparse
import http.client
import json
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

PROMPT = "Once upon a time there were {} bears who lived in a forest and wanted to see the sea. One day"

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--requests", type=int, default=64)
parser.add_argument("--at-once", type=int, default=64)
parser.add_argument("--tokens", type=int, default=64)
options = parser.parse_args()
address = urllib.parse.urlsplit(options.url).netloc


def request(number):
    """One request: its tokens, and the seconds to the first of them and to the end; None if it fails."""
    body = {
        "prompt": PROMPT.format(number),
        "max_tokens": options.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.monotonic(), None, None
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    if answer.status != 200:
        return failed(number, f"{answer.status} {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return failed(number, event["error"]["message"])
            first = first or time.monotonic() - began
            usage = event.get("usage") or usage
    if usage is None:
        return failed(number, "the stream ended early")
    return usage["completion_tokens"], first, time.monotonic() - began


def failed(number, why):
    # One write, so that lines of several threads do not mix.
    sys.stderr.write(f"request {number}: {str(why).strip()}\n")


def attempt(number):
    try:
        return request(number)
    except (OSError, http.client.HTTPException) as error:
        return failed(number, error)


def percentile(times, share):
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


began = time.monotonic()
with ThreadPoolExecutor(options.at_once) as pool:
    answers = [answer for answer in pool.map(attempt, range(options.requests)) if answer]
seconds = time.monotonic() - began
failures = options.requests - len(answers)
if not answers:
    sys.exit(f"all {failures} requests failed")
tokens = sum(answer[0] for answer in answers)
firsts, ends = [answer[1] for answer in answers], [answer[2] for answer in answers]
print(f"{options.requests} requests, {options.at_once} at once: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s")
print(f"first token: p50 {percentile(firsts, 0.5):.2f} s, p99 {percentile(firsts, 0.99):.2f} s")
print(f"whole answer: p50 {percentile(ends, 0.5):.2f} s, p99 {percentile(ends, 0.99):.2f} s")
if failures:
    sys.exit(f"{failures} requests failed")
