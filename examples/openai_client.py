#!/usr/bin/env python3
"""Asks the example `server` through OpenAI's own client: python3 openai_client.py [URL]. Needs `pip install openai`.

Two streams at once, a chat if the model has a template, a stop string, and a refusal.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import openai

client = openai.OpenAI(
    base_url=(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000") + "/v1",
    api_key="none",
    timeout=120,
)
model = client.models.list().data[0].id
print("model:", model)


def stream(prompt):
    """A greedy completion, piece by piece."""
    pieces = client.completions.create(
        model=model, prompt=prompt, max_tokens=32, temperature=0, stream=True
    )
    return "".join(piece.choices[0].text for piece in pieces)


prompts = ["The capital of France is", "Once upon a time"]
with ThreadPoolExecutor() as pool:
    for prompt, text in zip(prompts, pool.map(stream, prompts)):
        print(f"{prompt!r} -> {text!r}")

answer = client.completions.create(model=model, prompt=prompts[0], max_tokens=32, temperature=0, stop=["."])
print("up to the first full stop:", repr(answer.choices[0].text), answer.choices[0].finish_reason)

try:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=64, temperature=0)
    print("chat:", repr(answer.choices[0].message.content), answer.choices[0].finish_reason, answer.usage)
except openai.BadRequestError as error:
    print("no chat:", error.message)

try:
    client.completions.create(model=model, prompt="x", max_tokens=10**6)
except openai.BadRequestError as error:
    print("refused:", error.code, error.message)
